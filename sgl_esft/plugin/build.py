"""Weaving, put together: from a loaded SGLang model to its ESFT manager.

model runner -> woven layers -> adapter plane -> manager, rerouters
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sgl_esft import hook_ledger, platform, sglang_api
from sgl_esft.config import EsftConfig
from sgl_esft.errors import UnsupportedModelError
from sgl_esft.formats.adapter_config import kind_of
from sgl_esft.formats.manifest import read_manifest
from sgl_esft.formats.model_spec import MoeSpec
from sgl_esft.lifecycle.rank_command_handler import RankGroup
from sgl_esft.memory.measure import measure_device
from sgl_esft.memory.metrics import MemoryMetrics
from sgl_esft.observe.tier_metrics import DeviceTierMetrics
from sgl_esft.offload.tiered_layer import RowMemory, TieredLayer
from sgl_esft.platform import device_memory
from sgl_esft.platform.quantised_moe import pack_int4
from sgl_esft.plugin import heat_hooks, runner_core
from sgl_esft.plugin.adapter_owners import AdapterOwners
from sgl_esft.plugin.decoded_tokens import DecodedTokens
from sgl_esft.plugin.lora_manager import EsftManager, GatherTags
from sgl_esft.plugin.mixed_manager import manager_kind
from sgl_esft.plugin.recording import Recorder
from sgl_esft.plugin.shared_experts import bind_shared
from sgl_esft.plugin.tiers import Tiers, build_tiers
from sgl_esft.support import MOE_BACKENDS
from sgl_esft.weave import expert_tensor, page_source
from sgl_esft.weave.adapter_pages import bound_pages
from sgl_esft.weave.batch_tags import PADDING, BatchTags, staged
from sgl_esft.weave.expert_parameters import parameters_of
from sgl_esft.weave.heat import HeatSampler
from sgl_esft.weave.moe_layer import Pack, WovenLayer
from sgl_esft.weave.plane import AdapterPlane
from sgl_esft.weave.reroute import Rerouter, load_reroute
from sgl_esft.weave.router import FusedRouter, load_router
from sgl_esft.weave.shared_layer import SharedLayer
from sgl_esft.weave.slot_layout import SlotLayout
from sgl_esft_kernels import RouterFunction

logger = logging.getLogger(__name__)

_TIERS_MEASURED_EVERY_S = 1.0
_INITIAL_TAG_TOKENS = 8192  # the tag buffer grows when a batch is larger


def build_manager(runner: Any, config: EsftConfig) -> EsftManager:
    """Bind the loaded model's MoE layers, load the initial adapters, start rerouting.

    Raises HookError or an Adapter* error: the server must not start then.
    """
    hook_ledger.verify_required()
    on_host = config.tiers is None or sglang_api.runner_device(runner).type == "cpu"
    sglang_api.check_decode_graphs(breaks=not on_host)
    spec = MoeSpec.from_config(sglang_api.base_config(*sglang_api.served_model()))
    layers = bind_layers(runner.model, spec)
    gather = _gather_tags() if sglang_api.is_dp_attention() else None
    tags = BatchTags(_INITIAL_TAG_TOKENS, runner.device)
    device = sglang_api.runner_device(runner)
    max_pages = _adapter_pages(layers, spec, config, device)
    source = page_source.current()
    is_resident = gather is not None or source is not None
    tiers = None
    if config.tiers is not None:
        model_path, _ = sglang_api.served_model()
        tiers = build_tiers(runner.model, layers, spec, config, model_path)
    plane = AdapterPlane(
        layers,
        spec,
        config,
        is_resident=is_resident,
        max_pages=max_pages,
        files=tiers,
        shared=bind_shared(runner.model, spec, tags, device),
    )
    if tiers is not None and config.tiers is not None and config.tiers.store_by == "adapter":
        tiers.owners = AdapterOwners(plane)
    publish = _publisher(plane, config, device) if sglang_api.has_metrics() else None
    if tiers is not None and publish is not None:
        tiers.when_done.append(publish)
    manager = manager_kind(runner, config)(
        plane,
        tags,
        sglang_api.make_lora_result,
        gather,
        publish,
        num_dp_ranks=sglang_api.num_dp_ranks(),
        group=RankGroup(sglang_api.tp_rank(), sglang_api.gather_bytes),
        heat=heat_hooks.sampler_of(plane, config, device),
        num_sources=page_source.num_sources(),
        tiers=tiers,
    )
    if source is None:
        manager.load_initial(sglang_api.initial_adapters())
    else:
        source.woven(manager)
    recorder = _recorder(runner.model, plane, tags, spec, config)
    manager.watchers = tuple(each for each in (tiers, recorder) if each is not None)
    attach_rerouting(runner.model, layers, tags, config.reroute, manager.heat, tiers, recorder)
    if config.lora is None:
        sglang_api.hide_lora_from_layers()
    logger.info("weaving: %d MoE layers, %s", len(layers), config)
    return manager


def _recorder(
    model: torch.nn.Module,
    plane: AdapterPlane,
    tags: BatchTags,
    spec: MoeSpec,
    config: EsftConfig,
) -> Recorder | None:
    """One of the ranks that see the same tokens has one, if the routing is recorded."""
    if config.record is None or sglang_api.tp_rank() != 0:
        return None
    top_k = next(topk.top_k for topk, _ in sglang_api.routers(model))
    decoded = DecodedTokens(model, spec.hidden_size)
    return Recorder(config.record, plane, tags, decoded, model, top_k)


def _adapter_pages(
    layers: dict[int, WovenLayer], spec: MoeSpec, config: EsftConfig, device: torch.device
) -> int | None:
    """The rank's bound on adapters' pages; makes them, where they are not made as needed."""
    folders = (Path(ref.lora_path) for ref in sglang_api.initial_adapters())
    initial = (read_manifest(path, spec) for path in folders if kind_of(path) == "esft")
    has_limit = device.type != "cpu" or device_memory.budget_bytes() is not None
    # Where experts are in tiers, adapters have no pages of their own.
    arena = None if config.tiers is not None else expert_tensor.arena_of(device)
    return bound_pages(arena, layers, config, initial, has_limit=has_limit)


def _publisher(plane: AdapterPlane, config: EsftConfig, device: torch.device) -> Callable[[], None]:
    rank = sglang_api.tp_rank()
    memory, tier = MemoryMetrics(), DeviceTierMetrics(rank)
    num_measured, measured_s = -1, 0.0

    def publish() -> None:
        nonlocal num_measured, measured_s
        tier.set(plane.uses)
        now_s = time.monotonic()
        # Measuring goes through all layers. In tiers experts come and go with every step.
        is_old = config.tiers is not None and now_s - measured_s > _TIERS_MEASURED_EVERY_S
        if num_measured != plane.uses.num_changes or is_old:
            memory.set(measure_device(plane, config.expert_memory, rank, device, None))
            num_measured, measured_s = plane.uses.num_changes, now_s

    return publish


def bind_layers(model: torch.nn.Module, spec: MoeSpec) -> dict[int, WovenLayer]:
    """Layer id -> woven layer, exactly the spec's MoE layers. Raises UnsupportedModelError."""
    for module in sglang_api.fused_moe_modules(model):
        _check_backend(module)
        _check_scheme(module, spec)
    pack = _pack_of(spec)
    modules = sglang_api.fused_moe_modules(model)
    bound = [_kind_of(module).bind(module, _layout_of(module), pack) for module in modules]
    layers = {layer.layer_id: layer for layer in bound}
    if tuple(sorted(layers)) != spec.moe_layer_ids or len(bound) != len(layers):
        raise UnsupportedModelError(
            f"{spec.architecture}: config.json has MoE layers {spec.moe_layer_ids}, "
            f"the loaded model has {sorted(layer.layer_id for layer in bound)}"
        )
    for layer in bound:
        _check_width(layer, spec)
    return layers


