"""What pyproject.toml cannot say: two folders have longer installed names, and csrc/ is native.

`kernels/` is `sgl_esft_kernels` and `launch/` is `sgl_esft_launch`. The folders keep their short
names for readers; as installed names those are too generic to own (a package called kernels is on
the public index, and SGLang knows it).

A wheel holds what csrc/ builds. An editable install does not: `make setup` has installed ./csrc
beside it, which costs only what has changed.
"""

import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

RENAMED = {"sgl_esft_kernels": "kernels", "sgl_esft_launch": "launch"}


class BuildNative(build_ext):
    """CMake in place of a list of sources: sgl_vmm, and sgl_reroute for the torch that is here."""

    def run(self) -> None:
        """Build csrc/ and install it, stripped, where the wheel is put together."""
        if self.editable_mode:
            return
        import cmake
        import ninja
        import pybind11

        def run_cmake(*arguments: str | Path) -> None:
            subprocess.check_call([Path(cmake.CMAKE_BIN_DIR) / "cmake", *arguments])

        build, installed = Path(self.build_temp).resolve(), Path(self.build_lib).resolve()
        run_cmake(
            *("-S", "csrc", "-B", build, "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={Path(ninja.BIN_DIR) / 'ninja'}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        )
        run_cmake("--build", build)
        run_cmake("--install", build, "--strip", "--prefix", installed)


setup(
    packages=[
        *find_packages(include=["sgl_esft*", "sgl_elastic*"]),
        *RENAMED,
        *(f"{name}.{inner}" for name, folder in RENAMED.items() for inner in find_packages(folder)),
    ],
    package_dir=RENAMED,
    ext_modules=[Extension("sgl_vmm", [])],
    cmdclass={"build_ext": BuildNative},
)
