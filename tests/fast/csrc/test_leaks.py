"""Loading and unloading 100,000 times leaves a process as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fast.csrc.simulator import CALLS
from tests.support.processes import run_module

RSS_SLACK_KIB = 1024  # the allocators' own; a leak of one page a cycle would be 6 GB


def check(backend: str, cycles: int, **environment: str) -> None:
    found = run_module(
        "tests.fast.csrc.leak_cycles",
        LEAK_BACKEND=backend,
        LEAK_CYCLES=str(cycles),
        **environment,
    )
    before, after = found["before"], found["after"]
    grown = after.pop("rss_kib") - before.pop("rss_kib")
    assert after == before
    assert before["used_pages"] > 0  # a neighbour was there all the time
    assert grown < RSS_SLACK_KIB


@pytest.mark.slow
def test_the_host_holds_what_it_held() -> None:
    check("host", 100_000)


@pytest.mark.parametrize("vendor", CALLS)
def test_vendor_backends_hold_what_they_held(vendor: str, simulators: dict[str, Path]) -> None:
    check(vendor, 10_000, LEAK_LIBRARY=str(simulators[vendor]))