def _kind_of(fused_moe: Any) -> type[WovenLayer]:
    """By who owns the memory behind its slots."""
    if isinstance(getattr(fused_moe, "esft_memory", None), RowMemory):
        return TieredLayer
    return WovenLayer if page_source.current() is None else SharedLayer


def _pack_of(spec: MoeSpec) -> Pack | None:
    """What SGLang has done with the base's numbers after loading, to be done with adapters'."""
    is_packed = spec.scheme is not None and spec.scheme.name == "int4" and platform.is_active()
    return pack_int4 if is_packed else None


def _check_backend(fused_moe: Any) -> None:
    """Of the layer itself, because what `auto` becomes depends on device, model and width."""
    device = next(fused_moe.parameters()).device.type
    backend = sglang_api.moe_backend(fused_moe)
    if backend not in MOE_BACKENDS.get(device, ()):
        raise UnsupportedModelError(
            f"layer {fused_moe.layer_id} on {device} computes its experts by the MoE runner "
            f"backend {backend}, and weaving was not shown with it: use --moe-runner-backend triton"
        )


def _check_scheme(fused_moe: Any, spec: MoeSpec) -> None:
    """Adapters are quantised as config.json says; the layer is what SGLang made of it."""
    found, parameters = parameters_of(fused_moe)
    said = None if spec.scheme is None else spec.scheme.name
    if found != said:
        raise UnsupportedModelError(
            f"layer {fused_moe.layer_id}: SGLang made {found or 'unquantised'} experts, and "
            f"config.json says {said or 'unquantised'}: leave --quantization out"
        )
    num_slots = _layout_of(fused_moe).num_slots
    others = {name for name, _ in fused_moe.named_per_expert_tensors(num_slots)}
    if unknown := others - set(parameters.names):
        raise UnsupportedModelError(
            f"layer {fused_moe.layer_id}: SGLang keeps {', '.join(sorted(unknown))} of every "
            "expert, and adapters have nothing to put there"
        )


