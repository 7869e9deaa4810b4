"""A browser of this machine: for the tests of the page at /dashboard, and for its pictures.

browsers.txt -> [find], browser.sh
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

NAMES: Final = tuple(Path(__file__).with_name("browsers.txt").read_text().split())


class NoBrowserError(RuntimeError):
    """None of NAMES is on the PATH."""


def find() -> str:
    """The path of the first that is there. Raises NoBrowserError."""
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        raise NoBrowserError(f"none of {', '.join(NAMES)} is on the PATH: run `make browser`")
    return path
