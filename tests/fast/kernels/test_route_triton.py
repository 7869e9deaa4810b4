"""The fused router by Triton: interpreted here, compiled for a GPU, run on one if there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.kernels.ops.moe import moe_fused_gate
from triton.runtime.errors import InterpreterError

from sgl_esft_kernels import NOT_HERE, KernelInputError, KernelUnavailableError, route_ref
from sgl_esft_kernels import route_triton as subject
from sgl_esft_kernels.route_spec import LOGIT_DTYPES, RouterSpec
from tests.fast.kernels.cases import where_drawn
from tests.fast.kernels.compiled import compiler, num_instructions, resources
from tests.fast.kernels.interpreted import changed_module, interpreter
from tests.fast.kernels.routers import ROUTERS, Arguments, Router

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BY_NAME = {router.name: router for router in ROUTERS}
BIASED = "groups of three, biased"
WITH_GROUPS = ("qwen3-moe", "sigmoid groups", BIASED)
Route = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def assert_equals_reference(route: Route, arguments: Arguments) -> None:
    weights, slot_ids = route(*arguments)
    expected_weights, expected_slot_ids = route_ref.route_and_reroute(*arguments)
    assert weights.dtype == torch.float32
    assert slot_ids.dtype == torch.int32
    assert torch.equal(slot_ids, expected_slot_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=2e-6, atol=1e-12)


def some(name: str, num_tokens: int = 9, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    return BY_NAME[name].with_tokens(num_tokens), dtype


# Each router; logits of any dtype, any number of tokens, any number of experts a token.
BATCHES = [
    *((router, torch.float32) for router in ROUTERS),
    *(some(name, 9, dtype) for name in WITH_GROUPS for dtype in LOGIT_DTYPES),
    *(some(name, n) for name in ("mixtral", "qwen2-moe", BIASED) for n in (1, 2, 3, 7, 133)),
    *(
        (Router(f"{scoring} {k}", 60, RouterSpec(k, scoring), num_tokens=5), torch.float32)
        for k in range(1, 9)
        for scoring in ("softmax", "sigmoid")
    ),
]


@pytest.mark.parametrize(("router", "dtype"), BATCHES, ids=str)
def test_equals_the_reference(router: Router, dtype: torch.dtype) -> None:
    with interpreter():
        assert_equals_reference(subject.route_and_reroute, router.make(dtype))


def assert_rows_are_those_of_slots(router: Router, device: str = "cpu") -> None:
    """NOT_HERE is passed through: whoever gives `where` brings what is asked for first."""
    arguments = router.make(device=device)
    where = where_drawn(arguments[:3])
    weights, slot_ids = subject.route_and_reroute(*arguments)
    same_weights, rows = subject.route_and_reroute(*arguments, where=where)
    table = where.tolist()
    expected = [[table[slot] if slot >= 0 else -1 for slot in each] for each in slot_ids.tolist()]
    assert torch.equal(weights, same_weights)
    assert rows.tolist() == expected


@pytest.mark.parametrize("router", ROUTERS, ids=str)
def test_with_where_a_slot_becomes_its_row(router: Router) -> None:
    with interpreter():
        assert_rows_are_those_of_slots(router)


def with_logits(router: Router, row: list[float]) -> Arguments:
    """Every token has these logits, and there is no bias that would part equals."""
    _, tags, table, spec, bias, live = router.make()
    logits = torch.tensor(row).expand(router.num_tokens, -1).contiguous()
    return logits, tags, table, spec, None if bias is None else torch.zeros_like(bias), live


TIES = {
    "all equal": [0.0] * 12,
    "zeros of both signs": [-0.0, 0.0] * 6,
    "the best twice in a group": [1.0, 0.0, 1.0] * 4,
    "two of each": [float(i // 2) for i in range(12)],
    "negative": [-3.0, -3.0, -5.0, -1.0, -3.0, -1.0] * 2,
    "saturated": [30.0 + i for i in range(12)],
}


@pytest.mark.parametrize("row", TIES.values(), ids=TIES.keys())
@pytest.mark.parametrize("name", ["groups of three, all kept", BIASED])
def test_of_equals_the_lowest_wins(name: str, row: list[float]) -> None:
    ungrouped = replace(BY_NAME[name].spec, num_expert_groups=1, topk_groups=1)
    with interpreter():
        for router in (BY_NAME[name], replace(BY_NAME[name], spec=ungrouped, num_tokens=2)):
            if subject.unsupported_reason(router.spec) is None:
                assert_equals_reference(subject.route_and_reroute, with_logits(router, row))


def test_what_is_no_number_is_chosen_last() -> None:
    router = replace(BY_NAME[BIASED], num_adapters=0)
    nan = float("nan")
    row = [nan, 1.0, -1.0, nan, nan, nan, 2.0, nan, float("-inf"), 3.0, 3.0, 3.0]
    arguments = with_logits(router, row)
    with interpreter():
        _, slot_ids = subject.route_and_reroute(*arguments)
    assert torch.equal(slot_ids, route_ref.route_and_reroute(*arguments)[1])


WRONG = {
    "base row first": ("adapter_slots < 0, NUM_ROWS - 1,", "adapter_slots < 0, 0,"),
    "highest of equals": (
        "(index ^ _LOW_BITS).to(tl.int64)",
        "index.to(tl.int64)",
        "(key & _LOW_BITS).to(tl.int32) ^ _LOW_BITS",
        "(key & _LOW_BITS).to(tl.int32)",
    ),
    "one group too many": ("tl.static_range(TOPK_GROUPS)", "tl.static_range(TOPK_GROUPS + 1)"),
    "best of a group only": ("    if BY_TWO:", "    if False:"),
    "no renormalising": ("    if RENORMALIZE:", "    if False:"),
    "padding routed": ("is_live = is_live & (tokens <", "is_live = is_live & (tokens * 0 <"),
    "no scale": (
        "weights * tl.where(is_routed, OUTPUT_SCALE, ",
        "weights * tl.where(is_routed, 1.0, ",
    ),
    "shared unscaled": ("OUTPUT_SCALE * SHARED_SCALE)", "OUTPUT_SCALE)"),
    "shared expert as routed": ("total / ROUTED_SCALE", "total"),
    "biased weights": ("weights = tl.sigmoid(chosen)", "weights = tl.sigmoid(chosen) + 0.01"),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_cases_find_a_wrong_kernel(change: tuple[str, ...], tmp_path: Path) -> None:
    route = changed_module(subject, change, tmp_path).route_and_reroute
    biased = BY_NAME[BIASED]
    batches = [
        router.with_tokens(3).make()
        for router in ROUTERS
        if router.num_experts <= 12 or router.spec.scale_output
    ]
    batches += [with_logits(biased, TIES["all equal"]), replace(biased, num_live=5).make()]
    with interpreter():
        assert any(differs(route, batch) for batch in batches)


def differs(route: Route, arguments: Arguments) -> bool:
    try:
        assert_equals_reference(route, arguments)
    except AssertionError:
        return True
    return False


def test_no_tokens_and_what_is_not_supported_launch_nothing() -> None:
    with compiler() as kernels:
        weights, slot_ids = subject.route_and_reroute(*BY_NAME["kimi"].with_tokens(0).make())
        assert weights.shape == slot_ids.shape == (0, 8)
        for router, message in (
            (Router("bias", 8, RouterSpec(2, has_bias=True)), "does not support softmax with"),
            (Router("many", 1025, RouterSpec(2)), "does not support 1025 experts"),
        ):
            with pytest.raises(KernelInputError, match=message):
                subject.route_and_reroute(*router.make())
    assert kernels == []


@pytest.mark.parametrize("adapter_slot", [3, -2])
def test_debug_builds_assert_adapter_slots(
    adapter_slot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "is_debug", lambda: True)
    arguments = BY_NAME["mixtral"].make()
    with interpreter():
        assert_equals_reference(subject.route_and_reroute, arguments)
        arguments[1][4] = adapter_slot
        with pytest.raises(InterpreterError, match="token_adapter_slots out of range"):
            subject.route_and_reroute(*arguments)


def test_debug_builds_name_an_expert_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = BY_NAME["qwen3-moe"].make()  # tokens 5 and later are padding
    where = torch.arange(arguments[2].numel(), dtype=torch.int32)
    with interpreter():
        _, slot_ids = subject.route_and_reroute(*arguments)
        slot = int(slot_ids[4, 7])
        assert not slot_ids[:4].eq(slot).any(), "token 4 is not the first that asks for it"
        where[slot] = NOT_HERE
        assert subject.route_and_reroute(*arguments, where=where)[1][4, 7] == NOT_HERE
        monkeypatch.setattr(subject, "is_debug", lambda: True)
        message = f"token 4 asks for expert {slot % 128}: its slot {slot} is not here, where"
        with pytest.raises(KernelInputError, match=message):
            subject.route_and_reroute(*arguments, where=where)
        monkeypatch.setattr(subject, "can_wait", lambda _: False)
        with pytest.raises(InterpreterError, match="an expert is not here"):
            subject.route_and_reroute(*arguments, where=where)
        where[slot] = slot
        assert torch.equal(subject.route_and_reroute(*arguments, where=where)[1], slot_ids)


SERVED = ["mixtral", "qwen3-moe", "deepseek-v2-lite", "deepseek-v2", "deepseek-v3"]


@pytest.mark.parametrize("name", SERVED)
def test_compiles_without_spilling(name: str) -> None:
    with compiler() as kernels:
        subject.route_and_reroute(*BY_NAME[name].make(torch.bfloat16))
    ptx = kernels[0].asm["ptx"]
    assert ptx.count(".local") == ptx.count("__assertfail") == 0
    assert ptx.count("st.global") <= 8
    used = resources(kernels[0])
    assert (used["STACK"], used["LOCAL"]) == (0, 0)
    assert used["REG"] <= 128


@pytest.mark.parametrize("name", SERVED)
def test_without_where_nothing_is_loaded_for_it(name: str) -> None:
    arguments = BY_NAME[name].make()
    with compiler() as kernels:
        subject.route_and_reroute(*arguments)
        subject.route_and_reroute(*arguments, where=where_drawn(arguments[:3]))
    plain, rows = (kernel.asm["ptx"] for kernel in kernels)
    stores = plain.count("st.global")
    assert 0 < rows.count("ld.global") - plain.count("ld.global") <= stores
    assert rows.count("ld.param") == plain.count("ld.param") + 1
    assert rows.count("st.global") == stores
    assert rows.count(".local") == 0
    assert num_instructions(kernels[0]) < num_instructions(kernels[1])


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # SGLang leaves it open
@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v2-lite", "deepseek-v3"])
def test_is_no_longer_than_a_router_that_does_not_reroute(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe_fused_gate, "is_arch_support_pdl", lambda: False)
    logits, tags, table, spec, bias, live = BY_NAME[name].make()
    with compiler() as kernels:
        subject.route_and_reroute(logits, tags, table, spec, bias, live)
        moe_fused_gate.moe_fused_gate(
            logits,
            bias,
            spec.top_k,
            scoring_func=spec.scoring,
            renormalize=spec.renormalize,
            routed_scaling_factor=spec.routed_scale,
            num_expert_group=spec.num_expert_groups,
            topk_group=spec.topk_groups,
            num_token_non_padded=live,
        )
    ours, theirs = map(num_instructions, kernels)  # neither has a loop
    assert 100 < ours <= theirs


def test_asserts_are_in_debug_builds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with compiler() as kernels:
        subject.route_and_reroute(*BY_NAME["mixtral"].make())
        monkeypatch.setattr(subject, "is_debug", lambda: True)
        subject.route_and_reroute(*BY_NAME["mixtral"].make())
    assert ["__assertfail" in kernel.asm["ptx"] for kernel in kernels] == [False, True]


def test_batches_of_any_size_share_a_binary() -> None:
    router = BY_NAME["deepseek-v2-lite"]
    with compiler() as kernels:
        for num_tokens in (1, 2, 7, 16, 133):
            logits, tags, table, *rest = router.with_tokens(num_tokens).make()
            subject.route_and_reroute(logits, tags, table, *rest)
            later = torch.zeros(num_tokens + 1, dtype=torch.int32)[1:]  # of a static buffer
            subject.route_and_reroute(logits, later, table, *rest)
    assert len({kernel.hash for kernel in kernels}) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_loading_without_a_device_says_so() -> None:
    with pytest.raises(KernelUnavailableError, match="needs a CUDA device"):
        subject.load()


@needs_gpu
def test_equals_the_reference_on_a_gpu() -> None:
    route = subject.load()
    for router in ROUTERS:
        for dtype in LOGIT_DTYPES:
            assert_equals_reference(route, router.with_tokens(133).make(dtype, "cuda"))


@needs_gpu
def test_with_where_a_slot_becomes_its_row_on_a_gpu() -> None:
    subject.load()
    for router in ROUTERS:
        assert_rows_are_those_of_slots(router.with_tokens(133), "cuda")
