"""What each strategy of the paper needs, and which of elastic scaling's parts can be left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sgl_elastic import options
from sgl_elastic.baselines.strategies import (
    AblationSwitches,
    ScaleStrategy,
    check_strategy,
    check_switches,
    devices_needed,
    parse_switches,
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


def test_only_elastic_scaling_has_parts_to_turn_off() -> None:
    for strategy in S:
        check_switches(strategy, AblationSwitches())
    check_switches(S.ELASTIC, AblationSwitches(False, False, False, False))
    with pytest.raises(ElasticConfigError, match="peer_copy"):
        check_switches(S.COLOCATED, AblationSwitches(peer_copy=False))
    with pytest.raises(ElasticConfigError, match="use the elastic strategy"):
        options.parse(["--elastic", "--scale-strategy", "colocated", "--ablate", "no_standby"])


def test_switches_are_parsed() -> None:
    assert parse_switches("") == AblationSwitches()
    assert parse_switches("no_standby, no_peer_copy") == replace(
        AblationSwitches(), standby=False, peer_copy=False
    )
    every = "no_shared_allocator,no_peer_copy,no_standby,no_zero_copy"
    assert parse_switches(every) == AblationSwitches(False, False, False, False)
    with pytest.raises(ElasticConfigError, match="no_magic: there are no_shared"):
        parse_switches("no_magic")
