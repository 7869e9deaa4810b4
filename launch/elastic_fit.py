"""Whether the first devices of an elastic server hold base, adapters and a little KV cache.

    ElasticPlan -> [check] -> nothing, or how much --device-memory has to be

The planner's own page arithmetic, on a shape made of config.json instead of a loaded model. What
SGLang derives from weights is not in it; the planner itself refuses what that makes too large.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from sgl_elastic.baselines.strategies import ScaleStrategy
from sgl_elastic.plan.pages import NO_KV, device_pages
from sgl_elastic.plan.placement import place
from sgl_elastic.plan.redundancy import most_copy_pages, most_per_device
from sgl_elastic.types import AdapterEntry, MemoryShape, Region, RegionKind
from sgl_esft.memory.model_sizes import ModelSizes
from sgl_esft_launch import fit
from sgl_esft_launch.elastic import ElasticPlan


def check(planned: ElasticPlan) -> None:
    """Raises DeviceMemoryError, with the smallest device that would do."""
    sizes = fit.served_sizes(Path(planned.launch.model_path), planned.launch.sglang_argv)
    if sizes is None or planned.launch.config is None:
        return
    kv_tokens = min(fit.LEAST_KV_TOKENS, planned.options.kv_limit)
    shape = _shape(planned, sizes, kv_tokens)
    # A reserve has room for the first adapters too.
    adapters = () if planned.adapter_reserve_bytes else planned.first_adapters
    fraction = 0.5 if planned.options.strategy is ScaleStrategy.COLOCATED else 1.0
    need = replace(_fullest(planned, shape, adapters, kv_tokens), extra=sizes.rotary_bytes)
    need.check(planned.options.device_bytes, fraction)


def _shape(planned: ElasticPlan, sizes: ModelSizes, kv_tokens: int) -> MemoryShape:
    config = planned.launch.config
    assert config is not None
    return MemoryShape(
        planned.page_bytes,
        sizes.spec.num_experts,
        config.max_adapters,
        config.max_experts_per_adapter,
        tuple(_regions(planned, sizes, kv_tokens)),
    )


def _regions(planned: ElasticPlan, sizes: ModelSizes, kv_tokens: int) -> Iterator[Region]:
    config, spec = planned.launch.config, sizes.spec
    assert config is not None
    trunk = sizes.trunk_bytes + sizes.derived_bytes
    yield Region("trunk", RegionKind.TRUNK, 1, trunk)
    num_slots = spec.num_experts + config.max_adapters * config.max_experts_per_adapter
    for layer in spec.moe_layer_ids:
        for part, num_bytes in enumerate(sizes.slot_bytes):
            name = f"experts.{layer}.{part}"
            yield Region(name, RegionKind.EXPERT, num_slots, num_bytes, layer)
    row = fit.kv_bytes(sizes, planned.launch.sglang_argv, 1) // spec.num_layers
    for layer in range(spec.num_layers):
        yield Region(f"kv.{layer}", RegionKind.KV, kv_tokens + 1, row)


def _fullest(
    planned: ElasticPlan, shape: MemoryShape, adapters: Sequence[AdapterEntry], kv_tokens: int
) -> fit.Need:
    """Of the device that has to hold most."""
    devices = range(planned.options.dp_size)
    homes = place(shape, devices, None, dict.fromkeys(devices, 1 << 62), adapters).homes
    per_layer = most_per_device(planned.options.redundant_experts)
    copies = most_copy_pages(shape, per_layer, planned.first_adapters)
    needs = []
    for device in devices:
        here = [expert for expert, home in enumerate(homes) if home == device]
        counts = (((), NO_KV), (adapters, NO_KV), (adapters, kv_tokens))
        pages = [device_pages(shape, here, held, tokens) for held, tokens in counts]
        base, held, whole = ((count + copies) * shape.page_bytes for count in pages)
        needs.append(fit.Need(base, held - base + planned.adapter_reserve_bytes, whole - held, 0))
    return max(needs, key=lambda need: need.smallest(1))
