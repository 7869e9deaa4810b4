"""Reroute for Ascend, interpreted: the reference's answer on any number of cores."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_esft_kernels import (
    NOT_HERE,
    KernelInputError,
    KernelUnavailableError,
    RerouteFunction,
    choose,
    reroute_unfused,
)
from sgl_esft_kernels import reroute_triton_ascend as subject
from sgl_esft_kernels.reroute_triton_ascend import (
    LANES,
    MAX_TILE,
    MAX_WHERE_TILE,
    ROWS_LANES,
    launch_reroute,
    plan_blocks,
    plan_rows,
)
from sgl_esft_kernels.reroute_triton_ascend_kernel import reroute_kernel, reroute_rows_kernel
from tests.fast.kernels.cases import (
    Case,
    Inputs,
    cases,
    naive_rows,
    random_cases,
    where_asked,
    where_drawn,
)
from tests.fast.kernels.interpreted import interpreter

NUM_CORES = (1, 3, 40)
INT32_END = 2**31


def reroute_on(num_cores: int, inputs: Inputs, out: torch.Tensor | None = None) -> torch.Tensor:
    with interpreter():
        return launch_reroute(reroute_kernel, num_cores, *inputs, out)


def rows_on(
    num_cores: int, inputs: Inputs, where: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    with interpreter():
        return launch_reroute(reroute_rows_kernel, num_cores, *inputs, out, where)


@pytest.mark.parametrize("num_cores", NUM_CORES)
@pytest.mark.parametrize("case", cases(), ids=str)
def test_equals_the_reference(case: Case, num_cores: int) -> None:
    inputs = case.make()
    slot_ids = reroute_on(num_cores, inputs)
    assert slot_ids.dtype == case.dtype
    assert torch.equal(slot_ids, reroute_unfused(*inputs))


@settings(max_examples=60, deadline=None)
@given(case=random_cases(), num_cores=st.integers(1, 40))
def test_equals_the_reference_on_any_batch(case: Case, num_cores: int) -> None:
    inputs = case.make()
    wanted = reroute_unfused(*inputs)
    assert torch.equal(reroute_on(num_cores, inputs), wanted)
    assert reroute_on(num_cores, inputs, out=inputs[0]) is inputs[0]
    assert torch.equal(inputs[0], wanted)


@pytest.mark.parametrize("num_cores", NUM_CORES)
@pytest.mark.parametrize("case", cases(), ids=str)
def test_with_where_equals_the_naive_loop(case: Case, num_cores: int) -> None:
    """NOT_HERE is passed through: whoever gives `where` brings what is asked for first."""
    inputs = case.make()
    where = where_drawn(inputs)
    rows = rows_on(num_cores, inputs, where)
    assert rows.dtype == case.dtype
    assert rows.tolist() == naive_rows(inputs, where)


@settings(max_examples=30, deadline=None)
@given(case=random_cases(), num_cores=st.integers(1, 40))
def test_with_where_equals_the_naive_loop_on_any_batch(case: Case, num_cores: int) -> None:
    inputs = case.make()
    where = where_drawn(inputs)
    wanted = naive_rows(inputs, where)
    assert rows_on(num_cores, inputs, where).tolist() == wanted
    assert rows_on(num_cores, inputs, where, out=inputs[0]) is inputs[0]
    assert inputs[0].tolist() == wanted


def test_writes_nothing_around_its_output() -> None:
    inputs = Case(num_tokens=300, k=7).make()
    around = torch.full((320, 7), 12345, dtype=torch.int32)
    reroute_on(3, inputs, out=around[10:310])
    assert torch.equal(around[10:310], reroute_unfused(*inputs))
    assert around[:10].eq(12345).all()
    assert around[310:].eq(12345).all()


# More experts a token than any model has, and a map of several tiles.
LARGE = [Case(num_tokens=40, k=k, share_of_none=0.2) for k in (9, 33, 100, 513, LANES)]
LARGE += [Case("distinct", 500, num_adapters=64, num_experts=160, dtype=torch.int64)]


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large_sizes(case: Case) -> None:
    assert 2 * MAX_TILE < 65 * 160
    assert torch.equal(reroute_on(3, case.make()), reroute_unfused(*case.make()))


@pytest.mark.parametrize("case", [case for case in LARGE if case.k <= ROWS_LANES], ids=str)
def test_large_sizes_with_where(case: Case) -> None:
    assert 2 * MAX_WHERE_TILE < 65 * 160
    inputs = case.make()
    where = where_drawn(inputs)
    assert rows_on(3, inputs, where).tolist() == naive_rows(inputs, where)


def test_slots_that_are_no_numbers_as_float32() -> None:
    # The gather is of float32 by name: values whose bits are a NaN, an infinity or subnormal.
    bits = [0x7F800000, 0x7F800001, 0x7FC00000, 1, INT32_END - 1, -1, -INT32_END, -INT32_END + 1]
    expert_map = torch.tensor([bits], dtype=torch.int32)
    inputs = torch.arange(8, dtype=torch.int32).view(4, 2), torch.full((4,), -1).int(), expert_map
    assert reroute_on(1, inputs).flatten().tolist() == bits


def test_lanes_find_their_token_without_overflow() -> None:
    for k in range(1, LANES + 1):
        blocks = plan_blocks(k, 64)
        products = [lane * blocks.multiplier for lane in range(blocks.lanes)]
        tokens = [product >> blocks.shift for product in products]
        assert tokens == [lane // k for lane in range(blocks.lanes)]
        assert products[-1] < INT32_END
        assert tokens[-1] < blocks.tag_lanes
        assert k <= blocks.tokens * k <= blocks.lanes


def test_bad_input_is_refused_by_name() -> None:
    for k in (0, LANES + 1):
        with pytest.raises(KernelInputError, match=f"has {k} experts a token, must have 1 to"):
            plan_blocks(k, 64)
    topk_ids, tags, expert_map = Case().make()
    with pytest.raises(KernelInputError, match=r"expert_map is torch\.int64"):
        reroute_on(1, (topk_ids, tags, expert_map.long()))


def test_bad_where_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelInputError, match=f"must have 1 to {ROWS_LANES}"):
        plan_rows(ROWS_LANES + 1, 64, 64)
    inputs = Case().make()
    where = where_asked(inputs)
    with pytest.raises(KernelInputError, match=r"where is torch\.int64"):
        rows_on(1, inputs, where.long())
    monkeypatch.setattr(subject, "is_debug", lambda: True)
    assert rows_on(1, inputs, where).tolist() == naive_rows(inputs, where)
    slot = int(inputs[2][inputs[1][0], inputs[0][0, 0]])
    where[slot] = NOT_HERE
    message = f"token 0 asks for expert {inputs[0][0, 0]}: its slot {slot} is not here"
    with pytest.raises(KernelInputError, match=message):
        rows_on(1, inputs, where)


def test_unavailable_without_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelUnavailableError, match="needs torch-npu, and the CANN toolkit"):
        choose("triton_ascend", "npu")
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    with pytest.raises(KernelUnavailableError, match="needs triton-ascend, installed over any"):
        choose("triton_ascend", "npu")


def test_the_kernel_is_the_one_for_what_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[RerouteFunction] = []
    monkeypatch.setattr(subject, "implement", lambda launch, _: launches.append(launch))
    subject.register(3)
    inputs = Case(share_of_none=0.2).make()
    where, out = where_drawn(inputs), torch.empty_like(inputs[0])
    with interpreter():
        assert torch.equal(launches[0](*inputs), reroute_unfused(*inputs))
        assert torch.equal(launches[0](*inputs, out), reroute_unfused(*inputs))
        assert launches[0](*inputs, where=where).tolist() == naive_rows(inputs, where)
        launches[0](*inputs, out=out, where=where)
    assert out.tolist() == naive_rows(inputs, where)


REGISTERED = """
import torch
from sgl_esft_kernels.reroute_triton_ascend import register
register(40)
for name in ("reroute", "reroute_out", "reroute_rows"):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"sgl_esft::{name}", "PrivateUse1"), name
"""


def test_registers_the_operators_for_the_npu() -> None:
    subprocess.run([sys.executable, "-c", REGISTERED], check=True, timeout=120)
