"""Native rerouting on a CPU: equal to the definition; bad input is named and changes nothing."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from torch.profiler import ProfilerActivity, profile

from sgl_esft_kernels import (
    KernelInputError,
    KernelUnavailableError,
    choose,
    reroute_cpu,
    reroute_unfused,
)
from tests.fast.kernels.cases import DTYPES, Case, Inputs, cases, naive, random_cases

reroute = choose("cpu", "cpu")


def check(inputs: Inputs) -> None:
    """New tensor, `out` and in place, each exactly the definition's; inputs unchanged."""
    before = [each.clone() for each in inputs]
    expected = reroute_unfused(*inputs)
    found = reroute(*inputs)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    out = torch.full_like(expected, 77)
    assert reroute(*inputs, out=out) is out
    assert torch.equal(out, expected)
    assert all(map(torch.equal, inputs, before)), "an input was changed"
    topk_ids, tags, expert_map = inputs
    assert reroute(topk_ids, tags, expert_map, out=topk_ids) is topk_ids
    assert torch.equal(topk_ids, expected)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_equals_the_definition(case: Case) -> None:
    check(case.make())


@settings(max_examples=200)
@given(case=random_cases())
def test_equals_the_naive_loop(case: Case) -> None:
    inputs = case.make()
    assert reroute(*inputs).tolist() == naive(*inputs)


GOOD = Case(num_tokens=9, k=6, num_adapters=3, num_experts=64)


