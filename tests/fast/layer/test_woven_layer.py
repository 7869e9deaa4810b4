"""A woven layer gives, bit for bit, what the layer with the adapter's experts merged in gives.

    random layer --merge--> plain rank  --moe_forward--> expected
                 --place--> woven rank  --Rerouter, moe_forward--> seen

First with stand-ins for SGLang's FusedMoE, then with the real one, its loader and its dispatcher.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_esft.config import EXPERT_MEMORY_KINDS, EsftConfig
from sgl_esft.platform.moe import moe_forward
from sgl_esft.weave.batch_tags import BatchTags
from sgl_esft.weave.expert_memory import PaddedMemory
from sgl_esft.weave.moe_layer import ExpertWeights, WovenLayer
from sgl_esft.weave.reroute import Rerouter
from sgl_esft_kernels import reroute_unfused
from tests.support.processes import run_module
from tests.support.random_layers import PADDED, VIRTUAL, FakeFusedMoE, RandomExperts, Rank, share_of

ROOT = Path(__file__).resolve().parents[3]
NUM_EXPERTS, HIDDEN, WIDTH, TOP_K = 16, 64, 32, 4
MAX_ADAPTERS, MAX_EXPERTS = 3, 5
RANKS = {
    "one rank": [Rank()],
    "EP2": [Rank(ep_rank=r, ep_size=2) for r in range(2)],
    "TP2": [Rank(tp_rank=r, tp_size=2) for r in range(2)],
    "EP2 x TP2": [Rank(e, 2, t, 2) for e in range(2) for t in range(2)],
}
# Overlapping, disjoint, none, and as many as fit; on EP2, one that is all on one rank.
TUNED = ([0, 3, 9, 15], [3, 4, 5], [8, 9, 10, 11, 12], [1, 2, 14])

# SGLang makes a layer of another kind for them, on any device and without their packages.
OTHER_BACKENDS = ("flashinfer_cutlass", "flashinfer_trtllm", "deep_gemm", "triton_kernel")

Routed = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor
]  # hidden [n, H], weights [n, k], ids [n, k]
Adapter = dict[int, ExpertWeights]


def draw_batch(num_tokens: int, dtype: torch.dtype, seed: int = 0) -> Routed:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    logits = torch.randn(num_tokens, NUM_EXPERTS, generator=generator)
    weights, ids = logits.softmax(dim=-1).topk(TOP_K)
    return hidden, weights, ids.to(torch.int32)


class Layer:
    """The base, its adapters, and one rank of it, plain and woven."""

    def __init__(self, dtype: torch.dtype, rank: Rank, config: EsftConfig = VIRTUAL) -> None:
        self.rank = rank
        self.base = RandomExperts.draw(NUM_EXPERTS, HIDDEN, WIDTH, 0, dtype)
        tuned = [RandomExperts.draw(NUM_EXPERTS, HIDDEN, WIDTH, 1 + i, dtype) for i in range(4)]
        self.adapters = [t.chosen(*ids) for t, ids in zip(tuned, TUNED, strict=True)]
        sizes = {"max_adapters": MAX_ADAPTERS, "max_experts": MAX_EXPERTS}
        self.woven: WovenLayer = FakeFusedMoE(self.base, rank, config=config, **sizes).woven()
        self.tags = BatchTags(256, "cpu")
        self._reroute = Rerouter(self.woven.expert_map, self.tags, reroute_unfused)

    def place(self, adapter_slot: int, adapter: Adapter) -> None:
        self.woven.place(adapter_slot, share_of(adapter, self.woven.shard))

    def run(self, batch: Routed, slots: list[int]) -> torch.Tensor:
        """The woven rank's part of the output, for tokens of these adapter slots."""
        hidden, weights, ids = batch
        tags = torch.tensor(slots, dtype=torch.int32)
        self.tags.set(tags)
        return moe_forward(hidden, self.woven.w13, self.woven.w2, weights, self._reroute(ids))

    def merged(self, batch: Routed, adapter: Adapter) -> torch.Tensor:
        """The same part from a plain rank of the merged layer; `{}` is the base."""
        hidden, weights, ids = batch
        plain = FakeFusedMoE(self.base.merged(adapter), self.rank)
        local_ids = plain.woven().expert_map.base_row[ids]
        w13, w2 = plain.w13_weight, plain.w2_weight
        assert isinstance(w13, torch.Tensor)
        assert isinstance(w2, torch.Tensor)
        return moe_forward(hidden, w13.data, w2.data, weights, local_ids)


each_rank = pytest.mark.parametrize("rank", [r for ranks in RANKS.values() for r in ranks], ids=str)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=[VIRTUAL, PADDED], ids=lambda config: config.expert_memory)
def layer(request: pytest.FixtureRequest, dtype: torch.dtype, rank: Rank) -> Iterator[Layer]:
    """Adapters 0 to 2 side by side in slots 0 to 2."""
    layer = Layer(dtype, rank, request.param)
    for slot in range(MAX_ADAPTERS):
        layer.place(slot, layer.adapters[slot])
    yield layer
    layer.woven.check_integrity()


