"""Build csrc/ with nothing but a C++ compiler, for a GPU machine that has no CMake, Ninja or pip.

    csrc/    -> c++  -> build/gpu/<hash of its sources>/: sgl_vmm (the module), the tests on a
                        device, the contract simulators
    kernels/, launch/ -> link -> the same folder, under their installed names
    pyproject.toml   -> there too: the doors by which SGLang finds the plugin

csrc/CMakeLists.txt is the build of this project; this is only for bench/gpu/run.py. Needed: a C++17
compiler, Python.h, and pybind11's headers, which torch brings along.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
RENAMED = {"sgl_esft_kernels": "kernels", "sgl_esft_launch": "launch"}  # as they are installed
VENDORS = ("cuda", "acl")
# The tests that know devices, compiled with a device's page (csrc/tests/device.h).
DEVICE_TESTS = ("virtual_tensor", "address_range", "copies", "vendor_backends", "stress")
DEVICE_PAGE_BYTES = 2 << 20

_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-pthread", f"-I{CSRC}")


class CannotBuildError(Exception):
    """What is missing, in words for a person."""


def build() -> Path:
    """The folder with everything, built at most once for the same sources."""
    folder = ROOT / "build" / "gpu" / _hash_of_sources()
    link_renamed(folder)
    write_doors(folder)
    if (folder / "complete").exists():
        return folder
    includes = python_includes()
    compiler = find_compiler()
    core = [*sorted(CSRC.glob("*.cpp")), *sorted((CSRC / "vmm").glob("*.cpp"))]
    core.remove(CSRC / "bindings.cpp")
    core_objects = [folder / f"{path.stem}.o" for path in core]
    _compile_all(compiler, [[f, "-c", "-o", o] for f, o in zip(core, core_objects, strict=True)])
    _compile_all(
        compiler,
        [
            [CSRC / "bindings.cpp", *includes, *core_objects, "-shared", "-o", module(folder)],
            *(_simulator(folder, vendor) for vendor in VENDORS),
            *(_test(folder, name, core_objects) for name in DEVICE_TESTS),
        ],
    )
    (folder / "complete").touch()
    return folder


def link_renamed(folder: Path) -> None:
    """Makes `import sgl_esft_kernels`, and the launcher, work where `folder` is on the path."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in RENAMED.items():
        link = folder / name
        if not link.is_symlink():
            link.symlink_to(ROOT / source)


def write_doors(folder: Path) -> None:
    """SGLang finds plugins by a distribution's metadata; here nothing is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = project["name"].replace("-", "_")
    info = folder / f"{name}-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    version = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(version)
    doors = ""
    for group, entries in project["entry-points"].items():
        doors += f"[{group}]\n" + "".join(f"{key} = {at}\n" for key, at in entries.items())
    (info / "entry_points.txt").write_text(doors)


def module(folder: Path) -> Path:
    """The extension module's file."""
    return folder / f"sgl_vmm{sysconfig.get_config_var('EXT_SUFFIX')}"


def simulator(folder: Path, vendor: str) -> Path:
    """A contract simulator's library."""
    return folder / f"libsgl_vmm_{vendor}_simulator.so"


def test_executable(folder: Path, name: str) -> Path:
    """One of DEVICE_TESTS."""
    return folder / f"test_{name}"


def find_compiler() -> str:
    """$CXX, c++ or g++."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise CannotBuildError("a C++17 compiler is needed: install g++, or name one with CXX=")


def python_includes() -> list[str]:
    """Flags for Python.h and pybind11's headers."""
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").exists():
        raise CannotBuildError(f"{python}/Python.h is missing: install python3-dev")
    try:
        import pybind11

        pybind = Path(pybind11.get_include())
    except ImportError:
        pybind = _torch_includes()
    if not (pybind / "pybind11" / "pybind11.h").exists():
        raise CannotBuildError("pybind11's headers are needed: install pybind11, or torch")
    return [f"-I{python}", f"-I{pybind}"]


def _torch_includes() -> Path:
    try:
        import torch
    except ImportError as error:
        raise CannotBuildError("torch with CUDA is needed, and is not installed") from error
    return Path(torch.__file__).parent / "include"


def _simulator(folder: Path, vendor: str) -> list[Path | str]:
    sources = CSRC / "tests" / "simulators"
    both = [sources / f"{vendor}_simulator.cpp", sources / "simulator.cpp"]
    return [*both, "-shared", "-o", simulator(folder, vendor)]


def _test(folder: Path, name: str, core: Sequence[Path]) -> list[Path | str]:
    macros = [f'-DSGL_VMM_{v.upper()}_SIMULATOR="{simulator(folder, v)}"' for v in VENDORS]
    page = f"-DSGL_VMM_TEST_PAGE_BYTES=(std::size_t{{{DEVICE_PAGE_BYTES}}})"
    source = CSRC / "tests" / f"test_{name}.cpp"
    return [source, *macros, page, *core, "-ldl", "-o", test_executable(folder, name)]


def _compile_all(compiler: str, jobs: Sequence[Sequence[Path | str]]) -> None:
    """All jobs, as many at once as there are cores."""

    def compile_one(job: Sequence[Path | str]) -> None:
        command = [compiler, *_FLAGS, *map(str, job)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotBuildError(f"compiling {job[0]} failed:\n{done.stderr[-4000:]}")

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(compile_one, jobs))


def _hash_of_sources() -> str:
    digest = hashlib.sha256(sysconfig.get_python_version().encode())
    for path in _sources():
        digest.update(f"{path.relative_to(CSRC)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _sources() -> list[Path]:
    """What `build` compiles or includes; csrc/ holds more than that."""
    tests = CSRC / "tests"
    folders = [CSRC, CSRC / "vmm", tests / "simulators"]
    found = [each for folder in folders for each in folder.iterdir() if each.suffix != ".txt"]
    found += [*tests.glob("*.h"), *(tests / f"test_{name}.cpp" for name in DEVICE_TESTS)]
    return sorted(each for each in found if each.suffix in (".cpp", ".h"))
