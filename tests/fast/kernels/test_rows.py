"""Rerouting to rows: with a table `where`, by native code and by the definition.

Both name an expert that is not here. By Triton: test_reroute_triton.py and its neighbours.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from sgl_esft_kernels import (
    NOT_HERE,
    KernelInputError,
    RerouteFunction,
    checks,
    choose,
    op,
    reroute,
    reroute_unfused,
)
from sgl_esft_kernels.reroute_ref import check_resident
from tests.fast.kernels.cases import (
    DTYPES,
    Case,
    Inputs,
    cases,
    naive,
    naive_rows,
    random_cases,
    where_asked,
)

native = choose("cpu", "cpu")

both = pytest.mark.parametrize("function", [native, reroute_unfused], ids=["native", "reference"])


def check(function: RerouteFunction, inputs: Inputs, where: torch.Tensor) -> None:
    """New tensor, `out` and in place, each exactly the loop's; inputs unchanged."""
    before = [each.clone() for each in (*inputs, where)]
    topk_ids = inputs[0]
    expected = naive_rows(inputs, where)
    found = function(*inputs, where=where)
    assert found.dtype == topk_ids.dtype
    assert found.shape == topk_ids.shape
    assert found.tolist() == expected
    out = torch.full_like(topk_ids, 77)
    assert function(*inputs, out=out, where=where) is out
    assert out.tolist() == expected
    assert all(map(torch.equal, (*inputs, where), before)), "an input was changed"
    assert function(*inputs, topk_ids, where) is topk_ids
    assert topk_ids.tolist() == expected


@both
@pytest.mark.parametrize("case", cases(), ids=str)
def test_equals_the_naive_loop(function: RerouteFunction, case: Case) -> None:
    inputs = case.make()
    check(function, inputs, where_asked(inputs))


@settings(max_examples=100)
@given(case=random_cases())
def test_both_equal_the_naive_loop_on_any_batch(case: Case) -> None:
    for function in (native, reroute_unfused):
        inputs = case.make()
        check(function, inputs, where_asked(inputs))


@both
def test_every_row_its_slot_changes_nothing(function: RerouteFunction) -> None:
    inputs = Case(is_expert_parallel=True, share_of_none=0.2).make()
    where = torch.arange(inputs[2].numel(), dtype=torch.int32)
    assert torch.equal(function(*inputs, where=where), function(*inputs))


def test_a_miss_is_no_other_ranks_expert() -> None:
    """-1 is skipped by every MoE kernel: as a miss it would be a wrong answer without a word."""
    assert NOT_HERE == -2


GOOD = Case(num_tokens=9, k=6, num_adapters=3, num_experts=64)


def with_expert_5_elsewhere(row: int, dtype: torch.dtype = torch.int32) -> tuple[Any, ...]:
    """Tokens 4 and 6, of adapter 1, ask for expert 5 alone; its row is this one. And its slot."""
    topk_ids, tags, table = GOOD.make()
    topk_ids = topk_ids.to(dtype).masked_fill_(topk_ids == 5, 6)
    topk_ids[4, 3] = topk_ids[6, 0] = 5
    tags[4] = tags[6] = 1
    where = where_asked((topk_ids, tags, table))
    slot = int(table[1, 5])
    where[slot] = row
    return topk_ids, tags, table, where, slot


def check_refused(function: RerouteFunction, *tensors: torch.Tensor, message: str) -> None:
    """Without `out`, with it and in place: the error named, and no tensor changed."""
    *inputs, where = tensors
    before = [each.clone() for each in tensors]
    out = torch.full_like(inputs[0], 77)
    for given_out in (None, out, inputs[0]):
        with pytest.raises(KernelInputError, match=message):
            function(*inputs, out=given_out, where=where)
    assert all(map(torch.equal, tensors, before))
    assert bool((out == 77).all())


