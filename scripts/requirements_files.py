"""What `requirements/` says, as data: the pins, and what of SGLang is left out and why.

requirements/ -> [requirements_files] -> pin, check_install, tests/repo/test_dependencies
In:  the files of `requirements/`.  Out: `{canonical name: version}`, `{canonical name: reason}`.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).resolve().parent.parent / "requirements"
CPU_FILES = ("torch-cpu.txt", "engine.txt", "cpu.txt")
CUDA_PREFIXES = ("nvidia-", "cuda-", "flashinfer-", "nvshmem")


class PinError(ValueError):
    """A line of a pin file is not `name==version`. Policy: fix the file."""


def read_pins(*names: str) -> dict[str, str]:
    """Exact pins of these files of `requirements/`, by canonical name."""
    return parse_pins([line for name in names for line in (FOLDER / name).read_text().splitlines()])


def parse_pins(lines: list[str]) -> dict[str, str]:
    """`name==version` lines to a mapping; anything looser than `==` is refused."""
    pins: dict[str, str] = {}
    for line in lines:
        text = line.split("#")[0].strip()
        if not text:
            continue
        requirement = Requirement(text)
        specifiers = list(requirement.specifier)
        if len(specifiers) != 1 or specifiers[0].operator != "==":
            raise PinError(f"{line!r} is not an exact pin; write name==version")
        pins[canonicalize_name(requirement.name)] = specifiers[0].version
    return pins


def read_left_out() -> dict[str, str]:
    """Requirements of SGLang that a CPU install leaves out, with the reason of each."""
    return _reasons("left_out")


def read_held() -> dict[str, str]:
    """Requirements of SGLang that are pinned at a version it does not ask for, with the reasons."""
    return _reasons("held")


def _reasons(table: str) -> dict[str, str]:
    found = tomllib.loads((FOLDER / "left_out.toml").read_text())[table]
    return {canonicalize_name(name): reason for name, reason in found.items()}


def is_cuda_distribution(name: str) -> bool:
    """Whether a distribution of this name has no business on a machine without CUDA."""
    return canonicalize_name(name).startswith(CUDA_PREFIXES)
