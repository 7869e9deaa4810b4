"""The operator in torch: its schema, its fake, compiled graphs, and the choice of what runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sgl_esft_kernels import (
    KernelInputError,
    KernelUnavailableError,
    choose,
    implementation_for,
    reroute,
    reroute_unfused,
)
from tests.fast.kernels.cases import DTYPES, Case

choose("cpu", "cpu")

CASES = [
    Case(dtype=dtype, num_tokens=tokens, is_expert_parallel=True, share_of_none=0.2)
    for dtype in DTYPES
    for tokens in (0, 1, 7)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torchs_own_checks_of_an_operator(case: Case) -> None:
    """Schema (what is changed, what aliases), autograd, fake, dispatch with dynamic shapes."""
    inputs = case.make()
    torch.library.opcheck(torch.ops.sgl_esft.reroute.default, inputs)
    out = torch.empty_like(inputs[0])
    torch.library.opcheck(torch.ops.sgl_esft.reroute_out.default, (*inputs, out))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fake_call_has_shape_and_dtype_of_the_ids(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        inputs = (
            torch.empty(5, 6, dtype=dtype),
            torch.empty(5, dtype=torch.int32),
            torch.empty(3, 64, dtype=torch.int32),
        )
        slot_ids = reroute(*inputs)
        assert (slot_ids.shape, slot_ids.dtype) == (torch.Size([5, 6]), dtype)
        assert reroute(*inputs, out=inputs[0]) is inputs[0]
        with pytest.raises(KernelInputError, match="expert_map is torch"):
            reroute(*inputs[:2], inputs[2].long())


@pytest.fixture
def dynamo() -> Iterator[None]:
    """torch.compile works in here whatever the environment says, and leaves nothing behind."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(disable=False):
        yield
    torch._dynamo.reset()


def to_new(topk_ids: torch.Tensor, tags: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return reroute(topk_ids, tags, table) + 1


def in_place(topk_ids: torch.Tensor, tags: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    slot_ids = topk_ids * 1
    reroute(slot_ids, tags, table, out=slot_ids)
    return slot_ids + 1


def into_argument(topk_ids: torch.Tensor, tags: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    reroute(topk_ids, tags, table, out=topk_ids)
    return topk_ids + 1


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [to_new, in_place, into_argument])
def test_a_compiled_graph_holds_the_operator(function: object, backend: str) -> None:
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for tokens in (3, 7, 20):  # the second length makes it dynamic
        case = Case(num_tokens=tokens, share_of_none=0.2)
        topk_ids, tags, table = case.make()
        expected = reroute_unfused(topk_ids, tags, table) + 1
        assert torch.equal(compiled(topk_ids, tags, table), expected)
        is_changed = not torch.equal(topk_ids, case.make()[0])
        assert is_changed == (function is into_argument)


@pytest.mark.usefixtures("dynamo")
def test_a_compiled_graph_names_a_bad_value() -> None:
    compiled = torch.compile(to_new, fullgraph=True, backend="eager")
    topk_ids, tags, table = Case().make()
    topk_ids[2, 1] = 64
    with pytest.raises(ValueError, match=r"topk_ids\[2, 1\] is 64, must be in -1..63"):
        compiled(topk_ids, tags, table)


def test_each_device_type_has_its_own() -> None:
    found = {each: implementation_for(each) for each in ("cpu", "cuda", "npu")}
    assert found == {"cpu": "cpu", "cuda": "triton", "npu": "triton_ascend"}
    assert choose(None, "cpu") is choose("cpu", "cpu") is reroute
    assert {choose("reference", each) for each in (*found, "xpu")} == {reroute_unfused}


@pytest.mark.parametrize(
    ("name", "device_type", "message"),
    [
        ("fast", "cpu", "no implementation 'fast' of reroute: there are reference, cpu, triton"),
        ("triton", "cpu", "reroute 'triton' runs on cuda, not on cpu"),
        ("cpu", "cuda", "reroute 'cpu' runs on cpu, not on cuda"),
        (None, "xpu", "no fused reroute for device type 'xpu': there is one for cpu, cuda, npu"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(
    name: str | None, device_type: str, message: str
) -> None:
    with pytest.raises(KernelUnavailableError, match=message):
        choose(name, device_type)
