"""The CPU platform computes what SGLang's accelerator kernels do, and refuses the rest at start."""

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_esft import platform
from sgl_esft.errors import ConfigError, HookError, UnsupportedModelError
from sgl_esft.platform import cpu_hooks, operators
from sgl_esft.platform.moe import check_runner_config, moe_forward
from tests.support.random_layers import RandomExperts

NUM_EXPERTS, HIDDEN, WIDTH = 8, 12, 6


pytestmark = pytest.mark.usefixtures("one_thread")


def dense(
    hidden: torch.Tensor, experts: RandomExperts, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """The definition in float64, one token and one expert at a time."""
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    for t, row in enumerate(hidden.double()):
        for weight, expert in zip(weights[t].double(), ids[t].tolist(), strict=True):
            if expert >= 0:
                w13, w2 = experts.w13[expert].double(), experts.w2[expert].double()
                gate, up = w13[:WIDTH] @ row, w13[WIDTH:] @ row
                out[t] += weight * (w2 @ (gate / (1 + (-gate).exp()) * up))
    return out


def routed(num_tokens: int, k: int, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """hidden, topk_weights (float32), topk_ids (int32, some -1)."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    weights = torch.rand(num_tokens, k, generator=generator)
    ids = torch.randint(-1, NUM_EXPERTS, (num_tokens, k), generator=generator, dtype=torch.int32)
    return hidden, weights, ids


@settings(max_examples=40)
@given(
    num_tokens=st.sampled_from([0, 1, 2, 3, 7, 20]),
    k=st.integers(1, 6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    id_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**16),
)
def test_moe_forward_equals_the_dense_definition(
    num_tokens: int, k: int, dtype: torch.dtype, id_dtype: torch.dtype, seed: int
) -> None:
    experts = RandomExperts.draw(NUM_EXPERTS, HIDDEN, WIDTH, seed, dtype)
    hidden, weights, ids = routed(num_tokens, k, seed, dtype)
    inputs = hidden.clone(), weights.clone(), ids.clone()
    out = moe_forward(hidden, experts.w13, experts.w2, weights, ids.to(id_dtype))
    tolerance = 1e-5 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(
        out.double(), dense(hidden, experts, weights, ids), atol=tolerance, rtol=tolerance
    )
    assert out.dtype == dtype
    assert out.shape == hidden.shape
    assert all(map(torch.equal, inputs, (hidden, weights, ids))), "an input was changed"


def test_moe_forward_reads_only_the_experts_it_needs() -> None:
    experts = RandomExperts.draw(NUM_EXPERTS, HIDDEN, WIDTH, 0, torch.float32)
    hidden, weights, _ = routed(3, 2, 0)
    ids = torch.tensor([[1, -1], [4, 1], [-1, -1]], dtype=torch.int32)
    expected = moe_forward(hidden, experts.w13, experts.w2, weights, ids)
    for untouched in (0, 2, 3, 5, 6, 7):
        experts.w13[untouched] = float("nan")
        experts.w2[untouched] = float("nan")
    assert torch.equal(moe_forward(hidden, experts.w13, experts.w2, weights, ids), expected)
    assert torch.equal(expected[2], torch.zeros(HIDDEN)), "a token without experts gets zero"
    assert expected[:2].abs().sum() > 0


@settings(max_examples=20)
@given(order=st.permutations(range(NUM_EXPERTS)), seed=st.integers(0, 2**16))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moving_experts_to_other_slots_changes_no_bit(
    dtype: torch.dtype, order: list[int], seed: int
) -> None:
    experts = RandomExperts.draw(NUM_EXPERTS, HIDDEN, WIDTH, seed, dtype)
    hidden, weights, ids = routed(9, 4, seed, dtype)
    expected = moe_forward(hidden, experts.w13, experts.w2, weights, ids)
    slot_of = torch.empty(NUM_EXPERTS, dtype=torch.int32)
    slot_of[list(order)] = torch.arange(NUM_EXPERTS, dtype=torch.int32)
    moved = RandomExperts(experts.w13[list(order)], experts.w2[list(order)])
    slots = slot_of[ids].masked_fill(ids < 0, -1)
    assert torch.equal(moe_forward(hidden, moved.w13, moved.w2, weights, slots), expected)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"activation": "gelu"}, "gelu"),
        ({"activation": "silu", "gemm1_alpha": 1.7}, "plain SiLU"),
        ({"apply_router_weight_on_input": True}, "apply_router_weight_on_input"),
    ],
)
def test_refuses_a_moe_it_does_not_compute(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        check_runner_config(SimpleNamespace(**config))
    with pytest.raises(UnsupportedModelError, match=message):
        operators.CpuRunnerCore(SimpleNamespace(**config))


def unquantised_layer(experts: RandomExperts, routing: Any) -> Callable[[], torch.Tensor]:
    """Its forward, as SGLang's method without quantisation calls it."""
    hidden, weights, ids = routing
    layer = SimpleNamespace(w13_weight=experts.w13, w2_weight=experts.w2, num_experts=2)
    topk = SimpleNamespace(topk_weights=weights, topk_ids=ids, router_logits=None)
    core = operators.CpuRunnerCore(SimpleNamespace(activation="silu", gemm1_alpha=None))
    method = SimpleNamespace(runner=SimpleNamespace(runner_core=core, config=core.config))
    dispatched = SimpleNamespace(hidden_states=hidden, topk_output=topk)
    return lambda: operators.forward_experts(method, layer, dispatched).hidden_states


def test_the_forward_takes_the_layers_weights_and_its_runners_core() -> None:
    experts = RandomExperts.draw(NUM_EXPERTS, HIDDEN, WIDTH, 0, torch.float32)
    hidden, weights, ids = routing = routed(5, 3, 1)
    out = unquantised_layer(experts, routing)()
    assert torch.equal(out, moe_forward(hidden, experts.w13, experts.w2, weights, ids))


def test_an_unquantised_layer_calls_one_function_for_each_expert_that_it_touches() -> None:
    """Quantised experts and tiers cost it nothing: each call more is in every layer of each step.

    bench/soak/token_time.py counts a whole step's.
    """
    experts = RandomExperts.draw(NUM_EXPERTS, HIDDEN, WIDTH, 0, torch.float32)
    routing = routed(5, 3, 1)
    forward = unquantised_layer(experts, routing)
    calls: Counter[str] = Counter()

    def profile(frame: Any, event: str, arg: Any) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and "/sgl_esft/" in file:
            calls[name] += 1
        if event == "c_call" and arg in (getattr, isinstance):
            calls[arg.__name__] += "/sgl_esft/" in file

    sys.setprofile(profile)
    try:
        forward()
    finally:
        sys.setprofile(None)
    num_touched = len(set(routing[2].flatten().tolist()) - {-1})
    once = ("forward_experts", "run_from_dispatch", "experts_of", "weighted_sum")
    assert +calls == {"compute": num_touched, **dict.fromkeys(once, 1)}


def test_a_layer_whose_runner_is_not_asked_is_refused() -> None:
    """A woven core would be ignored there, and adapters with it."""
    found = SimpleNamespace(_resolve_forward_method=operators.forward_experts.__get__(object()))
    own = SimpleNamespace(_resolve_forward_method=lambda: found._resolve_forward_method)
    operators.check_registered(own)
    with pytest.raises(HookError, match="adapters would be ignored"):
        operators.check_registered(SimpleNamespace(_resolve_forward_method=lambda: print))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_shared_expert_is_rounded_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, shared, final = (
        torch.randn(5, HIDDEN, generator=generator).to(dtype) for _ in range(3)
    )
    gate = torch.randn(HIDDEN, generator=generator).to(dtype)
    sigmoid = 1 / (1 + (-(hidden.float() @ gate.float())).exp())
    expected = (final.float() + sigmoid[:, None] * shared.float()).to(dtype)
    cpu_hooks.add_gated_shared_expert(hidden, gate, shared, final)
    torch.testing.assert_close(final, expected, atol=1e-6, rtol=1e-6 if dtype.itemsize > 2 else 0)


@pytest.mark.parametrize(
    ("offset", "size", "offset_src", "expected"),
    [
        (1, 2, False, [9, 0, 1, 9, 9]),
        (0, 0, False, [9, 9, 9, 9, 9]),
        (3, 2, True, [3, 4, 9, 9, 9]),
        (0, 5, True, [0, 1, 2, 3, 4]),
    ],
)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_memcpy_copies_rows(
    offset: int, size: int, offset_src: bool, expected: list[int], as_tensor: bool
) -> None:
    src = torch.arange(5).repeat_interleave(3).view(5, 3)
    dst = torch.full((5, 3), 9)
    place = (torch.tensor(offset), torch.tensor(size)) if as_tensor else (offset, size)
    cpu_hooks.memcpy(dst, src, 0, *place, offset_src)
    assert dst[:, 0].tolist() == expected
    assert torch.equal(dst, dst[:, :1].expand(5, 3))


def test_padding_rows_attend_to_one_token_and_torch_native_takes_the_absorbed_mla_path() -> None:
    backend = object.__new__(operators.CpuAttentionBackend)
    assert backend.get_cpu_graph_seq_len_fill_value() == 1
    assert operators.absorbed_mla(None, None).name == "MLA"


class _Stop(Exception):
    """Ends a loop that serves for ever."""


@pytest.fixture
def controller() -> Iterator[SimpleNamespace]:
    """A data parallel controller with a real socket; its loop ends at the third watchdog feed."""
    context = zmq.Context()
    receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    receiver.bind("inproc://requests")
    sender.connect("inproc://requests")
    fed: list[int] = []

    def feed() -> None:
        fed.append(len(seen))
        if len(fed) == 3:
            raise _Stop

    seen: list[Any] = []
    yield SimpleNamespace(
        recv_from_tokenizer=receiver,
        sender=sender,
        soft_watchdog=SimpleNamespace(feed=feed),
        _request_dispatcher=seen.append,
        seen=seen,
        fed=fed,
    )
    context.destroy(linger=0)


def test_controller_serves_every_waiting_request_and_sleeps_between(
    controller: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.managers.io_struct import FlushCacheReqInput, sock_send

    monkeypatch.setattr(cpu_hooks, "DP_CONTROLLER_POLL_MS", 20)
    for _ in range(3):
        sock_send(controller.sender, FlushCacheReqInput())
    with pytest.raises(_Stop):
        cpu_hooks.wait_for_request(lambda _: None, controller)
    assert [type(request).__name__ for request in controller.seen] == ["FlushCacheReqInput"] * 3
    assert controller.fed == [0, 3, 3], "fed while idle too, and not once a request"


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def pretend(*, cuda: bool = False, npu: bool | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        module = None if npu is None else SimpleNamespace(is_available=lambda: npu)
        monkeypatch.setattr(torch, "npu", module, raising=False)

    return pretend


@pytest.mark.parametrize(
    ("choice", "present", "active"),
    [
        (None, {}, True),
        ("auto", {"npu": False}, True),
        ("auto", {"cuda": True}, False),
        ("auto", {"npu": True}, False),
        ("cpu", {"cuda": True}, True),
        ("native", {}, False),
    ],
)
def test_where_the_platform_is_active(
    choice: str | None,
    present: dict[str, bool],
    active: bool,
    devices: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices(**present)
    variable = platform.env.PLATFORM
    if choice is None:
        monkeypatch.delenv(variable, raising=False)
    else:
        monkeypatch.setenv(variable, choice)
    assert platform.is_active() is active
    assert (platform.activate() is not None) is active


def test_platform_class_is_sglangs_own_out_of_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.platforms.device_mixin import PlatformEnum

    monkeypatch.setenv(platform.env.PLATFORM, "cpu")
    dotted = platform.activate()
    module, _, name = dotted.rpartition(".")
    active = getattr(importlib.import_module(module), name)()
    assert active._enum is PlatformEnum.OOT
    assert active.device_type == "cpu"
    assert active.get_default_attention_backend() == "torch_native"
    assert active.get_dispatch_key_name() == "native"
    assert active.get_mha_kv_pool_cls() is MHATokenToKVPool
    assert issubclass(active.get_mla_kv_pool_cls(), MLATokenToKVPool)


def test_platform_class_knows_the_device_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from sgl_esft.platform.cpu import CpuReferencePlatform

    monkeypatch.setenv(platform.env.PLATFORM, "cpu")
    machine = CpuReferencePlatform()
    assert machine.get_device_total_memory() > 1 << 28
    assert machine.get_current_memory_usage() > 1 << 24
    monkeypatch.setenv(platform.env.DEVICE_MEMORY, "1MiB")
    assert machine.get_device_total_memory() == 1 << 20
    assert machine.get_current_memory_usage() == 0


def allocator(page_size: int) -> Any:
    from sgl_esft.platform.kv_pools import make_kv_allocator

    return make_kv_allocator(
        8, page_size=page_size, dtype=torch.float32, device="cpu", kvcache=None, need_sort=False
    )


def test_kv_allocator_hands_out_tokens_and_refuses_pages_at_start() -> None:
    """SGLang's paged allocator would end the server at the first request, in a Triton kernel."""
    pool = allocator(page_size=1)
    assert pool.available_size() == 8
    assert pool.alloc(3).tolist() == [1, 2, 3], "slot 0 is for padding"
    with pytest.raises(ConfigError, match="--page-size 16"):
        allocator(page_size=16)


def test_mla_pool_takes_and_drops_what_only_sparse_attention_uses() -> None:
    from sgl_esft.platform.kv_pools import CpuMLATokenToKVPool

    sizes = {"page_size": 1, "dtype": torch.float32, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
    rest = {"layer_num": 2, "device": "cpu", "enable_memory_saver": False}
    pool = CpuMLATokenToKVPool(16, **sizes, index_head_dim=None, **rest)
    assert pool.get_key_buffer(1).shape[-1] == 12
    with pytest.raises(UnsupportedModelError, match="sparse attention"):
        CpuMLATokenToKVPool(16, **sizes, index_head_dim=64, **rest)
