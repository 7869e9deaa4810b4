"""Adapters in host memory, cut to what this rank will need of them.

adapter_format.py (validated folder) -> [host cache] -> moe_layer.py (device slots)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from sgl_esft.adapter_format import AdapterManifest, AdapterReader
from sgl_esft.moe_layer import ExpertShard, ExpertWeights


@dataclass(frozen=True)
class HostAdapter:
    """One adapter's experts that live on this rank."""

    name: str
    manifest: AdapterManifest
    experts: Mapping[int, dict[int, ExpertWeights]]  # layer id -> expert id -> weights

    @property
    def num_bytes(self) -> int:
        return sum(w.num_bytes for layer in self.experts.values() for w in layer.values())


def read_adapter(
    name: str, manifest: AdapterManifest, shards: Mapping[int, ExpertShard]
) -> HostAdapter:
    """Read a validated adapter's experts for the layers and shards of this rank.

    shards: layer id -> what this rank holds of that layer. Raises AdapterFormatError
    when a file changed or broke after it was validated.
    """
    with AdapterReader(manifest) as reader:
        experts = {
            layer_id: {
                expert_id: _read_expert(reader, layer_id, expert_id, shards[layer_id])
                for expert_id in expert_ids
                if expert_id in shards[layer_id].expert_ids
            }
            for layer_id, expert_ids in manifest.experts.items()
        }
    return HostAdapter(name, manifest, experts)


def _read_expert(
    reader: AdapterReader, layer_id: int, expert_id: int, shard: ExpertShard
) -> ExpertWeights:
    rows = shard.intermediate
    gate = reader.read_slice(layer_id, expert_id, "gate", 0, rows.start, rows.stop)
    up = reader.read_slice(layer_id, expert_id, "up", 0, rows.start, rows.stop)
    down = reader.read_slice(layer_id, expert_id, "down", 1, rows.start, rows.stop)
    # cat and clone own their memory: the file may be unmapped or change after this.
    return ExpertWeights(w13=torch.cat([gate, up]), w2=down.clone())
