"""Who leaves host memory: the fewest, least recently used first, and nobody in use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_esft.errors import AdapterTooLargeError, OutOfHostMemoryError
from sgl_esft.lifecycle.room import HostEntry, HostLimits, plan_evictions

ENTRIES = [
    HostEntry("oldest", 10, True),
    HostEntry("busy", 10, False),
    HostEntry("newest", 10, True),
]


@pytest.mark.parametrize(
    ("num_bytes", "limits", "leaving"),
    [
        (10, HostLimits(), []),
        (10, HostLimits(budget_bytes=40), []),
        (11, HostLimits(budget_bytes=40), ["oldest"]),
        (21, HostLimits(budget_bytes=40), ["oldest", "newest"]),
        (1, HostLimits(max_names=4), []),
        (1, HostLimits(max_names=3), ["oldest"]),
        (1, HostLimits(max_slots=2), ["oldest", "newest"]),
    ],
)
def test_the_fewest_leave(num_bytes: int, limits: HostLimits, leaving: list[str]) -> None:
    assert plan_evictions(ENTRIES, "new", num_bytes, limits) == leaving


def test_old_versions_take_bytes_and_slots_but_no_name() -> None:
    draining = [HostEntry("math", 10, False, has_name=False)]
    assert plan_evictions(draining, "math", 10, HostLimits(max_names=1)) == []
    for limits in (HostLimits(max_slots=1), HostLimits(budget_bytes=19)):
        with pytest.raises(OutOfHostMemoryError):
            plan_evictions(draining, "math", 10, limits)


def test_refusals_name_the_adapter_and_the_flag() -> None:
    with pytest.raises(OutOfHostMemoryError, match=r"'new' .*--adapter-host-memory is 40"):
        plan_evictions(ENTRIES, "new", 31, HostLimits(budget_bytes=40))
    with pytest.raises(OutOfHostMemoryError, match="--max-loaded-loras is 1"):
        plan_evictions(ENTRIES, "new", 1, HostLimits(max_names=1))
    with pytest.raises(AdapterTooLargeError, match="raise --adapter-host-memory"):
        plan_evictions(ENTRIES, "new", 41, HostLimits(budget_bytes=40))


entries = st.lists(
    st.builds(
        HostEntry, st.uuids().map(str), st.integers(0, 50), st.booleans(), has_name=st.booleans()
    ),
    max_size=8,
)
limits = st.builds(
    HostLimits,
    st.none() | st.integers(50, 300),
    st.none() | st.integers(1, 9),
    st.none() | st.integers(1, 9),
)


@given(entries, st.integers(0, 50), limits)
def test_what_leaves_is_evictable_and_then_there_is_room(
    loaded: list[HostEntry], num_bytes: int, limits: HostLimits
) -> None:
    try:
        leaving = plan_evictions(loaded, "new", num_bytes, limits)
    except OutOfHostMemoryError:
        busy = [entry for entry in loaded if not entry.is_evictable]
        with pytest.raises(OutOfHostMemoryError):
            plan_evictions(busy, "new", num_bytes, limits)
        return
    idle = [entry.name for entry in loaded if entry.is_evictable]
    assert leaving == idle[: len(leaving)]
    staying = [entry for entry in loaded if entry.name not in leaving]
    assert plan_evictions(staying, "new", num_bytes, limits) == []
