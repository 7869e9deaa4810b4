"""Slots of one rank: the base's first, then one run of equal length an adapter slot."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_esft.errors import InvariantError
from sgl_esft.weave.slot_layout import SlotLayout


def test_sizes_of_the_paper() -> None:
    """M = 64, N = 2, E_max = 8: adapter 0 at 64, adapter 1 at 72, 80 slots in all."""
    layout = SlotLayout.plan(num_base=64, num_routed=64, num_adapters=2, max_experts_per_adapter=8)
    assert layout.adapter_range(0) == range(64, 72)
    assert layout.adapter_range(1) == range(72, 80)
    assert layout.num_slots == 80


@given(
    num_routed=st.integers(1, 70),
    num_shared=st.integers(0, 2),
    num_adapters=st.integers(1, 20),
    e_max=st.integers(1, 80),
)
def test_every_slot_has_one_owner(
    num_routed: int, num_shared: int, num_adapters: int, e_max: int
) -> None:
    layout = SlotLayout.plan(
        num_base=num_routed + num_shared,
        num_routed=num_routed,
        num_adapters=num_adapters,
        max_experts_per_adapter=e_max,
    )
    owned = list(range(layout.num_base))
    for adapter_slot in range(num_adapters):
        own = layout.adapter_range(adapter_slot)
        assert len(own) == min(e_max, num_routed)
        owned += own
    assert owned == list(range(layout.num_slots))


@pytest.mark.parametrize("adapter_slot", [-1, 2, 100])
def test_a_slot_that_is_not_there(adapter_slot: int) -> None:
    layout = SlotLayout(num_base=8, num_routed=8, num_adapters=2, slots_per_adapter=3)
    with pytest.raises(InvariantError, match=rf"adapter slot {adapter_slot} is not in \[0, 2\)"):
        layout.adapter_range(adapter_slot)