def _check_width(layer: WovenLayer, spec: MoeSpec) -> None:
    """On a CPU, SGLang rounds an expert's width up; an adapter has no rows for the rest."""
    width = layer.shard.intermediate.stop
    if width > spec.expert_intermediate_size:
        raise UnsupportedModelError(
            f"layer {layer.layer_id}: SGLang made experts {spec.expert_intermediate_size} wide "
            f"at least {width} wide: only widths that it does not pad can be woven here"
        )


def _layout_of(fused_moe: Any) -> SlotLayout:
    layout = getattr(fused_moe, "esft_layout", None)
    if layout is None:
        raise UnsupportedModelError(
            f"MoE layer {fused_moe.layer_id} uses {type(fused_moe.quant_method).__name__}: "
            "only unquantised experts can be woven, and those of w8a8_int8, fp8 and moe_wna16"
        )
    return layout  # type: ignore[no-any-return]


def attach_rerouting(
    model: torch.nn.Module,
    layers: dict[int, WovenLayer],
    tags: BatchTags,
    kind: str,
    heat: HeatSampler | None = None,
    tiers: Tiers | None = None,
    recorder: Recorder | None = None,
) -> None:
    """From now on these layers reroute, as `--reroute kind` says.

    Raises UnsupportedModelError for a foreign dispatcher, runner or a router that cannot be fused,
    UnsupportedDeviceError when the device has no such kernel.
    """
    device = next(iter(layers.values())).w13.device
    rerouters: dict[int, Rerouter] = {}
    if kind == "router":
        _attach_routers(model, layers, tags, load_router(device))
    else:
        reroute = load_reroute(kind, device)
        for layer_id, layer in layers.items():
            counted = None if heat is None else heat.layer(layer_id)
            rerouters[layer_id] = Rerouter(layer.expert_map, tags, reroute, counted)
    for module in sglang_api.fused_moe_modules(model):
        layout = layers[module.layer_id].layout
        inner = None if tiers is None else tiers.inner(module)
        watch = None if recorder is None else recorder.watch(module.layer_id)
        runner_core.install(module, layout, rerouters.get(module.layer_id), inner, watch)
        sglang_api.check_dispatcher(module.dispatcher)
        # The expert map's rows contain this rank's part of SGLang's own mapping.
        module.dispatcher.skip_local_expert_mapping = True


def _attach_routers(
    model: torch.nn.Module, layers: dict[int, WovenLayer], tags: BatchTags, route: RouterFunction
) -> None:
    if sglang_api.records_experts():
        raise UnsupportedModelError(
            "--reroute router knows no expert ids to record, only slots: use --reroute fused"
        )
    fused = set()
    for topk_config, module in sglang_api.routers(model):
        layer = layers[module.layer_id]
        topk_config.esft_router = FusedRouter(topk_config, layer.expert_map, tags, route)
        fused.add(module.layer_id)
    if fused != set(layers):
        raise UnsupportedModelError(
            f"layers {sorted(set(layers) - fused)} have a router of their own: use --reroute fused"
        )


def _gather_tags() -> GatherTags:
    """Gather the ranks' tags by the very function that gathers their hidden states."""

    def gather(local: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        num_local, num_global = sglang_api.dp_gather_lengths(forward_batch)
        # Zero is what the gather fills gaps with, so a tag travels as its distance from PADDING.
        shifted = torch.zeros((num_local, 1), dtype=torch.float32)
        shifted[: local.shape[0], 0] = local.to(torch.float32) - PADDING
        device = forward_batch.input_ids.device
        shifted = staged(shifted, device).to(device, non_blocking=True)
        gathered = shifted.new_zeros((num_global, 1))
        sglang_api.dp_gather(gathered, shifted, forward_batch)
        return (gathered[:, 0] + PADDING).to(torch.int32)

    return gather
