"""Rerouting in a graph: adapters come and go between its replays, and nothing is captured again.

A layer of SGLang's face and ours, of one rank and of a rank with half of the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from sgl_esft.weave.batch_tags import BatchTags
from sgl_esft.weave.reroute import Rerouter, load_reroute
from sgl_esft_kernels import reroute_unfused
from tests.fast.layer.test_woven_layer import (
    HIDDEN,
    MAX_ADAPTERS,
    MAX_EXPERTS,
    NUM_EXPERTS,
    TUNED,
    WIDTH,
)
from tests.support.graph_simulator import installed
from tests.support.random_layers import FakeFusedMoE, RandomExperts, Rank, share_of

BATCH = 12


@pytest.fixture(autouse=True)
def simulated() -> Iterator[None]:
    with installed():
        yield


@pytest.fixture(params=[Rank(), Rank(ep_size=2, ep_rank=1)], ids=str)
def rank(request: pytest.FixtureRequest) -> Rank:
    return request.param


@pytest.mark.parametrize("kind", ["fused", "unfused"])
def test_adapters_come_and_go_without_a_new_capture(rank: Rank, kind: str) -> None:
    experts = RandomExperts.draw(NUM_EXPERTS, HIDDEN, WIDTH, 0, torch.float32)
    woven = FakeFusedMoE(experts, rank, max_adapters=MAX_ADAPTERS, max_experts=MAX_EXPERTS).woven()
    tags = BatchTags(BATCH, "cpu")
    topk_ids = torch.randint(NUM_EXPERTS, (BATCH, 3), dtype=torch.int32)
    captured = Rerouter(woven.expert_map, tags, load_reroute(kind, torch.device("cpu")))
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        slot_ids = captured(topk_ids)
    eager = Rerouter(woven.expert_map, tags, reroute_unfused)
    seen = [slot_ids.clone()]

    def replays_as(change: Callable[[], None]) -> None:
        change()
        topk_ids.copy_(torch.randint(NUM_EXPERTS, (BATCH, 3), dtype=torch.int32))
        graph.replay()
        assert torch.equal(slot_ids, eager(topk_ids))
        seen.append(slot_ids.clone())

    def tag(*slots: int) -> None:
        tags.set(torch.tensor(slots, dtype=torch.int32))

    def place(slot: int, adapter: int) -> None:
        woven.place(slot, share_of(experts.chosen(*TUNED[adapter]), woven.shard))

    replays_as(lambda: tag(*[0] * BATCH))  # a slot without an adapter is the base
    replays_as(lambda: place(0, 0))
    replays_as(lambda: place(1, 1))
    replays_as(lambda: tag(0, 1, -1, 1))
    replays_as(lambda: woven.displace(0))
    replays_as(lambda: place(0, 3))
    tag(*[0] * 900)  # a prefill that no graph was captured for
    replays_as(lambda: tag(1, 0, 1))
    replays_as(tags.reset)
    adapter_slots = [ids[ids >= woven.layout.num_base] for ids in seen]
    assert any(len(slots) for slots in adapter_slots), "no replay met an adapter"
