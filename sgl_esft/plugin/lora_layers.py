"""SGLang's own LoRA manager, told which layers of a woven model take LoRA and which do not.

    runner, LoraTargets -> [make_lora_manager] -> SglangLora: SGLang's layers, pool and kernels

Left alone, SGLang also wraps the MoE layer, which is woven; gives its pool room for a LoRA of every
expert; names projections as only some families do; and reads adapters with torch.load where it
finds such files. So it is told the layers and their sizes, and is given tensors that were read and
checked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from sglang.srt.lora.lora import LoRAAdapter
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.mem_pool import LoRAMemoryPool
from sglang.srt.runtime_context import get_lora

from sgl_esft.config import LoraLimits
from sgl_esft.errors import InvariantError, UnsupportedModelError
from sgl_esft.formats.lora_config import LoraConfig
from sgl_esft.formats.lora_targets import LoraModule, LoraTargets

_BASE_SLOTS: Final = 1  # of requests without LoRA; SGLang gives them a slot of zeros


class SglangLora(LoRAManager):
    """SGLang's manager over the layers of `LoraTargets`."""

    def __init__(self, runner: Any, limits: LoraLimits, targets: LoraTargets, backend: str) -> None:
        """Raises UnsupportedModelError when the model has other layers than the targets."""
        self.esft_modules = {module.path: module for module in targets.modules}
        runner.model.should_apply_lora = self.esft_modules.__contains__
        super().__init__(
            base_model=runner.model,
            base_hf_config=runner.model_config.hf_config,
            max_loras_per_batch=limits.max_loras + _BASE_SLOTS,
            load_config=runner.load_config,
            dtype=runner.dtype,
            server_args=runner.server_args,
            lora_backend=backend,
            max_lora_rank=limits.max_rank,
            target_modules=_leaves(targets),
        )

    def init_lora_shapes(self, max_lora_rank: Any = None, target_modules: Any = None) -> None:
        """As given: nothing is inferred, and names are the model's own."""
        self.max_lora_rank = max_lora_rank
        self.target_modules = set(target_modules)
        self.lora_added_tokens_size = 0

    def init_lora_modules(self) -> None:
        super().init_lora_modules()
        wrapped = {name: m for layer in self.lora_modules for name, m in layer.items()}
        for path, module in self.esft_modules.items():
            _check_wrapped(path, module, wrapped.get(path))

    def init_memory_pool(self) -> None:
        self.memory_pool = LayerPool(
            self.esft_modules,
            base_hf_config=self.base_hf_config,
            max_loras_per_batch=self.max_loras_per_batch,
            dtype=self.dtype,
            max_lora_rank=self.max_lora_rank,
            target_modules=self.target_modules,
            base_model=self.base_model,
            eviction_policy=self.eviction_policy,
            lora_added_tokens_size=0,
            strict_loading=True,
        )
        self.fetch_new_loras({None})

    def load_lora_weights_from_tensors(
        self, lora_ref: Any, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Tensors named as SGLang's layers are: nothing has to be renamed or put together."""
        adapter = LoRAAdapter(
            lora_ref.lora_id,
            self.configs[lora_ref.lora_id],
            self.base_hf_config,
            self.load_config,
            self.lora_backend,
            base_model=self.base_model,
        )
        for name, tensor in tensors.items():
            module = self.esft_modules[name.partition(".lora_")[0]]
            adapter.layers[module.layer_id].weights[name] = tensor
        self.loras[lora_ref.lora_id] = adapter

    def num_bytes_of_slot(self) -> int:
        """Of one adapter's room on this rank's device."""
        pool = self.memory_pool
        buffers = (*pool.A_buffer.values(), *pool.B_buffer.values())
        total = sum(tensor.nbytes for layers in buffers for tensor in layers)
        return int(total) // int(self.max_loras_per_batch)


class LayerPool(LoRAMemoryPool):
    """SGLang's pool, with room for exactly the layers that take LoRA."""

    def __init__(self, modules: Mapping[str, LoraModule], **arguments: Any) -> None:
        model = arguments["base_model"]
        self._layers = {
            (_leaf(module), module.layer_id): (module, model.get_submodule(path).base_layer)
            for path, module in modules.items()
        }
        super().__init__(**arguments)

    @staticmethod
    def _has_moe_module(base_model: torch.nn.Module) -> bool:
        """Whether MoE layers need room: none of them takes LoRA."""
        return False

    def get_lora_A_shape(  # noqa: N802
        self, module_name: str, base_model: Any, max_lora_dim: int, layer_idx: int
    ) -> tuple[int, ...]:
        """[slots, parts * rank, in]."""
        found = self._layers.get((module_name, layer_idx))
        if found is None:
            return (self.max_loras_per_batch, 0, 0)
        module, layer = found
        width = getattr(layer, "input_size_per_partition", layer.input_size)
        return (self.max_loras_per_batch, len(module.parts) * max_lora_dim, width)

    def get_lora_B_shape(  # noqa: N802
        self, module_name: str, base_model: Any, max_lora_dim: int, layer_idx: int
    ) -> tuple[int, ...]:
        """[slots, out, rank]."""
        found = self._layers.get((module_name, layer_idx))
        if found is None:
            return (self.max_loras_per_batch, 0, 0)
        layer = found[1]
        # A layer that is split by its inputs leaves whole outputs.
        is_split = hasattr(layer, "output_partition_sizes") and not hasattr(
            layer, "input_is_parallel"
        )
        width = sum(layer.output_partition_sizes) if is_split else layer.output_size
        return (self.max_loras_per_batch, width, max_lora_dim)


def make_lora_manager(runner: Any, limits: LoraLimits, targets: LoraTargets) -> SglangLora:
    """Wrap the model's layers. Raises UnsupportedModelError."""
    backend = str(get_lora().lora_backend)
    context: AbstractContextManager[Any] = nullcontext()
    if runner.device == "cpu":
        from sgl_esft.platform import lora_backend, lora_hooks

        lora_backend.register()
        backend, context = lora_backend.NAME, lora_hooks.Unpinned()
    with context:
        return SglangLora(runner, limits, targets, backend)


def load_tensors(
    manager: Any, ref: Any, config: LoraConfig, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Give SGLang's manager an adapter that was checked. Raises InvariantError if it refuses it."""
    described = {
        "peft_type": "LORA",
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": "all",  # each of its tensors is of a layer that takes LoRA
    }
    result = manager.load_lora_adapter_from_tensors(ref, tensors, described)
    if not result.success:
        raise InvariantError(
            f"SGLang refuses a LoRA adapter that was checked: {result.error_message}"
        )


def _leaves(targets: LoraTargets) -> set[str]:
    return {_leaf(module) for module in targets.modules}


def _leaf(module: LoraModule) -> str:
    return module.name.rpartition(".")[2]


def _check_wrapped(path: str, module: LoraModule, wrapper: Any) -> None:
    layer = getattr(wrapper, "base_layer", None)
    if layer is None or layer.input_size != module.in_features:
        seen = "no such layer" if layer is None else f"{layer.input_size} inputs"
        raise UnsupportedModelError(
            f"{path}: config.json says {module.in_features} inputs, the loaded model has {seen}: "
            "name the projections to serve by --lora-target-modules, without this one"
        )
