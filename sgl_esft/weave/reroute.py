"""Rerouting in a MoE layer's path: the router's expert ids become slots of this rank.

    TopK -> SGLang's dispatch -> [Rerouter] -> the device's experts, combine

With expert parallelism SGLang's dispatch has a gather of its own (global expert id ->
local slot or -1); the expert map's rows contain it, so the Rerouter replaces it.
"""

from __future__ import annotations

import torch

from sgl_esft.errors import InvariantError, UnsupportedDeviceError
from sgl_esft.weave.batch_tags import BatchTags
from sgl_esft.weave.expert_map import ExpertMap
from sgl_esft.weave.heat import LayerHeat
from sgl_esft_kernels import (
    KernelUnavailableError,
    RerouteFunction,
    check_map_height,
    choose,
    reroute_unfused,
)

# --reroute -> the implementation; None = the device's own kernel.
_IMPLEMENTATIONS = {"unfused": "reference", "fused": None}


class Rerouter:
    """One layer's step from expert ids to slot ids."""

    def __init__(
        self,
        expert_map: ExpertMap,
        tags: BatchTags,
        reroute: RerouteFunction,
        heat: LayerHeat | None = None,
    ) -> None:
        """heat: counts what is routed, where experts are counted."""
        check_map_height(expert_map.table, expert_map.num_rows - 1)
        self._table = expert_map.table
        self._tags = tags
        self._reroute = reroute
        self._heat = heat

    def __call__(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens, k] expert ids (-1 = none) -> slot ids of this rank (-1 = none here)."""
        tags = self._tags.token_adapter_slots(topk_ids.shape[0])
        if self._heat is not None:
            self._heat(topk_ids, tags)
        return self._reroute(topk_ids.contiguous(), tags, self._table)


def load_reroute(kind: str, device: torch.device) -> RerouteFunction:
    """What `--reroute kind` runs on a device, loaded and tried once.

    Raises UnsupportedDeviceError when it is not there, InvariantError when it is wrong.
    """
    try:
        reroute = choose(_IMPLEMENTATIONS[kind], device.type)
    except KernelUnavailableError as error:
        raise UnsupportedDeviceError(f"--reroute {kind}: {error}") from error
    _try(reroute, kind, device)
    return reroute


def _try(reroute: RerouteFunction, kind: str, device: torch.device) -> None:
    """A kernel that answers wrongly would serve one adapter's tokens with another's experts."""
    expert_map = torch.arange(15, dtype=torch.int32).view(3, 5)
    expert_map[1, 2] = -1
    tags = torch.tensor([0, -1, 1, -1], dtype=torch.int32)
    topk_ids = torch.tensor([[0, 4], [3, -1], [2, 1], [-1, -1]], dtype=torch.int32)
    found = reroute(topk_ids.to(device), tags.to(device), expert_map.to(device)).cpu()
    expected = reroute_unfused(topk_ids, tags, expert_map)
    if not torch.equal(found, expected):
        raise InvariantError(
            f"--reroute {kind} on {device} answers {found.tolist()}, must be {expected.tolist()}"
        )
