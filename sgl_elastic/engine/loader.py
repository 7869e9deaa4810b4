"""The model loader of an elastic engine: it binds a model to memory instead of filling it.

    skeleton -> shape declared -> addresses -> mapped (attach or park)
             -> only where memory is still empty: read from disk, derive, publish

An engine that comes later reads nothing: its parameters are the same physical pages. Only where a
strategy or an ablation asks for it does it read once more, into slots that nobody else uses.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from sgl_elastic.engine import rank, sglang_api
from sgl_elastic.engine.memory import expert_of, layer_of
from sgl_elastic.errors import ElasticInternalError, EngineFailedError
from sgl_elastic.instance import engine_config
from sgl_elastic.instance.rank_messages import Attach
from sgl_elastic.types import AdapterEntry
from sgl_esft.errors import EsftError
from sgl_esft.formats.manifest import read_manifest
from sgl_esft.formats.model_spec import MoeSpec, read_moe_spec
from sgl_esft.weave import page_source
from sgl_esft.weave.host_cache import read_adapter
from sgl_esft.weave.plane import AdapterPlane

logger = logging.getLogger(__name__)


class ElasticLoader:
    """Has the face of SGLang's loaders."""

    preload_weight_bytes = 0

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.load_config = inner.load_config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load_model(self, *, model_config: Any, device_config: Any) -> torch.nn.Module:
        """The model over HMM memory. Raises ElasticError: the engine must not start then."""
        use_threads()
        device = torch.device(device_config.device)
        own = rank.start(engine_config.required(), device)
        page_source.install(own.memory)
        model = sglang_api.make_skeleton(self._inner, model_config, device_config)
        sglang_api.derive(model, device)
        row_bytes = sglang_api.kv_row_bytes(model_config, model_config.dtype)
        instruction = own.declare(own.memory.plan(model, row_bytes))
        own.memory.bind(model)
        own.map(instruction)
        if isinstance(instruction, Attach) and instruction.must_load:
            self._fill(own, model, model_config, instruction)
        own.read_disk = partial(self._read_more, own, model, model_config)
        return model.eval()

    def _fill(
        self, own: rank.EngineRank, model: torch.nn.Module, model_config: Any, attach: Attach
    ) -> None:
        num_bytes = self._read(own, model, model_config, attach, attach.expert_ids)
        own.mark_loaded(trunk=attach.loads_trunk)
        logger.info("elastic: %d bytes read from disk", num_bytes)
        own.loaded(num_bytes)

    def _read_more(
        self, own: rank.EngineRank, model: torch.nn.Module, model_config: Any, attach: Attach
    ) -> int:
        """Fill part of the memory of a model that is there already; returns the bytes read."""
        num_bytes = self._read(own, model, model_config, attach, attach.disk_experts)
        spec = read_moe_spec(Path(model_config.model_path))
        return num_bytes + fill_adapters(own.memory.manager.plane, spec, attach)

    def _read(
        self,
        own: rank.EngineRank,
        model: torch.nn.Module,
        model_config: Any,
        attach: Attach,
        expert_ids: Iterable[int],
    ) -> int:
        """Read these experts, and the trunk if `attach` says so; returns the bytes."""
        files = sglang_api.weight_files(self._inner, model_config)
        parts = {(layer, expert) for layer, ids in attach.disk_parts for expert in ids}
        reader = _Reader(files, frozenset(expert_ids), frozenset(parts), attach.loads_trunk)
        sglang_api.load_weights(model, reader.weights())
        if attach.loads_trunk:
            sglang_api.derive(model, own.memory.device)
            own.memory.adopt_derived(model)
        else:
            own.memory.rebind(model)
        return reader.num_bytes


def use_threads() -> None:
    """As many as OMP_NUM_THREADS says; in a copy of a spare, torch has read another number."""
    number = os.environ.get("OMP_NUM_THREADS", "")
    if number.isdecimal() and int(number) > 0:
        torch.set_num_threads(int(number))


@dataclass
class _Reader:
    """Reads from a checkpoint what this rank must fill, and counts it."""

    files: list[str]
    experts: frozenset[int]  # in all layers
    parts: frozenset[tuple[int | None, int]]  # (layer id, expert id)
    loads_trunk: bool
    num_bytes: int = 0

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, tensor), each read when it is asked for."""
        for file in self.files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    if self._is_wanted(name):
                        tensor = opened.get_tensor(name)
                        self.num_bytes += tensor.nbytes
                        yield name, tensor

    def _is_wanted(self, name: str) -> bool:
        expert_id = expert_of(name)
        if expert_id is not None:
            return expert_id in self.experts or (layer_of(name), expert_id) in self.parts
        if ".experts." in name:
            raise ElasticInternalError(f"{name}: all experts in one tensor are not supported")
        return self.loads_trunk


# Adapters' experts read from their folders into slots that are mapped already. The elastic strategy
# copies them from a neighbour instead; the paper's baselines read them again.


def fill_adapters(plane: AdapterPlane, spec: MoeSpec, attach: Attach) -> int:
    """Read what goes with what is read of the base; returns the bytes. Raises EngineFailedError."""
    parts = {layer_id: frozenset(ids) for layer_id, ids in attach.disk_parts}
    whole = frozenset(attach.disk_experts)
    wanted = {layer_id: whole | parts.get(layer_id, frozenset()) for layer_id in plane.layers}
    try:
        return sum(_fill(plane, spec, adapter, wanted) for adapter in attach.adapters)
    except EsftError as error:
        raise EngineFailedError(f"an adapter could not be read again: {error}") from error


def _fill(
    plane: AdapterPlane, spec: MoeSpec, adapter: AdapterEntry, wanted: Mapping[int, frozenset[int]]
) -> int:
    """`wanted`: expert ids by layer id."""
    manifest = read_manifest(Path(adapter.path), spec)
    shards = {
        layer_id: replace(layer.shard, expert_ids=wanted[layer_id])
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