@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", [NOT_HERE, -1, -(2**31)])
def test_the_first_expert_that_is_not_here_is_named_and_nothing_is_written(
    function: RerouteFunction, row: int, dtype: torch.dtype
) -> None:
    *tensors, slot = with_expert_5_elsewhere(row, dtype)
    message = (
        f"^token 4 asks for expert 5: its slot {slot} is not here, where\\[{slot}\\] is {row}$"
    )
    check_refused(function, *tensors, message=message)


@both
def test_an_id_of_none_and_another_ranks_expert_need_no_row(function: RerouteFunction) -> None:
    topk_ids, tags, table = Case(is_expert_parallel=True).make()
    topk_ids[naive_mask(topk_ids, tags, table)] = -1
    nowhere = torch.full((table.numel(),), NOT_HERE, dtype=torch.int32)
    found = function(topk_ids, tags, table, where=nowhere)
    assert torch.equal(found, torch.full_like(topk_ids, -1))


def naive_mask(*inputs: torch.Tensor) -> torch.Tensor:
    """[num_tokens, k] bool: whose slot is this rank's."""
    return torch.tensor(naive(*inputs)) >= 0


@both
def test_a_slot_that_where_does_not_have_is_named(function: RerouteFunction) -> None:
    topk_ids, tags, table, where, _ = with_expert_5_elsewhere(0)
    highest = max(max(slots) for slots in naive(topk_ids, tags, table))
    table[1, 5] = highest + 1
    message = f"^token 4 asks for expert 5: its slot {highest + 1} must be in -1..{highest}$"
    check_refused(function, topk_ids, tags, table, where[: highest + 1], message=message)
    table[1, 5] = -2
    message = f"^token 4 asks for expert 5: its slot -2 must be in -1..{table.numel() - 1}$"
    check_refused(function, topk_ids, tags, table, where, message=message)


def test_native_code_names_bad_values_first() -> None:
    topk_ids, tags, table, where, _ = with_expert_5_elsewhere(NOT_HERE)
    topk_ids[8, 5] = 64
    message = r"topk_ids\[8, 5\] is 64, must be in -1..63"
    check_refused(native, topk_ids, tags, table, where, message=message)
    tags[8] = 3
    message = r"token_adapter_slots\[8\] is 3, must be in -1..2"
    check_refused(native, topk_ids, tags, table, where, message=message)


IDS = torch.zeros(3, 2, dtype=torch.int32)
TAGS = torch.zeros(3, dtype=torch.int32)
MAP = torch.zeros(2, 4, dtype=torch.int32)
WHERE = torch.zeros(4, dtype=torch.int32)
WRONG = [
    ("where", WHERE.long(), "where is torch.int64"),
    ("where", WHERE.float(), "where is torch.float32"),
    ("where", WHERE.view(2, 2), "where has 2 dimensions, must have 1"),
    ("where", torch.zeros(8, dtype=torch.int32)[::2], "where has strides .* contiguous"),
    ("where", WHERE.to("meta"), "where is on meta, must be on cpu"),
    ("where", WHERE[:0], "where has no slots"),
    ("topk_ids", IDS.float(), "topk_ids is torch.float32"),
    ("topk_ids", IDS.to("meta"), "topk_ids is on meta, must be on cpu"),
    ("expert_map", MAP.long(), "expert_map is torch.int64"),
    ("out", IDS.long(), "out is torch.int64"),
    ("out", IDS[:2], r"out is \(2, 2\), must be \(3, 2\) as topk_ids"),
]


@both
@pytest.mark.parametrize(("name", "wrong", "message"), WRONG)
def test_a_wrong_tensor_is_named(
    function: RerouteFunction, name: str, wrong: torch.Tensor, message: str
) -> None:
    arguments = {"topk_ids": IDS, "token_adapter_slots": TAGS, "expert_map": MAP, "where": WHERE}
    for out in ({}, {"out": torch.empty_like(IDS)}):
        with pytest.raises(KernelInputError, match=message):
            function(**(arguments | out | {name: wrong}))


