"""Hook functions of weaving; hook_table.py says where each one goes, and why.

the checkpoint, without experts in tiers ... create_weights (longer) ... init_lora_manager (bind)
... each forward: runner_core.py (reroute)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tqdm import tqdm

from sgl_esft import sglang_api
from sgl_esft.config import required_config
from sgl_esft.errors import UnsupportedModelError
from sgl_esft.formats.checkpoint import routed_expert_names
from sgl_esft.formats.model_spec import read_moe_spec
from sgl_esft.lifecycle.content import digest_of, remember_digest
from sgl_esft.offload import tiered_layer
from sgl_esft.offload.source import drop_page_cache
from sgl_esft.platform import device_memory
from sgl_esft.plugin import build
from sgl_esft.support import QUANTISED_DEVICES
from sgl_esft.weave import expert_tensor, moe_layer, page_source


def create_weights_with_adapter_slots(
    original: Callable[..., None],
    method: Any,
    layer: torch.nn.Module,
    num_experts: int,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Create the layer's expert weights with the adapters' slots behind the base's.

    The layout and the memory behind the slots go with the layer, for `weave.bind_layers`.
    """
    config = required_config()
    layout = moe_layer.plan_layout(
        layer, num_experts, config.max_adapters, config.max_experts_per_adapter
    )
    layer.esft_layout = layout  # type: ignore[assignment]
    available_bytes = device_memory.available_bytes()

    def create(num_rows: int = layout.num_slots, **attributes: Any) -> None:
        original(method, layer, num_rows, *args, **{**kwargs, **attributes})

    memory = (
        expert_tensor.create_experts(layer, layout, config, create, available_bytes)
        if config.tiers is None
        else tiered_layer.create_rows(layer, layout, config, create, available_bytes)
    )
    layer.esft_memory = memory  # type: ignore[assignment]


def create_quantised_weights_with_adapter_slots(
    original: Callable[..., None],
    method: Any,
    layer: torch.nn.Module,
    num_experts: int,
    *args: Any,
    **kwargs: Any,
) -> None:
    """The same of experts whose numbers have scales: every row of theirs has a slot's number too.

    Raises UnsupportedModelError where that was not shown.
    """
    name, device = type(method).__name__, torch.get_default_device().type
    if device not in QUANTISED_DEVICES:
        raise UnsupportedModelError(
            f"a base whose experts are quantised ({name}) was not shown to be woven on {device}: "
            "serve it with --no-esft, or weave the base that it was made of"
        )
    if page_source.current() is not None:
        raise UnsupportedModelError(
            f"a base whose experts are quantised ({name}) was not shown with experts that move: "
            "leave --elastic out"
        )
    create_weights_with_adapter_slots(original, method, layer, num_experts, *args, **kwargs)


def read_all_but_experts(
    hf_weights_files: Sequence[str], *_: Any, drop_cache_after_load: bool = False, **__: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of all files, without routed experts: those are read when routed to.

    SGLang's readers ask for all tensors, and safetensors reads from the disk what it is asked for.
    Raises UnsupportedModelError.
    """
    files = list(map(Path, hf_weights_files))
    experts = routed_expert_names(read_moe_spec(files[0].parent))
    for path in tqdm(files, "Loading shards without experts", disable=sglang_api.tp_rank() != 0):
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in sorted(set(file.keys()) - experts):
                yield name, file.get_tensor(name)
        if drop_cache_after_load:
            drop_page_cache(path)


def install_esft_manager(runner: Any) -> None:
    """Put the ESFT manager where SGLang would put its LoRA manager."""
    runner.lora_manager = build.build_manager(runner, required_config())


def route_to_slots(
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    topk_config: Any,
    layer_id: int | None = None,
    num_token_non_padded: torch.Tensor | None = None,
    expert_location_dispatch_info: Any = None,
    dynamic_expert_bias: torch.Tensor | None = None,
    router_logits_partials: torch.Tensor | None = None,
) -> Any:
    """Where the router reroutes, top-k ids are this rank's slots already."""
    router = getattr(topk_config, "esft_router", None)
    if router is None:
        return original(
            hidden_states,
            router_logits,
            topk_config,
            layer_id=layer_id,
            num_token_non_padded=num_token_non_padded,
            expert_location_dispatch_info=expert_location_dispatch_info,
            dynamic_expert_bias=dynamic_expert_bias,
            router_logits_partials=router_logits_partials,
        )
    foreign = (expert_location_dispatch_info, dynamic_expert_bias, router_logits_partials)
    if any(part is not None for part in foreign):
        raise UnsupportedModelError(
            "--reroute router has neither moved experts, nor a bias for each token, nor logits in "
            "parts: use --reroute fused"
        )
    weights, slot_ids = router(router_logits, num_token_non_padded)
    return sglang_api.make_topk_output(weights, slot_ids, router_logits)


def adapter_id_with_content(
    original: Callable[[str, str], str], lora_name: str, lora_path: str
) -> str:
    """The id of an adapter named at launch, from its name, folder and content.

    The prefix cache is keyed by this id, and may outlive the server.
    """
    digest = digest_of(Path(lora_path))
    remember_digest(lora_path, digest)
    return original(lora_name, f"{lora_path}\0{digest}")
