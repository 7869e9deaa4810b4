"""Will N adapters fit, and how many tokens of KV cache are left? Before anything is started.

    ModelSizes, AdapterShapes, Device -> [plan_memory] -> MemoryPlan -> table or JSON

The paper's figure 9 for any model and adapters. The virtual layout is not estimated: the server's
own code maps the slots, in host memory whose pages nobody touches, and the pages are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import sgl_vmm

from sgl_esft.byte_size import gigabytes
from sgl_esft.config import MIN_PAGE_BYTES
from sgl_esft.errors import ConfigError, InvariantError
from sgl_esft.formats.adapter_shapes import AdapterShape
from sgl_esft.memory.model_sizes import ModelSizes
from sgl_esft.weave.expert_memory import ExpertArena, SlotUsage
from sgl_esft.weave.slot_layout import SlotLayout

MAX_ADAPTERS = 4096


@dataclass(frozen=True)
class Device:
    """One accelerator and what may be used of it for weights and KV cache."""

    memory_bytes: int
    memory_fraction: float  # SGLang's --mem-fraction-static
    reserve_bytes: int  # taken off for each engine: activations, graphs, workspaces
    page_bytes: int

    def __post_init__(self) -> None:
        if not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"--memory-fraction is {self.memory_fraction}, not in (0, 1].")
        if self.page_bytes < MIN_PAGE_BYTES or self.page_bytes.bit_count() != 1:
            raise ConfigError(
                f"--page-size is {self.page_bytes} bytes, not a power of two from "
                f"{MIN_PAGE_BYTES} on. Accelerators have pages of 2MiB."
            )

    def kv_tokens(self, weight_bytes: int, kv_bytes_per_token: int, engines: int) -> int | None:
        """Tokens of KV cache beside the weights; None when not even those fit."""
        usable = int(self.memory_bytes * self.memory_fraction) - engines * self.reserve_bytes
        free_bytes = usable - weight_bytes
        return free_bytes // kv_bytes_per_token if free_bytes >= 0 else None


@dataclass(frozen=True)
class Footprint:
    """One way to serve the adapters."""

    weight_bytes: int  # of all there is, trunk included
    kv_tokens: int | None  # None: it does not fit
    fragmentation: float | None  # F_mem over the experts' memory; None where nothing is padded


@dataclass(frozen=True)
class PlanRow:
    """A number of adapters, served in each of the three ways."""

    num_adapters: int
    max_experts: int  # E_max: slots an adapter
    merged: Footprint  # an engine with a whole model for each adapter
    padded: Footprint
    virtual: Footprint


@dataclass(frozen=True)
class MemoryPlan:
    """What `plan_memory` found, and what it was asked."""

    sizes: ModelSizes
    shapes: tuple[AdapterShape, ...]  # used in order, and from the start again when more are asked
    device: Device
    kv_bytes_per_token: int
    rows: tuple[PlanRow, ...]

    def as_json(self) -> dict[str, object]:
        """The plan as JSON values; sizes in bytes."""
        spec = self.sizes.spec
        return {
            "model": {
                "architecture": spec.architecture,
                "total_bytes": self.sizes.total_bytes,
                "routed_bytes": self.sizes.routed_bytes,
                "expert_bytes": spec.expert_bytes,
                "scheme": None if spec.scheme is None else spec.scheme.label,
                "num_moe_layers": len(spec.moe_layer_ids),
                "kv_bytes_per_token": self.kv_bytes_per_token,
            },
            "device": asdict(self.device),
            "adapters": [
                {"name": s.name, "num_experts": s.num_experts, "max_experts": s.max_experts}
                for s in self.shapes
            ],
            "rows": [asdict(row) for row in self.rows],
        }

    def as_table(self) -> Iterator[str]:
        """The plan as lines for a terminal."""
        yield from self._heading()
        yield ""
        yield f"{'':15}  {'merged':>24}  {'padded':>31}  {'virtual':>31}"
        columns = f"  {'weights':>12}  {'KV tokens':>10}"
        yield f"adapters  E_max{columns}{columns}  F_mem{columns}  F_mem"
        for row in self.rows:
            yield (
                f"{row.num_adapters:8}  {row.max_experts:5}"
                f"{_cells(row.merged)}{_cells(row.padded)}{_cells(row.virtual)}"
            )

    def _heading(self) -> Iterator[str]:
        sizes, device = self.sizes, self.device
        layers = len(sizes.spec.moe_layer_ids)
        yield (
            f"model     {sizes.spec.architecture}: {gigabytes(sizes.total_bytes)}, "
            f"{gigabytes(sizes.routed_bytes)} of it in {layers} layers of "
            f"{sizes.spec.num_experts} routed experts{_quantised(sizes)}"
        )
        yield (
            f"device    {gigabytes(device.memory_bytes)} x {device.memory_fraction:g}, less "
            f"{gigabytes(device.reserve_bytes)} for each engine; pages of {device.page_bytes:,} B"
        )
        yield f"KV cache  {self.kv_bytes_per_token:,} B a token"
        for shape in self.shapes:
            yield (
                f"adapter   {shape.name}: {shape.num_experts} experts, at most "
                f"{shape.max_experts} and on average {shape.num_experts / layers:.2f} a layer"
            )
        if any(row.num_adapters > len(self.shapes) for row in self.rows):
            yield f"          beyond {len(self.shapes)}, these again from the first on"
        yield "          GB = 10^9 bytes; merged: an engine with a whole model for each adapter"


def plan_memory(
    sizes: ModelSizes,
    shapes: Sequence[AdapterShape],
    device: Device,
    counts: Sequence[int],
    *,
    kv_bytes_per_token: int,
    max_experts: int | None = None,
) -> MemoryPlan:
    """Lay out the first `count` of the adapters for each of `counts`, repeating them as needed.

    E_max is `max_experts` or, where that is None, the least that those adapters can do with.
    Raises ConfigError when an adapter has more experts in a layer than `max_experts`.
    """
    if not shapes:
        raise ConfigError("a plan needs at least one adapter: --adapters or --profile.")
    for count in counts:
        if not 1 <= count <= MAX_ADAPTERS:
            raise ConfigError(f"--counts has {count}, not 1 to {MAX_ADAPTERS} adapters.")
    rows = []
    for count in counts:
        chosen = [shapes[i % len(shapes)] for i in range(count)]
        slots = _slots_per_adapter(chosen, max_experts)
        rows.append(_plan_row(sizes, chosen, device, kv_bytes_per_token, slots))
    return MemoryPlan(sizes, tuple(shapes), device, kv_bytes_per_token, tuple(rows))


def expert_usage(
    sizes: ModelSizes, shapes: Sequence[AdapterShape], slots: int, page_bytes: int
) -> SlotUsage:
    """Map base and adapters as a server does, and count the pages of all layers together."""
    spec = sizes.spec
    layout = SlotLayout.plan(
        num_base=spec.num_experts,
        num_routed=spec.num_experts,
        num_adapters=len(shapes),
        max_experts_per_adapter=slots,
    )
    layers = [
        _layer_usage(layout, sizes, [s.experts.get(layer, 0) for s in shapes], page_bytes)
        for layer in spec.moe_layer_ids
    ]
    return SlotUsage(
        reserved_bytes=sum(layer.reserved_bytes for layer in layers),
        mapped_bytes=sum(layer.mapped_bytes for layer in layers),
        shared_bytes=sum(layer.shared_bytes for layer in layers),
        used_bytes=sum(layer.used_bytes for layer in layers),
    )


def _layer_usage(
    layout: SlotLayout, sizes: ModelSizes, counts: Sequence[int], page_bytes: int
) -> SlotUsage:
    """One layer by itself: layers share no page, and so no device's worth of pages is ever held."""
    slot_bytes = sizes.slot_bytes
    capacity = sum(-(-layout.num_slots * size // page_bytes) for size in slot_bytes) * page_bytes
    backend = sgl_vmm.open_backend(
        "host", page_bytes=page_bytes, capacity_bytes=capacity, populate=False
    )
    layer = ExpertArena(backend, page_bytes, None).make_layer(layout.num_slots, slot_bytes)
    layer.padded_slot_bytes = sizes.scale_bytes
    layer.map(range(layout.num_base))
    for adapter_slot, count in enumerate(counts):
        if count:
            layer.map(layer.choose(layout.adapter_range(adapter_slot), count))
    layer.check_integrity()
    if backend.resident_bytes:
        raise InvariantError(f"planning took {backend.resident_bytes} bytes of real memory")
    return layer.usage()


def _slots_per_adapter(shapes: Sequence[AdapterShape], max_experts: int | None) -> int:
    largest = max(shapes, key=lambda shape: shape.max_experts)
    if max_experts is None:
        return largest.max_experts
    if max_experts < largest.max_experts:
        raise ConfigError(
            f"--max-experts-per-adapter is {max_experts}, but {largest.name} has "
            f"{largest.max_experts} experts in a layer."
        )
    return max_experts


def _plan_row(
    sizes: ModelSizes, shapes: Sequence[AdapterShape], device: Device, kv_bytes: int, slots: int
) -> PlanRow:
    spec, num_adapters = sizes.spec, len(shapes)
    slots = min(slots, spec.num_experts)
    usage = expert_usage(sizes, shapes, slots, device.page_bytes)
    num_slots = spec.num_experts + num_adapters * slots
    padded_bytes = len(spec.moe_layer_ids) * num_slots * spec.expert_bytes

    def footprint(weight_bytes: int, fragmentation: float | None, engines: int = 1) -> Footprint:
        tokens = device.kv_tokens(weight_bytes, kv_bytes, engines)
        return Footprint(weight_bytes, tokens, fragmentation)

    return PlanRow(
        num_adapters,
        slots,
        merged=footprint(num_adapters * sizes.total_bytes, None, num_adapters),
        padded=footprint(sizes.trunk_bytes + padded_bytes, padded_bytes / usage.used_bytes),
        virtual=footprint(
            sizes.trunk_bytes + usage.mapped_bytes, usage.mapped_bytes / usage.used_bytes
        ),
    )


def _quantised(sizes: ModelSizes) -> str:
    scheme = sizes.spec.scheme
    return "" if scheme is None else f", quantised as {scheme.label}"


def _cells(way: Footprint) -> str:
    tokens = "no room" if way.kv_tokens is None else f"{way.kv_tokens:,}"
    cells = f"  {gigabytes(way.weight_bytes):>12}  {tokens:>10}"
    return cells if way.fragmentation is None else f"{cells}  {way.fragmentation:5.3f}"
