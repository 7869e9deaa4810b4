"""Rerouting in a MoE layer's path: the router's expert ids become slots of this rank.

    TopK -> [Rerouter] -> SGLang's dispatch, experts and combine, unchanged

With expert parallelism SGLang has a gather of its own there (global expert id ->
local slot or -1); the expert map's rows contain it, so the Rerouter replaces it.
"""

from __future__ import annotations

import torch

from sgl_esft.batch_tags import BatchTags
from sgl_esft.expert_map import ExpertMap
from sgl_esft_kernels import reroute_unfused


class Rerouter:
    """One layer's step from expert ids to slot ids."""

    def __init__(self, expert_map: ExpertMap, tags: BatchTags, *, is_expert_parallel: bool) -> None:
        self._map = expert_map
        self._tags = tags
        self._is_expert_parallel = is_expert_parallel

    def __call__(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens, k] expert ids (-1 = none) -> slot ids of this rank (-1 = none here)."""
        if not self._tags.all_base:
            tags = self._tags.token_adapter_slots(topk_ids.shape[0])
            return reroute_unfused(topk_ids, tags, self._map.table)
        if not self._is_expert_parallel:
            return topk_ids  # the base's row of the map is the identity
        return self._map.base_row[topk_ids].masked_fill_(topk_ids < 0, -1)