def with_value(name: str, place: tuple[int, ...], value: int, dtype: torch.dtype) -> Inputs:
    topk_ids, tags, expert_map = GOOD.make()
    topk_ids = topk_ids.to(dtype)
    {"topk_ids": topk_ids, "token_adapter_slots": tags}[name][place] = value
    return topk_ids, tags, expert_map


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [-2, 64, 65, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("place", [(0, 0), (4, 3), (8, 5)])
def test_an_id_out_of_range_is_named_and_nothing_is_written(
    place: tuple[int, int], value: int, dtype: torch.dtype
) -> None:
    inputs = with_value("topk_ids", place, value, dtype)
    message = rf"topk_ids\[{place[0]}, {place[1]}\] is {value}, must be in -1..63"
    check_refused(inputs, message)


@pytest.mark.parametrize("value", [2**32, -(2**63), 2**63 - 1])
def test_an_id_beyond_32_bits_is_not_cut_to_a_good_one(value: int) -> None:
    check_refused(with_value("topk_ids", (1, 2), value, torch.int64), rf"\[1, 2\] is {value}, must")


@pytest.mark.parametrize("value", [-2, 3, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("place", [(0,), (5,), (8,)])
def test_a_slot_out_of_range_is_named_and_nothing_is_written(place: tuple[int], value: int) -> None:
    inputs = with_value("token_adapter_slots", place, value, torch.int32)
    check_refused(inputs, rf"token_adapter_slots\[{place[0]}\] is {value}, must be in -1..2")
    if value == 3:  # as for a map of another height
        topk_ids, tags, expert_map = with_value("token_adapter_slots", place, 2, torch.int32)
        check_refused((topk_ids, tags, expert_map[:3].contiguous()), "is 2, must be in -1..1")


def check_refused(inputs: Inputs, message: str) -> None:
    """Without `out`, with it and in place: the error named, and no tensor changed."""
    before = [each.clone() for each in inputs]
    out = torch.full_like(inputs[0], 77)
    for given_out in (None, out, inputs[0]):
        with pytest.raises(KernelInputError, match=message):
            reroute(*inputs, out=given_out)
    assert all(map(torch.equal, inputs, before))
    assert bool((out == 77).all())


IDS = torch.zeros(3, 2, dtype=torch.int32)
TAGS = torch.zeros(3, dtype=torch.int32)
MAP = torch.zeros(2, 4, dtype=torch.int32)
WRONG = [
    ("topk_ids", IDS.float(), "topk_ids is torch.float32"),
    ("topk_ids", IDS.to(torch.int16), "topk_ids is torch.int16"),
    ("topk_ids", IDS[:, 0].contiguous(), "topk_ids has 1 dimensions, must have 2"),
    ("topk_ids", IDS[:2], "token_adapter_slots has 3 tokens, topk_ids has 2"),
    ("topk_ids", IDS.to("meta"), "topk_ids is on meta, must be on cpu"),
    ("topk_ids", torch.zeros(2, 3, dtype=torch.int32).T, "topk_ids has strides .* contiguous"),
    ("token_adapter_slots", TAGS.long(), "token_adapter_slots is torch.int64"),
    ("token_adapter_slots", TAGS.view(3, 1), "token_adapter_slots has 2 dimensions"),
    ("token_adapter_slots", TAGS.to("meta"), "token_adapter_slots is on meta, must be on cpu"),
    ("token_adapter_slots", IDS[:, 0], "token_adapter_slots has strides"),
    ("expert_map", MAP.long(), "expert_map is torch.int64"),
    ("expert_map", MAP[0], "expert_map has 1 dimensions"),
    ("expert_map", MAP[:, ::2], "expert_map has strides"),
    ("expert_map", MAP[:0], "must have the base's row and an expert"),
    ("expert_map", MAP[:, :0].contiguous(), "must have the base's row and an expert"),
    ("out", IDS.long(), "out is torch.int64"),
    ("out", IDS.to("meta"), "out is on meta, must be on cpu"),
    ("out", IDS[:2], r"out is \(2, 2\), must be \(3, 2\) as topk_ids"),
    ("out", torch.zeros(2, 3, dtype=torch.int32).T, "out has strides"),
]


@pytest.mark.parametrize(("name", "wrong", "message"), WRONG)
def test_a_wrong_tensor_is_named_as_by_the_definition(
    name: str, wrong: torch.Tensor, message: str
) -> None:
    arguments = {"topk_ids": IDS, "token_adapter_slots": TAGS, "expert_map": MAP, name: wrong}
    for each in (reroute, reroute_unfused):
        with pytest.raises(KernelInputError, match=message):
            each(**arguments)


def allocated_bytes(**arguments: torch.Tensor) -> int:
    """Bytes that torch's CPU allocator gave out during one call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        reroute(**arguments)
    return sum(max(0, event.cpu_memory_usage) for event in seen.events() if event.cpu_memory_usage)


def test_with_out_no_tensor_memory_is_allocated() -> None:
    names = ("topk_ids", "token_adapter_slots", "expert_map")
    inputs = dict(zip(names, Case(num_tokens=133, dtype=torch.int64).make(), strict=True))
    assert allocated_bytes(**inputs) >= 133 * 6 * 8  # only the result
    assert allocated_bytes(**inputs, out=torch.empty_like(inputs["topk_ids"])) == 0
    assert allocated_bytes(**inputs, out=inputs["topk_ids"]) == 0


def test_without_the_library_the_error_says_how_to_build_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    empty = ModuleSpec("sgl_reroute", None, is_package=True)
    empty.submodule_search_locations = [str(tmp_path)]
    for spec in (None, empty):
        monkeypatch.setattr(reroute_cpu, "find_spec", lambda _, spec=spec: spec)
        with pytest.raises(KernelUnavailableError, match="make setup"):
            reroute_cpu.library_path()


@pytest.mark.parametrize(
    ("torch_version", "message"),
    [
        (version("torch"), r"libsgl_reroute.so cannot be loaded.*make"),
        ("2.0.1", r"built for torch 2\.0\.1, this is .*make setup"),
    ],
)
def test_a_library_that_cannot_be_loaded_says_how_to_build_it(
    torch_version: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "libsgl_reroute.so"
    broken.write_bytes(b"not a library")
    (tmp_path / "torch_version.txt").write_text(torch_version)
    monkeypatch.setattr(reroute_cpu, "library_path", lambda: broken)
    with pytest.raises(KernelUnavailableError, match=message):
        reroute_cpu.load_library.__wrapped__()
