"""The nouns of the elastic runtime: memory's shape, where things live, what a scale will do.

    shape, placement, request --> [plan] --> Plan(steps) --> coordinator --> memory, instances

All frozen, all JSON-able by `dataclasses.asdict`. Sizes in bytes, device ids as the operator
numbers them, expert ids as the model numbers them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class RegionKind(StrEnum):
    """What the slots of a region are."""

    TRUNK = "trunk"  # one slot: every tensor that is no routed expert; on each device
    EXPERT = "expert"  # slot e: base expert e; behind them the adapters' experts
    KV = "kv"  # slot t: the KV of token slot t; slot 0 is the engine's padding row


@dataclass(frozen=True)
class Region:
    """One virtual tensor, with the same slots on every device (ExpertWeave section 4.2)."""

    name: str
    kind: RegionKind
    num_slots: int
    slot_bytes: int
    layer_id: int = -1  # EXPERT: the model's layer; -1 for the others


@dataclass(frozen=True)
class AdapterEntry:
    """An adapter as every device and instance knows it."""

    adapter_id: str  # SGLang's id of one loaded version
    name: str
    path: str
    adapter_slot: int
    pinned: bool
    experts: Mapping[int, tuple[int, ...]]  # layer id -> expert ids, ascending
    content: str = ""  # changes when the folder does; as it was loaded, "" if nobody looked


@dataclass(frozen=True)
class MemoryShape:
    """What a model's memory looks like on any device; the same for every degree of DP and EP."""

    page_bytes: int
    num_experts: int  # M, routed experts of a MoE layer
    max_adapters: int  # N; 0 without weaving
    slots_per_adapter: int  # E_max
    regions: tuple[Region, ...]

    def of_kind(self, kind: RegionKind) -> tuple[Region, ...]:
        """The regions of one kind, in order."""
        return tuple(region for region in self.regions if region.kind is kind)

    def slots_of_adapter(
        self, adapter: AdapterEntry, layer_id: int, expert_ids: Container[int]
    ) -> list[int]:
        """An adapter's slots in a layer's EXPERT regions, on a device with these base experts.

        Its k-th expert there, by ascending id, is in slot M + adapter_slot * E_max + k, on the
        device of the base expert whose place it takes.
        """
        first = self.num_experts + adapter.adapter_slot * self.slots_per_adapter
        experts = adapter.experts.get(layer_id, ())
        return [first + k for k, expert in enumerate(experts) if expert in expert_ids]


@dataclass(frozen=True)
class Placement:
    """One configuration: the devices of an instance and what each of them holds.

    Rank r runs on `device_ids[r]`. `homes[e]` is the device of expert e, in every layer.
    `kv_tokens[r]` is the KV capacity of rank r in tokens, without the padding row.
    """

    device_ids: tuple[int, ...]
    homes: tuple[int, ...]
    kv_tokens: tuple[int, ...]

    @property
    def dp_size(self) -> int:
        """DP = EP = the number of devices; TP is 1."""
        return len(self.device_ids)

    def experts_of(self, device_id: int) -> tuple[int, ...]:
        """Expert ids whose home the device is, ascending."""
        return tuple(e for e, home in enumerate(self.homes) if home == device_id)

    def kv_tokens_of(self, device_id: int) -> int:
        """KV tokens of a device; 0 where no rank runs."""
        if device_id not in self.device_ids:
            return 0
        return self.kv_tokens[self.device_ids.index(device_id)]


@dataclass(frozen=True, order=True)
class ExpertCopy:
    """One layer's copy of an expert, on a device that is not the expert's home."""

    layer_id: int
    expert_id: int
    device_id: int


class StepKind(StrEnum):
    """What one step does; all are idempotent."""

    ADD_DEVICE = "add_device"  # start the worker of a device (the paper's add-nodes)
    SHRINK_KV = "shrink_kv"  # the serving rank gives KV tokens above `num_tokens` back
    MAP_EXPERTS = "map_experts"  # pages behind expert slots (vpage-remap)
    MAP_TRUNK = "map_trunk"
    MAP_KV = "map_kv"  # KV capacity of a device that the serving instance does not use
    COPY_TRUNK = "copy_trunk"  # p2p-copy from `source_id`
    COPY_EXPERTS = "copy_experts"  # p2p-copy from `source_id`, adapters' experts with them
    READ_TRUNK = "read_trunk"  # by the new instance's rank, from the checkpoint
    READ_EXPERTS = "read_experts"  # the same; adapters' experts from their folders
    TRIM_KV = "trim_kv"  # KV pages above `num_tokens` go back; no rank uses the device
    UNMAP_EXPERTS = "unmap_experts"
    GROW_KV = "grow_kv"  # the serving rank gets KV tokens up to `num_tokens`
    REMOVE_DEVICE = "remove_device"  # everything unmapped, the worker ends


READS = frozenset({StepKind.READ_TRUNK, StepKind.READ_EXPERTS})


@dataclass(frozen=True)
class Step:
    """One step of a plan, on one device."""

    kind: StepKind
    device_id: int
    source_id: int = -1  # of a copy
    expert_ids: tuple[int, ...] = ()
    num_tokens: int = 0  # of a KV step: the capacity afterwards
    num_bytes: int = 0  # of a copy: bytes over the link; of a reading: bytes from disk
    # Of a copy or a reading: (layer id, expert ids) that it is about; () = `expert_ids` everywhere.
    parts: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class Plan:
    """What a scale will do. `before` runs while the old one serves, `after` once it is gone."""

    old: Placement
    new: Placement
    before: tuple[Step, ...]
    after: tuple[Step, ...]
    peak_pages: Mapping[int, int]  # device id -> the most pages at any moment
    final_pages: Mapping[int, int]  # device id -> pages when all is done
    # Leaving or lost device -> who takes its requests, and its KV where there is any.
    kv_moves: Mapping[int, int] = field(default_factory=dict)
    lost: tuple[int, ...] = ()  # devices whose memory is gone: `old` is what is left without them
    # Device of `old` -> (layer id, expert id) that it has besides what it is the home of.
    copies: Mapping[int, frozenset[tuple[int, int]]] = field(default_factory=dict)

    @property
    def copied_bytes(self) -> int:
        """Bytes over all links before the switch, KV of running requests not included."""
        return sum(step.num_bytes for step in self.before if step.kind not in READS)

    @property
    def read_bytes(self) -> int:
        """Bytes that no device has, and that come from disk."""
        return sum(step.num_bytes for step in self.before if step.kind in READS)


@dataclass(frozen=True)
class ScaleRequest:
    """What an operator or the autoscaler asks for."""

    dp_size: int
    device_ids: tuple[int, ...] = ()  # the devices to end up with; () = the planner's choice
    leave: tuple[int, ...] = ()  # devices that must leave
    dry_run: bool = False
    key: str = ""  # idempotency key; "" = none
    drain: bool = False  # wait for running streams instead of handing them over


class OperationState(StrEnum):
    """Life of a scale operation."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    ROLLED_BACK = "rolled_back"  # failed before the switch: the old configuration serves
    DEGRADED = "degraded"  # switched, but what follows the switch has not finished yet
