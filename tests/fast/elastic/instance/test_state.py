"""Instance states: what may follow what, and the placement that goes with a state."""

from __future__ import annotations

import itertools

import pytest

from sgl_elastic.errors import IllegalTransitionError
from sgl_elastic.instance.state import HOLDING_MEMORY, NEXT, Instance, InstanceState, advance
from sgl_elastic.types import Placement

S = InstanceState
PLACEMENT = Placement(device_ids=(0, 2), homes=(0, 2), kv_tokens=(5, 5))
LIVES = [
    [S.PARKED, S.ATTACHED, S.WARM, S.ACTIVE, S.FROZEN, S.PARKED, S.ATTACHED],  # retired, reused
    [S.ATTACHED, S.WARM, S.ACTIVE, S.DRAINING, S.FROZEN, S.STOPPED],  # the first instance
    [S.PARKED, S.ATTACHED, S.WARM, S.PARKED],  # cancelled
    [S.ATTACHED, S.WARM, S.ACTIVE, S.FROZEN, S.ACTIVE],  # rolled back
    [S.ATTACHED, S.WARM, S.ACTIVE, S.DRAINING, S.ACTIVE],  # drain given up
    [S.FAILED, S.STOPPED],
]


@pytest.mark.parametrize("life", LIVES)
def test_lives_that_happen(life: list[InstanceState]) -> None:
    instance = Instance("i", PLACEMENT.device_ids)
    for now, state in enumerate(life):
        placement = PLACEMENT if state is S.ATTACHED else None
        instance = instance.with_state(state, float(now), placement)
        assert (instance.state, instance.since_s) == (state, float(now))
        assert instance.placement == (PLACEMENT if state in HOLDING_MEMORY else None)


def test_every_pair_is_either_allowed_or_refused() -> None:
    allowed = {pair for pair in itertools.product(S, S) if pair[1] in NEXT[pair[0]]}
    assert len(allowed) == 13 + 2 * 7 + 1  # between live states, to the two ends, failed to stopped
    for state, to in itertools.product(S, S):
        if (state, to) in allowed:
            assert advance(state, to) is to
        else:
            with pytest.raises(IllegalTransitionError, match=f"{state} cannot become {to}"):
                advance(state, to)
    assert [state for state in S if not NEXT[state]] == [S.STOPPED], "the only end"
    assert set(NEXT) == set(S)


@pytest.mark.parametrize(
    ("state", "to"),
    [
        (S.ACTIVE, S.PARKED),  # would drop running requests
        (S.PARKED, S.ACTIVE),  # has no memory
        (S.PARKED, S.WARM),
        (S.ATTACHED, S.ACTIVE),  # has not been warmed up
        (S.FROZEN, S.DRAINING),
        (S.STOPPED, S.STARTING),
        (S.FAILED, S.PARKED),
        (S.ACTIVE, S.ACTIVE),
    ],
)
def test_what_must_not_follow(state: InstanceState, to: InstanceState) -> None:
    with pytest.raises(IllegalTransitionError):
        advance(state, to)


def test_memory_is_held_only_with_a_placement_on_the_own_devices() -> None:
    parked = Instance("i", (0, 1), S.PARKED)
    assert parked.num_ranks == 2
    for placement in (None, PLACEMENT):
        with pytest.raises(IllegalTransitionError, match="own devices"):
            parked.with_state(S.ATTACHED, 0.0, placement)