def test_check_resident_names_values_then_experts() -> None:
    topk_ids, tags, table, where, slot = with_expert_5_elsewhere(0)
    check_resident(topk_ids, tags, table, where)
    where[slot] = NOT_HERE
    with pytest.raises(KernelInputError, match=f"token 4 asks for expert 5: its slot {slot} is"):
        check_resident(topk_ids, tags, table, where)
    topk_ids[0, 0] = 64
    with pytest.raises(KernelInputError, match="topk_ids has values from 0 to 64"):
        check_resident(topk_ids, tags, table, where)


def test_a_capture_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert checks.can_wait(torch.device("cpu"))
    assert not checks.can_wait(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert checks.can_wait(torch.device("cuda"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_torchs_own_checks_of_the_operator(num_tokens: int, dtype: torch.dtype) -> None:
    """Schema (what is changed, what aliases), autograd, fake, dispatch with dynamic shapes."""
    inputs = Case(num_tokens=num_tokens, dtype=dtype, share_of_none=0.2).make()
    arguments = (*inputs, where_asked(inputs), torch.empty_like(inputs[0]))
    torch.library.opcheck(torch.ops.sgl_esft.reroute_rows.default, arguments)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fake_call_has_shape_and_dtype_of_the_ids(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        inputs = (
            torch.empty(5, 6, dtype=dtype),
            torch.empty(5, dtype=torch.int32),
            torch.empty(3, 64, dtype=torch.int32),
        )
        where = torch.empty(192, dtype=torch.int32)
        rows = reroute(*inputs, where=where)
        assert (rows.shape, rows.dtype) == (torch.Size([5, 6]), dtype)
        assert reroute(*inputs, out=inputs[0], where=where) is inputs[0]
        for out in (None, inputs[0]):
            with pytest.raises(KernelInputError, match="where is torch"):
                reroute(*inputs, out=out, where=where.long())


def test_an_implementation_gets_out_and_where_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    library = SimpleNamespace(impl=lambda name, launch, _: given.update({name: launch}))
    monkeypatch.setattr(op, "LIBRARY", library)
    op.implement(reroute_unfused, "XPU")
    inputs = Case(share_of_none=0.2).make()
    where = where_asked(inputs)
    assert torch.equal(given["reroute"](*inputs), native(*inputs))
    out = torch.empty_like(inputs[0])
    given["reroute_out"](*inputs, out)
    assert torch.equal(out, native(*inputs))
    given["reroute_rows"](*inputs, where, out)
    assert out.tolist() == naive_rows(inputs, where)


def operators_of(**arguments: torch.Tensor) -> set[str]:
    """What one call of the native reroute asks torch's dispatcher for."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        native(**arguments)
    return {event.name for event in seen.events() if "::" in event.name}


def test_without_where_the_operators_are_as_before() -> None:
    inputs = GOOD.make()
    arguments = dict(zip(("topk_ids", "token_adapter_slots", "expert_map"), inputs, strict=True))
    out = {"out": torch.empty_like(inputs[0])}
    where = {"where": where_asked(inputs)}
    assert operators_of(**arguments) == {"sgl_esft::reroute"}
    assert operators_of(**arguments, **out) == {"sgl_esft::reroute_out"}
    assert operators_of(**arguments, **out, **where) == {"sgl_esft::reroute_rows"}
    schema = "Tensor topk_ids, Tensor token_adapter_slots, Tensor expert_map"
    assert str(torch.ops.sgl_esft.reroute.default._schema) == (
        f"sgl_esft::reroute({schema}) -> Tensor"
    )


def test_with_out_no_tensor_memory_is_allocated() -> None:
    inputs = Case(num_tokens=133, dtype=torch.int64).make()
    where = where_asked(inputs)
    for out in (torch.empty_like(inputs[0]), inputs[0]):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            native(*inputs, out=out, where=where)
        assert all(not event.cpu_memory_usage for event in seen.events())
