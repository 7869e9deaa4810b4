"""Reroute for Ascend, interpreted: the reference's answer on any number of cores."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_esft_kernels import KernelInputError, KernelUnavailableError, choose, reroute_unfused
from sgl_esft_kernels.reroute_triton_ascend import (
    LANES,
    MAX_TILE,
    launch_reroute,
    plan_blocks,
)
from sgl_esft_kernels.reroute_triton_ascend_kernel import reroute_kernel
from tests.fast.kernels.cases import Case, Inputs, cases, random_cases
from tests.fast.kernels.interpreted import interpreter

NUM_CORES = (1, 3, 40)
INT32_END = 2**31


def reroute_on(num_cores: int, inputs: Inputs, out: torch.Tensor | None = None) -> torch.Tensor:
    with interpreter():
        return launch_reroute(reroute_kernel, num_cores, *inputs, out)


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


def test_unavailable_without_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelUnavailableError, match="needs torch-npu, and the CANN toolkit"):
        choose("triton_ascend", "npu")
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    with pytest.raises(KernelUnavailableError, match="needs triton-ascend, installed over any"):
        choose("triton_ascend", "npu")


REGISTERED = """
import torch
from sgl_esft_kernels.reroute_triton_ascend import register
register(40)
for name in ("sgl_esft::reroute", "sgl_esft::reroute_out"):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1"), name
"""


def test_registers_both_operators_for_the_npu() -> None:
    subprocess.run([sys.executable, "-c", REGISTERED], check=True, timeout=120)
