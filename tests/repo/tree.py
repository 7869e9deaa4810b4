"""The files the rules are about: those git tracks, or would if they were added.

working tree -> [tree] -> test_hygiene, test_style_budget, test_imports_dag
"""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Folder of the checkout -> the name it is imported by.
PACKAGES = {
    "sgl_esft": "sgl_esft",
    "sgl_elastic": "sgl_elastic",
    "kernels": "sgl_esft_kernels",
    "launch": "sgl_esft_launch",
}


@cache
def project_files() -> tuple[str, ...]:
    """Paths relative to the root, without what .gitignore names. Needs a git checkout."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    found = sorted(path for path in listing.stdout.split("\0") if path)
    return tuple(path for path in found if (ROOT / path).is_file())


def python_files(*folders: str) -> list[str]:
    """Python files under these top-level folders."""
    return [
        path for path in project_files() if path.endswith(".py") and path.split("/")[0] in folders
    ]


def module_name(path: str) -> str:
    """`kernels/checks.py` -> `sgl_esft_kernels.checks`; a package is named by its folder."""
    parts = path.removesuffix(".py").split("/")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join([PACKAGES[parts[0]], *parts[1:]])
