"""Woven over a quantised base, a layer is bit for bit the merged checkpoint's, quantised alike.

    base, adapters (bfloat16) --merge, quantise--> SGLang's loader -> plain rank -> expected
    base, adapters --quantise each--> SGLang's loader, `lay_out` -> woven rank -> seen

Every scheme, in every part of a grid of ranks; and what one wrong scale would do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import pytest

from sgl_esft.formats.expert_scheme import ExpertScheme
from tests.support.processes import run_module
from tests.support.random_layers import Rank

NUM_EXPERTS, HIDDEN, TOP_K, LAYER_ID, NUM_TOKENS = 8, 256, 3, 3, 24
MAX_ADAPTERS, MAX_EXPERTS = 3, 4
# Overlapping, disjoint, and as many as fit; on EP2, one that is all on one rank.
TUNED: Final = ([0, 2, 5, 7], [2, 3], [1, 4, 5, 6], [0, 3, 6])
RANKS: Final = {
    "one rank": [Rank()],
    "EP2": [Rank(ep_rank=r, ep_size=2) for r in range(2)],
    "TP2": [Rank(tp_rank=r, tp_size=2) for r in range(2)],
    "EP2 x TP2": [Rank(e, 2, t, 2) for e in range(2) for t in range(2)],
}
SCHEMES: Final = {
    "int8": ExpertScheme("int8", 1, 0),
    "fp8": ExpertScheme("fp8", 128, 128),
    "fp8-tensor": ExpertScheme("fp8-tensor", 0, 0),
    "int4": ExpertScheme("int4", 1, 128, "bfloat16"),
}
# Under TP2 a rank has 192 of int4's rows, so SGLang makes two groups of 64 of each of 128.
WIDTHS: Final = {"int8": 96, "fp8": 256, "fp8-tensor": 96, "int4": 384}
# One of the two kinds of memory each, but for one scheme: `make test` is long enough.
CASES: Final = [
    *((name, "virtual") for name in SCHEMES),
    ("int8", "padded"),
]


def slots_of(num_tokens: int) -> list[int]:
    """Adapter slots of a mixed batch, base included."""
    return [t % (MAX_ADAPTERS + 1) - 1 for t in range(num_tokens)]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    found: tuple[str, str] = request.param
    return found


@pytest.fixture(scope="module")
def found_in() -> Callable[[str], dict[str, Any]]:
    """Kind of memory -> what `tests/fast/layer/quantised_fused_moe.py` finds, by scheme.

    A process for each kind: most of its time is imports.
    """

    @cache
    def of(memory: str) -> dict[str, Any]:
        schemes = [scheme for scheme, kind in CASES if kind == memory]
        alone = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
        return run_module("tests.fast.layer.quantised_fused_moe", memory, *schemes, **alone)

    return of


@pytest.fixture(scope="module")
def seen(case: tuple[str, str], found_in: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    scheme, memory = case
    found: dict[str, Any] = found_in(memory)[scheme]
    return found


@pytest.mark.parametrize("ranks", RANKS)
def test_slots_hold_what_sglangs_loader_puts_into_rows(seen: dict[str, Any], ranks: str) -> None:
    assert {str(rank): seen["loaded"][str(rank)] for rank in RANKS[ranks]} == {
        str(rank): True for rank in RANKS[ranks]
    }


@pytest.mark.parametrize("ranks", RANKS)
def test_outputs_are_those_of_the_merged_and_quantised_layer(
    seen: dict[str, Any], ranks: str
) -> None:
    for rank in RANKS[ranks]:
        found = seen["comparisons"][str(rank)]
        assert set(found) == {
            *(f"adapter in slot {slot}" for slot in range(MAX_ADAPTERS)),
            "base",
            "each token alone",
            "mixed batch",
            "another adapter in slot 1",
            "base after unloading",
        }
        assert {name: how for name, how in found.items() if how != "equal"} == {}
    assert seen["differ"] == len(TUNED) + 1, "adapters that change nothing would prove nothing"


def test_a_wrong_scale_is_seen(seen: dict[str, Any]) -> None:
    """The comparisons would find scales that are off by one slot, or the base's."""
    found = seen["wrong scales"]
    assert found.pop("right again") == ", ".join(["equal"] * MAX_ADAPTERS)
    assert set(found) == {
        f"{tensor} scales {fault}"
        for tensor in ("w13", "w2")
        for fault in ("off by one slot", "of the base's experts")
    }
    for fault, how in found.items():
        assert how.count("rows differ") == MAX_ADAPTERS, (fault, how)


def test_a_scale_that_nobody_wrote_is_no_number(seen: dict[str, Any]) -> None:
    names = ("beside", "written", "after", "failed", "after a failure")
    assert seen["left"] == dict.fromkeys(names, True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("no scales", "InvariantError: an expert of "),
        ("one scale", "InvariantError: an expert of "),
        ("not quantised", "InvariantError: an expert of float "),
        ("one scale for all rows", "InvariantError: an expert of "),
        ("base without a scale", "UnsupportedModelError: the checkpoint has no finite w2_"),
        ("another scheme", "UnsupportedModelError: layer 3: SGLang made "),
    ],
)
def test_what_would_be_wrong_is_refused(seen: dict[str, Any], given: str, said: str) -> None:
    assert seen["refusals"][given].startswith(said)


def test_bytes_are_counted_with_scales(seen: dict[str, Any], case: tuple[str, str]) -> None:
    found = seen["counted"]
    assert found["slot_bytes"] == found["of tensors"]
    assert found["used"] == found["mapped slots"] * found["slot_bytes"]
    assert found["scales"] > 0
    if case[1] == "virtual":  # pages, of which every slot's scales are none
        assert found["mapped"] % 4096 == found["scales"] % 4096
