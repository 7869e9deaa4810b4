"""Amounts of memory: what is read, what is refused, how they are shown."""

import pytest

from sgl_esft.byte_size import gigabytes, parse_bytes
from sgl_esft.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("64GB", 64 * 10**9),
        ("64GiB", 64 << 30),
        ("2MiB", 2 << 20),
        ("4.88 GiB", 5_239_860_101),
        ("1B", 1),
        ("80TB", 80 * 10**12),
        ("0.5KiB", 512),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text, "--x") == num_bytes


@pytest.mark.parametrize(
    "text",
    [
        *("", "64", "GB", "64G", "64gb", "64 gib", "-1GB", "+1GB", "1e3GB", "64,5GB", "64GB "),
        *(" 64GB", "64  GB", "1.GB", ".5GB", "nanGB", "٣GB", "1_000GB", "64GBs", "64GB\n"),
        "9" * 40 + "GB",
    ],
)
def test_typos_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--device-memory is "):
        parse_bytes(text, "--device-memory")


@pytest.mark.parametrize("text", ["0GB", "0.4B", "0.0MiB"])
def test_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="at least 1B"):
        parse_bytes(text, "--x")


def test_shown() -> None:
    assert gigabytes(31_412_968_448) == "31.41 GB"
    assert gigabytes(17_301_504) == "17.30 MB"
    assert gigabytes(0) == "0.00 MB"
    assert gigabytes(1_342_052_838_400) == "1,342.05 GB"
