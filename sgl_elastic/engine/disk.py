"""Adapters' experts read from their folders into slots that are mapped already.

    Attach (disk_experts, adapters) --> [fill_adapters] --> the layers' slots, bytes read

The elastic strategy copies them from a neighbour instead; the paper's baselines read them again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sgl_elastic.errors import EngineFailedError
from sgl_elastic.instance.rank_messages import Adapter, Attach
from sgl_esft.errors import EsftError
from sgl_esft.formats.manifest import read_manifest
from sgl_esft.formats.model_spec import MoeSpec
from sgl_esft.weave.host_cache import read_adapter
from sgl_esft.weave.plane import AdapterPlane


def fill_adapters(plane: AdapterPlane, spec: MoeSpec, attach: Attach) -> int:
    """Read what goes with `attach.disk_experts`; returns the bytes. Raises EngineFailedError."""
    wanted = frozenset(attach.disk_experts)
    try:
        return sum(_fill(plane, spec, adapter, wanted) for adapter in attach.adapters)
    except EsftError as error:
        raise EngineFailedError(f"an adapter could not be read again: {error}") from error


def _fill(plane: AdapterPlane, spec: MoeSpec, adapter: Adapter, wanted: frozenset[int]) -> int:
    manifest = read_manifest(Path(adapter.path), spec)
    shards = {
        layer_id: replace(layer.shard, expert_ids=wanted)
        for layer_id, layer in plane.layers.items()
    }
    found = read_adapter(adapter.name, manifest, shards)
    for layer_id, experts in found.experts.items():
        layer = plane.layers[layer_id]
        slots = layer.slots_of(adapter.adapter_slot)  # type: ignore[attr-defined]
        for expert_id, weights in experts.items():
            layer.w13[slots[expert_id]].copy_(weights.w13)
            layer.w2[slots[expert_id]].copy_(weights.w2)
    return found.num_bytes
