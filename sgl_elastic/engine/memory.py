"""An engine rank's weights and KV as views of memory that belongs to the HMM.

    skeleton --[EngineMemory.bind]--> shape declared --> addresses --> parameters, KV buffers
                                                           ^-- mapped, and mapped anew, by rank.py

Addresses are reserved once and never change, so captured graphs stay valid whatever is mapped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.utils.dlpack import from_dlpack

from sgl_elastic.engine import trunk
from sgl_elastic.errors import ElasticInternalError, MemoryWorkerError
from sgl_elastic.instance.engine_config import EngineConfig
from sgl_elastic.memory.client import DeviceClient
from sgl_elastic.memory.mapping import RegionMapping
from sgl_elastic.memory.runs import Runs, union
from sgl_elastic.memory.slots import copy_slots, expert_slots, kv_slots, trunk_slots
from sgl_elastic.plan.redundancy import computed_for, holders_of
from sgl_elastic.types import (
    AdapterEntry,
    ExpertCopy,
    MemoryShape,
    Placement,
    Region,
    RegionKind,
)
from sgl_esft.config import required_config
from sgl_esft.errors import InvariantError, OutOfExpertMemoryError
from sgl_esft.weave.expert_memory import SlotUsage
from sgl_esft.weave.slot_layout import SlotLayout

Found = TypeVar("Found")
EXPERT_TENSORS = ("w13", "w2")  # `<name>_weight` in SGLang's layers
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT_PARAMETER = re.compile(r"\.experts\.w(13|2)_weight$")


def expert_region(layer_id: int, tensor: str) -> str:
    """The name of one layer's w13 or w2."""
    return f"experts.{layer_id}.{tensor}"


