"""What each strategy of the paper needs, and what its ablations change."""

from __future__ import annotations

import pytest

from sgl_elastic.baselines.strategies import (
    CHANGES,
    PROGRESSION,
    TRAITS,
    AblationSwitches,
    ScaleStrategy,
    changes,
    check_strategy,
    check_switches,
    devices_needed,
)
from sgl_elastic.errors import BadScaleError, ElasticConfigError

S = ScaleStrategy


@pytest.mark.parametrize(
    ("strategy", "needed"),
    [(S.ELASTIC, 6), (S.COLD_RESTART, 6), (S.COLOCATED, 6), (S.EXTRAVAGANT, 10)],
)
def test_devices_needed_from_4_to_6(strategy: ScaleStrategy, needed: int) -> None:
    assert devices_needed(strategy, 4, 6) == needed
    check_strategy(strategy, 4, 6, needed)
    with pytest.raises(BadScaleError, match=f"needs {needed} devices"):
        check_strategy(strategy, 4, 6, needed - 1)


def test_horizontal_goes_by_whole_replicas() -> None:
    check_strategy(S.HORIZONTAL, 2, 4, 4)
    check_strategy(S.HORIZONTAL, 4, 2, 4)
    with pytest.raises(BadScaleError, match="whole replicas"):
        check_strategy(S.HORIZONTAL, 4, 6, 100)


def test_only_a_cold_restart_stops_serving_and_only_colocated_doubles_memory() -> None:
    assert set(TRAITS) == set(S)
    assert [each for each in S if not TRAITS[each].serves_meanwhile] == [S.COLD_RESTART]
    assert [each for each in S if TRAITS[each].weight_copies > 1] == [S.COLOCATED]


def test_the_progression_turns_one_more_part_off_in_each_row() -> None:
    assert [len(row.off) for row in PROGRESSION] == [0, 1, 2, 3, 4]
    assert [row.serves_meanwhile for row in PROGRESSION] == [True] * 4 + [False]
    assert changes(PROGRESSION[0]) == ()
    assert changes(PROGRESSION[-1]) == CHANGES


def test_changes_name_phases_of_the_elastic_strategy() -> None:
    assert {change.phase for change in CHANGES} <= set(TRAITS[S.ELASTIC].phases)
    assert [c.phase for c in changes(AblationSwitches(zero_copy=False))] == ["prepare", "switch"]


def test_other_strategies_have_nothing_to_turn_off() -> None:
    for strategy in S:
        check_switches(strategy, AblationSwitches())
    check_switches(S.ELASTIC, PROGRESSION[-1])
    with pytest.raises(ElasticConfigError, match="peer_copy"):
        check_switches(S.COLOCATED, AblationSwitches(peer_copy=False))
