"""Slots of one rank: the base's first, then one run of equal length an adapter slot."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_esft.errors import InvariantError
from sgl_esft.weave.slot_layout import SlotLayout


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