@each_dtype
@each_rank
@pytest.mark.parametrize("num_tokens", [1, 5, 64])
def test_each_adapter_is_its_merged_layer_and_the_base_the_base(
    layer: Layer, dtype: torch.dtype, num_tokens: int
) -> None:
    batch = draw_batch(num_tokens, dtype)
    outputs = [layer.run(batch, [slot] * num_tokens) for slot in range(MAX_ADAPTERS)]
    for slot, output in enumerate(outputs):
        assert torch.equal(output, layer.merged(batch, layer.adapters[slot]))
    assert torch.equal(layer.run(batch, [-1] * num_tokens), layer.merged(batch, {}))
    if num_tokens > 5:
        assert len({str(o.float().sum().item()) for o in outputs}) > 1, "all outputs are one"


@each_dtype
@each_rank
def test_a_batch_of_all_kinds(layer: Layer, dtype: torch.dtype) -> None:
    """An expert's matmul has fewer rows than in the merged layer: equal up to rounding."""
    num_tokens = 60
    batch = draw_batch(num_tokens, dtype)
    slots = [t % (MAX_ADAPTERS + 1) - 1 for t in range(num_tokens)]
    output = layer.run(batch, slots)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for slot in range(-1, MAX_ADAPTERS):
        own = [t for t in range(num_tokens) if slots[t] == slot]
        merged = layer.merged(batch, {} if slot == -1 else layer.adapters[slot])
        torch.testing.assert_close(output[own], merged[own], atol=tolerance, rtol=tolerance)


@each_dtype
@each_rank
def test_another_adapter_in_the_same_slot(layer: Layer, dtype: torch.dtype) -> None:
    batch = draw_batch(40, dtype)
    layer.woven.displace(1)
    if isinstance(layer.woven.memory, PaddedMemory):  # virtual slots are gone: a read would fault
        own = layer.woven.layout.adapter_range(1)
        layer.woven.w13[own.start : own.stop] = float("nan")
        layer.woven.w2[own.start : own.stop] = float("nan")
    assert torch.equal(layer.run(batch, [1] * 40), layer.merged(batch, {})), "an empty slot is base"
    layer.place(1, layer.adapters[3])
    for slot, adapter in ((1, 3), (0, 0), (2, 2)):
        expected = layer.merged(batch, layer.adapters[adapter])
        assert torch.equal(layer.run(batch, [slot] * 40), expected)


@each_dtype
@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
def test_the_ranks_parts_make_up_the_whole(dtype: torch.dtype, ranks: list[Rank]) -> None:
    batch = draw_batch(40, dtype)
    parts = []
    for rank in ranks:
        layer = Layer(dtype, rank)
        layer.place(2, layer.adapters[0])
        parts.append(layer.run(batch, [2] * 40).float())
    whole = Layer(dtype, Rank())
    expected = whole.merged(batch, whole.adapters[0]).float()
    tolerance = 1e-5 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(sum(parts), expected, atol=tolerance, rtol=tolerance)


def test_padding_rows_of_the_batch_are_base() -> None:
    layer = Layer(torch.float32, Rank())
    layer.place(0, layer.adapters[0])
    batch = draw_batch(8, torch.float32)
    layer.tags.set(torch.zeros(8, dtype=torch.int32))
    layer.tags.set(torch.zeros(0, dtype=torch.int32))
    hidden, weights, ids = batch
    output = moe_forward(hidden, layer.woven.w13, layer.woven.w2, weights, layer._reroute(ids))
    assert torch.equal(output, layer.merged(batch, {}))


@pytest.fixture(scope="module", params=EXPERT_MEMORY_KINDS)
def real(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The comparisons of `tests/fast/layer/real_fused_moe.py`, made in a process of their own."""
    alone = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    return run_module("tests.fast.layer.real_fused_moe", request.param, **alone)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", RANKS)
def test_sglangs_fused_moe(real: dict[str, Any], ranks: str, dtype: str) -> None:
    """Loaded by its own loader, dispatched by its own dispatcher, hooked as in a server."""
    for rank in RANKS[ranks]:
        seen = real["comparisons"][f"{rank} {dtype}"]
        assert set(seen) == {
            *(f"adapter in slot {slot}" for slot in range(MAX_ADAPTERS)),
            "base",
            "another adapter in slot 1",
            "base after unloading",
        }
        assert {name: found for name, found in seen.items() if found != "equal"} == {}


def test_sglangs_fused_moe_sees_the_adapters(real: dict[str, Any]) -> None:
    """The comparisons would find a layer that ignored its adapters."""
    assert real["adapters_change_the_output"] is True


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "without_slots",
            "MoE layer 3 uses UnquantizedFusedMoEMethod: only unquantised experts can be woven",
        ),
        ("other_layers", "DeepseekV2ForCausalLM: "),
        ("foreign_dispatcher", "dispatcher object: "),
        ("no_ids", "top-k output "),
        *(
            (backend, f"layer 3 on cpu computes its experts by the MoE runner backend {backend}, ")
            for backend in OTHER_BACKENDS
        ),
    ],
)
def test_what_cannot_be_woven_is_refused(real: dict[str, Any], given: str, said: str) -> None:
    assert real[given].startswith(f"UnsupportedModelError: {said}")
