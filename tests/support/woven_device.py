"""One rank with random woven layers and a real adapter plane: no SGLang, no server.

adapter folders -> Device.load -> AdapterPlane -> FakeFusedMoE's weights -> Device.check
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from sgl_esft.config import EsftConfig
from sgl_esft.formats.model_spec import MoeSpec
from sgl_esft.weave.moe_layer import WovenLayer
from sgl_esft.weave.plane import AdapterPlane, AdapterSource
from sgl_esft.weave.shared_mlp import NO_SHARED_MLPS, SharedMlps
from tests.support.random_layers import FakeFusedMoE, RandomExperts, Rank


class Device:
    """One rank's layers and plane, and what a request of an adapter would really meet there."""

    def __init__(
        self,
        spec: MoeSpec,
        config: EsftConfig,
        rank: Rank,
        *,
        is_resident: bool,
        max_pages: int | None = None,
        shared: SharedMlps = NO_SHARED_MLPS,
    ) -> None:
        self.spec, self.rank = spec, rank
        self.layers = {layer: self._layer(layer, config) for layer in spec.moe_layer_ids}
        self.plane = AdapterPlane(
            self.layers,
            spec,
            config,
            is_resident=is_resident,
            max_pages=max_pages,
            shared=shared,
        )

    def _layer(self, layer_id: int, config: EsftConfig) -> WovenLayer:
        spec = self.spec
        experts = RandomExperts.draw(
            spec.num_experts,
            spec.hidden_size,
            spec.expert_intermediate_size,
            seed=layer_id,
            dtype=torch.float32,
        )
        sizes = {"max_adapters": config.max_adapters, "max_experts": config.max_experts_per_adapter}
        module = FakeFusedMoE(experts, self.rank, layer_id=layer_id, config=config, **sizes)
        return module.woven()

    def load(self, folder: Path, *, pinned: bool = False, adapter_id: str | None = None) -> None:
        """Load an adapter under its folder's name, its id by default the same."""
        identity = adapter_id or folder.name
        self.plane.load(AdapterSource(identity, folder.name, str(folder), pinned))

    def slots(self) -> dict[str, int]:
        """Adapter id -> adapter slot, of those on the device."""
        return dict(self.plane._slots._slot_of)

    def check(self, folder: Path, adapter_id: str | None = None) -> None:
        """The adapter's row of every map leads to the folder's weights, and to the base's else."""
        tensors: dict[str, torch.Tensor] = {}
        for file in folder.glob("*.safetensors"):
            tensors |= load_file(file)
        slot = self.plane.slot_of(adapter_id or folder.name)
        for layer_id, layer in self.layers.items():
            rows = slice(layer.shard.intermediate.start, layer.shard.intermediate.stop)
            for expert in layer.shard.expert_ids:
                names = [self.spec.expert_tensor_name(layer_id, expert, p) for p in ("gate", "up")]
                place = int(layer.expert_map.table[slot, expert])
                if names[0] not in tensors:
                    assert place == int(layer.expert_map.base_row[expert])
                    continue
                down = tensors[self.spec.expert_tensor_name(layer_id, expert, "down")]
                assert torch.equal(layer.w13[place], torch.cat([tensors[n][rows] for n in names]))
                assert torch.equal(layer.w2[place], down[:, rows])

    def check_mapped_slots(self) -> None:
        """A slot is mapped exactly when some row leads there, or when it is the base's."""
        for layer in self.layers.values():
            reached = set(layer.expert_map.table.unique().tolist()) - {-1}
            assert layer.mapped_slots == reached | set(range(layer.layout.num_base))

    def snapshot(self) -> list[object]:
        """All that a failed call must leave as it was."""
        tables = [layer.expert_map.table.clone() for layer in self.layers.values()]
        mapped = [sorted(layer.mapped_slots) for layer in self.layers.values()]
        weights = [
            layer.w13[slots].clone()
            for layer, slots in zip(self.layers.values(), mapped, strict=True)
        ]
        usage = [layer.memory.usage() for layer in self.layers.values()]
        state = [self.plane.names, self.slots(), mapped, usage]
        return [*state, *(t.tolist() for t in tables + weights)]