class EngineMemory:
    """The memory of one rank; a sgl_esft page source while the model is built."""

    def __init__(
        self, config: EngineConfig, device: torch.device, on_woven: Callable[[], None]
    ) -> None:
        self._config = config
        self._on_woven = on_woven
        self.num_sources = config.num_sources  # sgl_esft's page source has it
        self.device = device  # where the weights are
        self._layers: dict[int, tuple[Any, SlotLayout]] = {}
        self._slots: dict[int, ElasticSlots] = {}
        self._trunk = trunk.TrunkLayout((), 0)
        self.shape: MemoryShape | None = None
        self.mapping: RegionMapping | None = None
        self.client: DeviceClient | None = None
        self.manager: Any = None  # the EsftManager, once weaving is done

    # ---- sgl_esft's page source ----

    def create_experts(
        self, layer: torch.nn.Module, layout: SlotLayout, create: Callable[[], None]
    ) -> ElasticSlots:
        """Experts without memory; `bind` gives them addresses when all layers are known."""
        with torch.device("meta"):
            create()
        layer_id = int(layer.layer_id)  # type: ignore[arg-type]
        self._layers[layer_id] = (layer, layout)
        self._slots[layer_id] = ElasticSlots(self, layer_id, layout.num_slots)
        return self._slots[layer_id]

    def forget_heat(self) -> None:
        """What was counted before, in a warm-up or when it served last, is of no use."""
        if self.manager is not None and self.manager.heat is not None:
            self.manager.heat.reset()

    def woven(self, manager: Any) -> None:
        self.manager = manager
        self._on_woven()

    # ---- building ----

    def plan(self, model: torch.nn.Module, kv_row_bytes: list[int]) -> MemoryShape:
        """What memory must look like for this model."""
        tensors = trunk.weights_of(model, lambda name: bool(_EXPERT_PARAMETER.search(name)))
        tensors.update((name, tensor) for name, _, _, tensor in trunk.derived_of(model))
        self._trunk = trunk.plan_trunk(tensors)
        regions = [
            Region(f"trunk.{self._trunk.digest}", RegionKind.TRUNK, 1, self._trunk.num_bytes)
        ]
        for layer_id, (layer, layout) in sorted(self._layers.items()):
            for tensor in EXPERT_TENSORS:
                num_bytes = getattr(layer, f"{tensor}_weight")[0].nbytes
                name = expert_region(layer_id, tensor)
                region = Region(name, RegionKind.EXPERT, layout.num_slots, num_bytes, layer_id)
                regions.append(region)
        kv_slots = self._config.max_kv_tokens + 1
        for index, row_bytes in enumerate(kv_row_bytes):
            regions.append(Region(f"kv.{index}", RegionKind.KV, kv_slots, row_bytes))
        _, layout = next(iter(self._layers.values()))
        self.shape = MemoryShape(
            self._config.page_bytes,
            layout.num_routed,
            required_config().max_adapters,
            layout.slots_per_adapter,
            tuple(regions),
        )
        return self.shape

    def bind(self, model: torch.nn.Module) -> None:
        """Put every tensor of the model where the shape says; nothing is mapped yet."""
        shape = self._required_shape()
        self.mapping = RegionMapping(shape, self._config.backend, device_id=self.device.index or 0)
        for layer_id, (layer, slots) in self._layers.items():
            for tensor in EXPERT_TENSORS:
                region = expert_region(layer_id, tensor)
                self._bind_experts(layer, slots, region, f"{tensor}_weight")
        views = self._trunk_views()
        weights = trunk.weights_of(model, lambda name: bool(_EXPERT_PARAMETER.search(name)))
        for name, weight in weights.items():
            weight.data = views[name]
        self.rebind(model)

    def _bind_experts(self, layer: Any, layout: SlotLayout, region: str, name: str) -> None:
        planned = getattr(layer, name)
        parameter = torch.nn.Parameter(
            self._tensor(region, [layout.num_slots, *planned.shape[1:]], planned.dtype),
            requires_grad=False,
        )
        for attribute, value in vars(planned).items():
            setattr(parameter, attribute, value)
        layer.register_parameter(name, parameter)

    def adopt_derived(self, model: torch.nn.Module) -> None:
        """After loading: SGLang derived tensors anew; their values go where they belong."""
        views = self._trunk_views()
        for name, _, _, tensor in list(trunk.derived_of(model)):
            views[name].copy_(tensor)
        self.rebind(model)

    def rebind(self, model: torch.nn.Module) -> None:
        """As `adopt_derived`, where the values come from elsewhere."""
        views = self._trunk_views()
        for name, module, attribute, _ in list(trunk.derived_of(model)):
            setattr(module, attribute, views[name])

    def _trunk_views(self) -> dict[str, torch.Tensor]:
        """The trunk's tensors by name. Raises ElasticInternalError before `plan`."""
        region = self._required_shape().of_kind(RegionKind.TRUNK)[0]
        memory = self._tensor(region.name, [region.slot_bytes], torch.uint8)
        return {t.name: trunk.view(memory, t) for t in self._trunk.tensors}

    def kv_buffers(self, row_shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        """The KV pool's buffers, [max_kv_tokens + 1, *row_shape] each; only part is mapped."""
        num_rows = self._config.max_kv_tokens + 1
        count = len(self._required_shape().of_kind(RegionKind.KV))
        return [self._tensor(f"kv.{i}", [num_rows, *row_shape], dtype) for i in range(count)]

    def _tensor(self, region: str, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        name = str(dtype).removeprefix("torch.")
        return from_dlpack(self.required_mapping().range_of(region).to_dlpack(shape, name))

    # ---- what is mapped ----

    def slots_for(
        self,
        expert_ids: Iterable[int],
        kv_tokens: int,
        adapters: Iterable[AdapterEntry],
        copies: Mapping[int, Sequence[int]],
    ) -> dict[str, Runs]:
        """The slots that a placement gives this rank, by region; `copies` by layer id."""
        shape, loaded = self._required_shape(), tuple(adapters)
        experts = expert_slots(shape, loaded, expert_ids)
        return {
            **trunk_slots(shape),
            **union(experts, copy_slots(shape, loaded, copies)),
            **kv_slots(shape, kv_tokens),
        }

    def note_mapped(self, wanted: dict[str, Runs]) -> None:
        """Tell the layers' books which slots have memory."""
        for layer_id, slots in self._slots.items():
            runs = wanted.get(expert_region(layer_id, "w13"), ())
            slots.note({first + i for first, count in runs for i in range(count)})

    def kv_run(self, first: int, count: int) -> dict[str, Runs]:
        """A run of token slots, in every KV region."""
        return {r.name: ((first, count),) for r in self._required_shape().of_kind(RegionKind.KV)}

    def required_mapping(self) -> RegionMapping:
        """Raises ElasticInternalError before `bind`."""
        return _there(self.mapping, "the model's memory is not bound yet")

    def required_client(self) -> DeviceClient:
        """Raises ElasticInternalError while the rank is attached nowhere."""
        return _there(self.client, "the rank has no memory worker yet")

    def _required_shape(self) -> MemoryShape:
        return _there(self.shape, "the model's memory is not planned yet")


def _there(found: Found | None, problem: str) -> Found:
    if found is None:
        raise ElasticInternalError(problem)
    return found


def heat_of(memory: EngineMemory) -> dict[int, tuple[int, ...]] | None:
    """Layer id -> tokens by expert id; None where they are not counted."""
    if memory.manager is None or memory.manager.heat is None:
        return None
    return {layer: tuple(tokens) for layer, tokens in memory.manager.heat.by_expert().items()}


def place_copies(
    memory: EngineMemory, placement: Placement, copies: Sequence[ExpertCopy], rank: int
) -> None:
    """From now on this rank computes what is its part with these copies of experts."""
    plane = memory.manager.plane
    for layer_id, layer in plane.layers.items():
        holders = holders_of(placement, copies, layer_id)
        computed = [
            computed_for(source % placement.dp_size, rank, holders)
            for source in range(memory.num_sources)
        ]
        resident = [expert_id for expert_id, ranks in enumerate(holders) if rank in ranks]
        layer.rebind(resident, layer.adapter_experts, computed)
    plane.uses.num_changes += 1


def expert_of(weight_name: str) -> int | None:
    """The routed expert a checkpoint tensor belongs to; None for the trunk's."""
    found = _EXPERT.search(weight_name)
    return int(found.group(1)) if found else None


def layer_of(weight_name: str) -> int | None:
    """The layer that a checkpoint tensor belongs to; None for one of no layer."""
    found = _LAYER.search(weight_name)
    return int(found.group(1)) if found else None


# The memory of one layer's slots when it belongs to the HMM (sgl_esft's SlotMemory).
#
#     adapters.py --map/unmap--> [ElasticSlots] --> memory worker (pages), own addresses (mapping)
#
# Base slots are mapped by rank.py as placements change; an adapter's slots when it is loaded.


@dataclass(eq=False)
class ElasticSlots:
    """One layer's slots on this rank."""

    memory: EngineMemory
    layer_id: int
    num_slots: int
    _mapped: set[int] = field(default_factory=set)

    def note(self, mapped: set[int]) -> None:
        """Somebody else has mapped exactly these slots."""
        self._mapped = set(mapped)

    def choose(self, region: range, count: int) -> range:
        return region[:count]

    def map(self, slots: range) -> None:
        if self._mapped.intersection(slots):
            raise InvariantError(f"layer {self.layer_id}: some of slots {slots} are mapped")
        runs = self._runs(slots)
        client = self.memory.required_client()
        try:
            client.map_slots(runs)
        except MemoryWorkerError as error:
            raise OutOfExpertMemoryError(
                f"{error}: unload an adapter, or give devices more by --device-memory"
            ) from error
        self.memory.required_mapping().extend(client, runs)
        self._mapped.update(slots)

    def unmap(self, slots: range) -> None:
        runs = self._runs(slots)
        self.memory.required_mapping().shrink(runs)
        self.memory.required_client().unmap_slots(runs)
        self._mapped.difference_update(slots)

    def _runs(self, slots: range) -> dict[str, Runs]:
        run = ((slots.start, len(slots)),)
        return {expert_region(self.layer_id, tensor): run for tensor in EXPERT_TENSORS}

    def max_pages(self, count: int) -> int:
        return 0  # the HMM's budget decides

    def mapped_slots(self) -> set[int]:
        return set(self._mapped)

    def usage(self) -> SlotUsage:
        shape, mapping = self.memory._required_shape(), self.memory.required_mapping()
        regions = [r for r in shape.regions if r.layer_id == self.layer_id]
        pages = sum(sum(mapping.range_of(r.name).mapped_pages()) for r in regions)
        slot_bytes = sum(r.slot_bytes for r in regions)
        return SlotUsage(
            reserved_bytes=self.num_slots * slot_bytes,
            mapped_bytes=pages * shape.page_bytes,
            shared_bytes=0,
            used_bytes=len(self._mapped) * slot_bytes,
        )

    def check_integrity(self) -> None:
        if not all(0 <= slot < self.num_slots for slot in self._mapped):
            raise InvariantError(f"layer {self.layer_id}: slots {self._mapped} are out of range")
