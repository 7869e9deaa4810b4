"""What a captured graph reads stays where it is: adapters come and go between its replays.

    capture: [tags, map, topk_ids, out] by address -> replays with the contents of the moment

A CUDA graph repeats a kernel with the addresses it was captured with. Here the same operator is
called again with the tensors of its first call, which is all a graph does with it.
"""

from __future__ import annotations

from collections.abc import Callable

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
from tests.support.random_layers import FakeFusedMoE, RandomExperts, Rank, share_of

BATCH = 12


class Graph:
    """A reroute kernel that was captured once."""

    def __init__(self, topk_ids: torch.Tensor) -> None:
        self.topk_ids = topk_ids  # a graph's input lies in a buffer of its own
        self.slot_ids = torch.empty_like(topk_ids)
        self._kernel = load_reroute("fused", torch.device("cpu"))
        self._captured: tuple[torch.Tensor, ...] = ()

    def capture(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Stands where the rerouter calls its kernel."""
        self._captured = tensors
        return self._kernel(*tensors, out=self.slot_ids)

    def replay(self) -> torch.Tensor:
        return self._kernel(*self._captured, out=self.slot_ids)


@pytest.fixture(params=[Rank(), Rank(ep_size=2, ep_rank=1)], ids=str)
def rank(request: pytest.FixtureRequest) -> Rank:
    return request.param


def test_adapters_come_and_go_without_a_new_capture(rank: Rank) -> None:
    experts = RandomExperts.draw(NUM_EXPERTS, HIDDEN, WIDTH, 0, torch.float32)
    woven = FakeFusedMoE(experts, rank, max_adapters=MAX_ADAPTERS, max_experts=MAX_EXPERTS).woven()
    tags = BatchTags(BATCH, "cpu")
    graph = Graph(torch.randint(NUM_EXPERTS, (BATCH, 3), dtype=torch.int32))
    Rerouter(woven.expert_map, tags, graph.capture)(graph.topk_ids)
    eager = Rerouter(woven.expert_map, tags, reroute_unfused)
    seen = [graph.slot_ids.clone()]

    def replays_as(change: Callable[[], None]) -> None:
        change()
        graph.topk_ids.copy_(torch.randint(NUM_EXPERTS, (BATCH, 3), dtype=torch.int32))
        expected = eager(graph.topk_ids)
        assert torch.equal(graph.replay(), expected)
        seen.append(expected)

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
