"""The README's support table: all of it is there, each cell has its test, and none says too much.

    README.md -> [rows] -> tests/, bench/results, sgl_esft/support.py

docs/cuda.md's table of what was shown names tests in the same way.
"""

from __future__ import annotations

import re
from itertools import product
from typing import NamedTuple

import pytest

from sgl_esft.support import ELASTIC_DEVICES, MOE_BACKENDS, WEAVING_DEVICES
from tests.repo.docs.blocks import README
from tests.repo.tree import ROOT

PARTS = ("weaving", "virtual memory", "rerouting", "elastic")
DEVICES = {"CPU": "cpu", "CUDA": "cuda", "Ascend": "npu"}
TEST = re.compile(r"`((?:fast|server|full)/[\w/]+\.py)`")
RESULT = re.compile(r"`(bench/results/\w+\.json)`")


class Row(NamedTuple):
    """One part on one kind of device; three classes of evidence, and what a launch does."""

    part: str
    on: str
    ran: str
    simulated: str
    compiled: str
    today: str

    @property
    def evidence(self) -> tuple[str, str, str]:
        return self.ran, self.simulated, self.compiled


def rows_of(text: str) -> list[Row]:
    found = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| "))
    return [Row(*cells) for cells in found if len(cells) == 6 and cells[1] in DEVICES]


ROWS = rows_of(README.read_text(encoding="utf-8"))


def is_cell_shown(cell: str) -> bool:
    """Whether it claims nothing, or names tests and results that exist."""
    named = [ROOT / "tests" / each for each in TEST.findall(cell)]
    named += [ROOT / each for each in RESULT.findall(cell)]
    return cell == "-" or (bool(named) and all(each.is_file() for each in named))


def test_each_part_has_a_row_on_each_device() -> None:
    assert [(row.part, row.on) for row in ROWS] == list(product(PARTS, DEVICES))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.part} {row.on}")
def test_a_claim_has_its_test(row: Row) -> None:
    assert all(map(is_cell_shown, row.evidence)), row


def test_nothing_ran_on_a_device_that_no_result_is_of() -> None:
    measured = {
        "CPU": True,
        "CUDA": any((ROOT / "bench" / "results").glob("gpu*.json")),
        "Ascend": False,
    }
    for row in ROWS:
        assert measured[row.on] or row.ran == "-", row


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.part} {row.on}")
def test_refused_is_what_the_launcher_refuses(row: Row) -> None:
    device = DEVICES[row.on]
    allowed = WEAVING_DEVICES & ELASTIC_DEVICES if row.part == "elastic" else WEAVING_DEVICES
    assert ("refused" in row.today) == (device not in allowed)


def test_a_device_that_weaves_has_a_backend() -> None:
    assert {device for device, backends in MOE_BACKENDS.items() if backends} == WEAVING_DEVICES
    assert set(MOE_BACKENDS) == set(DEVICES.values()) >= ELASTIC_DEVICES


def test_tests_that_the_page_of_cuda_names_exist() -> None:
    named = TEST.findall((ROOT / "docs" / "cuda.md").read_text(encoding="utf-8"))
    assert len(named) > 6
    assert [each for each in named if not (ROOT / "tests" / each).is_file()] == []


def test_the_checks_can_fail() -> None:
    assert not is_cell_shown("yes")
    assert not is_cell_shown("interpreted, `fast/kernels/test_of_old.py`")
    assert not is_cell_shown("one H100, `bench/results/gpu_of_old.json`")
    assert is_cell_shown("one H100, `bench/results/gpu_check.json`")
    assert is_cell_shown("PTX, `fast/kernels/test_reroute_triton.py`")
    (row,) = rows_of(
        "| weaving | CUDA | - | - | - | starts |\n| a | b |\n| x | y | - | - | - | - |"
    )
    assert row == Row("weaving", "CUDA", "-", "-", "-", "starts")
