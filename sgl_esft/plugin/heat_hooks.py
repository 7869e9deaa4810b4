"""The way of the experts' heat from a rank to HTTP and to Prometheus.

GET /v1/heat -> SGLang's get_internal_state -> memory_hooks.py, [add_heat] on every rank -> reply
a sampled step -> [sampler_of]'s summary -> SGLang's /metrics
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from sgl_esft import sglang_api
from sgl_esft.config import EsftConfig
from sgl_esft.errors import HeatOffError
from sgl_esft.weave.heat import HeatSampler, OnDistinct, SlotOwner, merged
from sgl_esft.weave.plane import AdapterPlane

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

STATE_KEY = "esft_heat"

logger = logging.getLogger(__name__)


def sampler_of(plane: AdapterPlane, config: EsftConfig, device: torch.device) -> HeatSampler | None:
    """This rank's sampler; None where experts are not counted, as --heat-every 0 asks."""
    if not config.heat_every:
        return None
    if config.reroute == "router":
        logger.info("Experts are not counted: --reroute router knows slots only.")
        return None
    layers = plane.layers

    def owners() -> Mapping[int, SlotOwner]:
        return {p.adapter_slot: SlotOwner(p.source.name, p.experts) for p in plane.placed()}

    return HeatSampler(
        tuple(layers),
        config.max_adapters,
        next(iter(layers.values())).expert_map.table.shape[1],
        config.heat_every,
        owners,
        device,
        distinct_summary(layers)
        if sglang_api.has_metrics() and sglang_api.tp_rank() == 0
        else None,
    )


def distinct_summary(
    layer_ids: Iterable[int], registry: CollectorRegistry | None = None
) -> OnDistinct:
    """Distinct experts of sampled steps, at /metrics. None: prometheus_client's own registry."""
    # SGLang names the folder that its processes share before it starts a rank, and
    # prometheus_client reads that name when it is imported.
    from prometheus_client import REGISTRY, Summary

    summary = Summary(
        "sgl_esft:distinct_experts",
        "Experts whose weights a sampled step read, adapters' own ones among them.",
        ["layer"],
        registry=registry or REGISTRY,
    )
    for layer_id in layer_ids:  # at 0, so that a scrape knows them before a step was sampled
        summary.labels(str(layer_id))
    return lambda layer_id, number: summary.labels(str(layer_id)).observe(number)


def add_heat(reply: Any, heat: HeatSampler | None) -> None:
    """Add the report to the reply. The ranks that share the experts see the same: one tells."""
    if heat is not None and sglang_api.tp_rank() == 0:
        reply.internal_state[STATE_KEY] = heat.report()


async def fetch_heat(tokenizer_manager: Any) -> dict[str, Any]:
    """The server's report, asked from the process that serves HTTP. Raises HeatOffError."""
    states = await sglang_api.internal_states(tokenizer_manager, STATE_KEY)
    reports = [state[STATE_KEY] for state in states if STATE_KEY in state]
    if not reports:
        raise HeatOffError(
            "the experts are not counted: start the server with --heat-every N and with "
            "--reroute fused or unfused"
        )
    return merged(reports)
