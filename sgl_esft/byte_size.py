"""Amounts of memory as people write them: 64GB is 64 * 10^9 bytes, 64GiB is 64 * 2^30.

flag -> [parse_bytes] -> bytes -> [gigabytes] -> table
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from sgl_esft.errors import ConfigError

_UNITS: Final = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([A-Za-z]+)", re.ASCII)


def parse_bytes(text: str, flag: str) -> int:
    """The bytes that `text` means, rounded down to whole ones, at least 1.

    Raises ConfigError, naming `flag`, for anything but a positive number and one of the units:
    "64G" and "64gb" are refused because some readers take them for 10^9 and some for 2^30.
    """
    found = _SIZE.fullmatch(text)
    if found is None or found[2] not in _UNITS:
        raise ConfigError(
            f"{flag} is {text!r}, not a number and one of {', '.join(_UNITS)} (64GB is 64 * 10^9 "
            "bytes, 64GiB is 64 * 2^30)."
        )
    num_bytes = int(Decimal(found[1]) * _UNITS[found[2]])
    if num_bytes < 1:
        raise ConfigError(f"{flag} is {text!r}: it must be at least 1B.")
    return num_bytes


def gigabytes(num_bytes: float) -> str:
    """`31.41 GB`, in units of 10^9 bytes; below a tenth of that in MB of 10^6."""
    if abs(num_bytes) < 10**8:
        return f"{num_bytes / 10**6:,.2f} MB"
    return f"{num_bytes / 10**9:,.2f} GB"


def mebibytes(num_bytes: int) -> str:
    """`13MiB`, rounded up: what `parse_bytes` takes."""
    return f"{-(-num_bytes // (1 << 20))}MiB"
