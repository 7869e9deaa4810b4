"""Rerouting inside the router: SGLang's own choice and weights, as slots; the rest refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.configs.shared_experts import SharedExpertsConfig

from sgl_esft.errors import InvariantError, UnsupportedDeviceError, UnsupportedModelError
from sgl_esft.weave.batch_tags import BatchTags
from sgl_esft.weave.expert_map import ExpertMap, base_row
from sgl_esft.weave.reroute import Rerouter, load_reroute
from sgl_esft.weave.router import FusedRouter, load_router, spec_of
from sgl_esft.weave.slot_layout import SlotLayout
from sgl_esft_kernels import KernelInputError, reroute_unfused

NUM_EXPERTS, NUM_TOKENS, TOP_K = 16, 40, 4
CPU = torch.device("cpu")

ROUTERS: dict[str, dict[str, Any]] = {
    "deepseek v2": {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1},
    "deepseek v2, groups": {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2},
    "deepseek v3": {
        "use_grouped_topk": True,
        "num_expert_group": 4,
        "topk_group": 2,
        "scoring_func": "sigmoid",
        "correction_bias": torch.linspace(-0.2, 0.2, NUM_EXPERTS),
        "routed_scaling_factor": 2.5,
    },
    "qwen": {"renormalize": True},
    "qwen, not renormalised": {"renormalize": False},
}


def config_of(**fields: Any) -> Any:
    """SGLang's own."""
    from sglang.srt.layers.moe.topk import TopKConfig

    return TopKConfig(**{"top_k": TOP_K, "torch_native": True, **fields})


def map_of_rank(num_ranks: int) -> ExpertMap:
    """The last rank's part; adapter 0 replaces nothing, adapter 1 five experts."""
    per_rank = NUM_EXPERTS // num_ranks
    layout = SlotLayout.plan(
        num_base=per_rank, num_routed=per_rank, num_adapters=2, max_experts_per_adapter=5
    )
    row = base_row(
        num_experts=NUM_EXPERTS,
        num_routed_global=NUM_EXPERTS,
        num_routed_local=per_rank,
        ep_rank=num_ranks - 1,
    )
    expert_map = ExpertMap(row, layout, "cpu")
    own = [e for e in (1, 4, 9, 13, 15) if row[e] >= 0]
    expert_map.write(1, dict(zip(own, layout.adapter_range(1), strict=False)))
    return expert_map


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("router", ROUTERS)
def test_equals_sglangs_router_and_the_rerouter(router: str, num_ranks: int) -> None:
    from sglang.srt.layers.moe.topk import select_experts

    config, tags = config_of(**ROUTERS[router]), BatchTags(64, CPU)
    expert_map = map_of_rank(num_ranks)
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=generator)
    slots = torch.randint(-1, 2, (NUM_TOKENS,), generator=generator, dtype=torch.int32)
    tags.set(slots)

    with torch.compiler.set_stance("force_eager"):  # SGLang compiles its grouped top-k
        theirs = select_experts(torch.zeros(NUM_TOKENS, 8), logits, config)
    expected = Rerouter(expert_map, tags, reroute_unfused)(theirs.topk_ids)
    weights, slot_ids = FusedRouter(config, expert_map, tags, load_router(CPU))(logits, None)

    # A token's experts come in any order, each with its weight.
    for token in range(NUM_TOKENS):
        ours = sorted(zip(slot_ids[token].tolist(), weights[token].tolist(), strict=True))
        wanted = sorted(
            zip(expected[token].tolist(), theirs.topk_weights[token].tolist(), strict=True)
        )
        assert [slot for slot, _ in ours] == [slot for slot, _ in wanted]
        assert [w for _, w in ours] == pytest.approx([w for _, w in wanted], rel=1e-5)
    assert expected.unique().numel() > TOP_K, "the case reroutes nothing"


def test_padding_tokens_have_no_expert() -> None:
    tags = BatchTags(64, CPU)
    router = FusedRouter(config_of(), map_of_rank(1), tags, load_router(CPU))
    weights, slot_ids = router(torch.randn(6, NUM_EXPERTS), torch.tensor(4))
    assert (slot_ids[4:] == -1).all()
    assert (slot_ids[:4] >= 0).all()
    assert (weights[4:] == 0).all()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"custom_routing_function": print}, "custom_routing_function"),
        ({"scoring_func": "sqrtsoftplus"}, "sqrtsoftplus"),
        ({"sqrtsoftplus_log1p": True}, "sqrtsoftplus_log1p True"),
        ({"fused_gate_packed_ids": True}, "fused_gate_packed_ids"),
        ({"top_k": 64}, "64 experts a token"),
        ({"shared_experts": SharedExpertsConfig(False, TOP_K)}, "num_fused_shared_experts is 4"),
        ({"routed_scaling_factor": -1.0}, "routed_scaling_factor is -1.0"),
    ],
)
def test_a_router_that_is_not_computed_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"--reroute router.*{reason}.*--reroute fused"):
        spec_of(config_of(**fields))


def test_a_device_without_kernels_is_named() -> None:
    device = torch.device("meta")
    with pytest.raises(UnsupportedDeviceError, match=r"--reroute router: .* 'meta'"):
        load_router(device)
    with pytest.raises(UnsupportedDeviceError, match=r"--reroute fused: .* 'meta'"):
        load_reroute("fused", device)


@pytest.mark.parametrize("kind", ["fused", "unfused"])
def test_what_is_loaded_answers_right(kind: str) -> None:
    expert_map, tags = map_of_rank(1), BatchTags(8, CPU)
    tags.set(torch.tensor([1, -1], dtype=torch.int32))
    rerouter = Rerouter(expert_map, tags, load_reroute(kind, CPU))
    ids = torch.tensor([[1, 2, -1], [1, 2, -1]], dtype=torch.int32)
    first = expert_map.layout.adapter_range(1).start
    assert rerouter(ids).tolist() == [[first, 2, -1], [1, 2, -1]]
    assert rerouter(ids.t().contiguous().t()).tolist() == [[first, 2, -1], [1, 2, -1]]


def test_a_kernel_that_answers_wrongly_is_not_served_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def ignores_adapters(
        topk_ids: torch.Tensor, tags: torch.Tensor, expert_map: torch.Tensor
    ) -> torch.Tensor:
        return reroute_unfused(topk_ids, torch.full_like(tags, -1), expert_map)

    monkeypatch.setattr("sgl_esft.weave.reroute.choose", lambda *_: ignores_adapters)
    with pytest.raises(InvariantError, match=r"--reroute fused on cpu answers .* must be"):
        load_reroute("fused", CPU)


def test_a_map_of_the_wrong_height_is_refused() -> None:
    expert_map = map_of_rank(1)
    expert_map.table = expert_map.table[:2]
    with pytest.raises(KernelInputError, match="must have 3 rows"):
        Rerouter(expert_map, BatchTags(8, CPU), reroute_unfused)
    with pytest.raises(KernelInputError, match="must have 3 rows"):
        FusedRouter(config_of(), expert_map, BatchTags(8, CPU), load_router(CPU))
