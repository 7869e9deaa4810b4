"""The model loader of an elastic engine: it binds a model to memory instead of filling it.

    skeleton -> shape declared -> addresses -> mapped (attach or park)
             -> only where memory is still empty: read from disk, derive, publish

An engine that comes later reads nothing: its parameters are the same physical pages. Only where a
strategy or an ablation asks for it does it read once more, into slots that nobody else uses.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from sgl_elastic.engine import disk, rank, sglang_api
from sgl_elastic.engine.memory import expert_of
from sgl_elastic.errors import ElasticInternalError
from sgl_elastic.instance import engine_config
from sgl_elastic.instance.rank_messages import Attach
from sgl_esft.formats.model_spec import read_moe_spec
from sgl_esft.weave import page_source

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
        reader = _Reader(sglang_api.weight_files(self._inner, model_config), attach)
        sglang_api.load_weights(model, reader.weights())
        if attach.loads_trunk:
            sglang_api.derive(model, own.memory.device)
            own.memory.adopt_derived(model)
        else:
            own.memory.rebind(model)
        own.mark_loaded(trunk=attach.loads_trunk)
        logger.info("elastic: %d bytes read from disk", reader.num_bytes)
        own.loaded(reader.num_bytes)

    def _read_more(
        self, own: rank.EngineRank, model: torch.nn.Module, model_config: Any, attach: Attach
    ) -> int:
        """Fill part of the memory of a model that is there already; returns the bytes read."""
        files = sglang_api.weight_files(self._inner, model_config)
        reader = _Reader(files, attach, attach.disk_experts)
        sglang_api.load_weights(model, reader.weights())
        if attach.loads_trunk:
            sglang_api.derive(model, own.memory.device)
            own.memory.adopt_derived(model)
        else:
            own.memory.rebind(model)
        spec = read_moe_spec(Path(model_config.model_path))
        plane = own.memory.manager.plane
        return reader.num_bytes + disk.fill_adapters(plane, spec, attach)


class _Reader:
    """Reads from a checkpoint what this rank must fill, and counts it."""

    def __init__(
        self, files: list[str], attach: Attach, expert_ids: Iterable[int] | None = None
    ) -> None:
        """`expert_ids` None: all that are attached."""
        self._files = files
        self._experts = frozenset(attach.expert_ids if expert_ids is None else expert_ids)
        self._loads_trunk = attach.loads_trunk
        self.num_bytes = 0

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, tensor), each read when it is asked for."""
        for file in self._files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    if self._is_wanted(name):
                        tensor = opened.get_tensor(name)
                        self.num_bytes += tensor.nbytes
                        yield name, tensor

    def _is_wanted(self, name: str) -> bool:
        expert_id = expert_of(name)
        if expert_id is not None:
            return expert_id in self._experts
        if ".experts." in name:
            raise ElasticInternalError(f"{name}: all experts in one tensor are not supported")
        return self._loads_trunk
