"""What GET /v1/memory answers: the experts' memory of every device, as counted just now.

    moe_layer.py, expert_memory.py -> [MemoryReport] -> JSON -> [MemoryReport] -> table, picture

Sizes are in bytes. The JSON has the derived numbers too, for readers without this package.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec

from sgl_esft.config import ExpertMemoryKind
from sgl_esft.errors import InvariantError, ServerAnswerError
from sgl_esft.weave.slot_layout import SlotLayout

if TYPE_CHECKING:  # so that a client needs no extension module
    from sgl_esft.weave.expert_memory import SlotUsage

BASE_OWNER: Final = -1

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True)
class SlotRun:
    """Neighbouring mapped slots of one owner."""

    first: Count
    count: Positive
    owner: Annotated[int, msgspec.Meta(ge=BASE_OWNER)]  # adapter slot; -1 = base


@dataclass(frozen=True)
class LayerMemory:
    """The slots of one MoE layer on one device, all its tensors together."""

    layer_id: Count
    num_slots: Positive
    slot_bytes: Positive
    runs: tuple[SlotRun, ...]  # ascending; a slot in none of them has no memory of its own
    reserved_bytes: Count  # addresses
    mapped_bytes: Count  # of them with memory behind
    shared_bytes: Count  # of them on pages that several slots share
    used_bytes: Count  # what the mapped slots themselves need

    @property
    def padded_bytes(self) -> int:
        """What padding would map: every slot."""
        return self.num_slots * self.slot_bytes

    def check_runs(self) -> None:
        """Raises ServerAnswerError unless they ascend without overlap and stay below num_slots."""
        edges = [edge for run in self.runs for edge in (run.first, run.first + run.count)]
        if any(a > b for a, b in itertools.pairwise([*edges, self.num_slots])):
            raise ServerAnswerError(
                f"layer {self.layer_id}: its runs overlap, or leave its {self.num_slots} slots."
            )

    def to_json(self) -> dict[str, object]:
        runs = [asdict(run) for run in self.runs]
        return {**asdict(self), "runs": runs, "padded_bytes": self.padded_bytes}


@dataclass(frozen=True)
class PoolMemory:
    """A device's pages."""

    page_bytes: Positive
    budget_bytes: Count | None  # the pool never grows beyond; None = no limit of ours
    used_bytes: Count  # of pages in a layer
    free_bytes: Count  # of pages kept for the next adapter
    peak_used_bytes: Count
    num_created: Count  # pages, since the start
    num_destroyed: Count


@dataclass(frozen=True)
class KvMemory:
    """The KV cache of one device."""

    num_tokens: Count
    bytes_per_token: Positive


@dataclass(frozen=True)
class ExpertTiers:
    """Experts in tiers, since the start, all layers together."""

    policy: str
    num_rows: Positive  # of each layer
    num_requests: Count  # experts that layers' steps have asked for
    num_hits: Count  # of them in rows already
    num_loads: Count  # on demand
    num_prefetches: Count
    num_useful: Count  # prefetched and asked for, and
    num_wasted: Count  # not, in the step they were meant for
    num_failed: Count  # could not be read
    read_bytes: Count
    stall_s: Annotated[float, msgspec.Meta(ge=0)]  # nothing could be computed
    max_bytes_per_s: Positive | None = None  # that are read; None = what the storage gives


@dataclass(frozen=True)
class LoraMemory:
    """LoRA adapters' matrices on one device; its slots are memory from the start."""

    num_slots: Positive  # one more holds zeros, for requests without LoRA
    slot_bytes: Count
    adapters: Mapping[str, Count]  # adapter name -> LoRA slot, of those on the device


# What follows from a device's other numbers, told too.
_DERIVED: Final = (
    "mapped_bytes",
    "used_bytes",
    "reserved_bytes",
    "shared_bytes",
    "padded_bytes",
    "fragmentation",
    "padded_fragmentation",
    "kv_tokens_gained",
)


@dataclass(frozen=True)
class DeviceMemory:
    """The experts' memory of one device."""

    rank: Count
    device: str
    expert_memory: ExpertMemoryKind
    pool: PoolMemory | None  # None when padded
    resident_bytes: Count | None  # the operating system's own count; None where it keeps none
    adapters: Mapping[str, Count]  # adapter name -> adapter slot
    kv: KvMemory | None
    layers: tuple[LayerMemory, ...]
    tiers: ExpertTiers | None = None  # None = every expert is on the device
    lora: LoraMemory | None = None  # None = the server takes no LoRA adapters

    @property
    def mapped_bytes(self) -> int:
        return sum(layer.mapped_bytes for layer in self.layers)

    @property
    def used_bytes(self) -> int:
        return sum(layer.used_bytes for layer in self.layers)

    @property
    def reserved_bytes(self) -> int:
        return sum(layer.reserved_bytes for layer in self.layers)

    @property
    def shared_bytes(self) -> int:
        return sum(layer.shared_bytes for layer in self.layers)

    @property
    def padded_bytes(self) -> int:
        """What padding would map."""
        return sum(layer.padded_bytes for layer in self.layers)

    @property
    def fragmentation(self) -> float:
        """F_mem (ExpertWeave section 3.1): mapped over used bytes, 1.0 when nothing is used."""
        return self.mapped_bytes / self.used_bytes if self.used_bytes else 1.0

    @property
    def padded_fragmentation(self) -> float:
        """F_mem as padding would have it for the same adapters."""
        return self.padded_bytes / self.used_bytes if self.used_bytes else 1.0

    @property
    def kv_tokens_gained(self) -> int | None:
        """Tokens of KV cache that fit into what padding would map beyond what is mapped.

        Negative when pages waste more than padding would; None when the KV cache is not known.
        """
        if self.kv is None:
            return None
        return (self.padded_bytes - self.mapped_bytes) // self.kv.bytes_per_token

    def owner_bytes(self, owner: int) -> int:
        """Bytes of the slots that an adapter slot (or -1: the base) has mapped."""
        return sum(
            run.count * layer.slot_bytes
            for layer in self.layers
            for run in layer.runs
            if run.owner == owner
        )

    def to_json(self) -> dict[str, object]:
        derived = {name: getattr(self, name) for name in _DERIVED}
        layers = [layer.to_json() for layer in self.layers]
        return {**asdict(self), "layers": layers, **derived}


@dataclass(frozen=True)
class MemoryReport:
    """All devices of one server, by rank."""

    devices: tuple[DeviceMemory, ...]

    def to_json(self) -> dict[str, object]:
        """The report as JSON values."""
        return {"devices": [device.to_json() for device in self.devices]}

    @classmethod
    def from_json(cls, value: object) -> MemoryReport:
        """The exact reverse of `to_json`.

        Raises ServerAnswerError for anything that `to_json` would not write, derived numbers that
        do not follow from the others included.
        """
        try:
            report = msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise ServerAnswerError(f"memory report: {error}.") from error
        for device in report.devices:
            for layer in device.layers:
                layer.check_runs()
        if report.to_json() != value:
            raise ServerAnswerError(
                "the memory report has unknown keys or contradicts itself. "
                "Use the client of the server's own version."
            )
        return report


def layer_memory(
    layer_id: int,
    layout: SlotLayout,
    slot_bytes: int,
    usage: SlotUsage,
    adapter_slots: Mapping[int, Iterable[int]],
    base_slots: Iterable[int] | None = None,
) -> LayerMemory:
    """Report one layer: the mapped slots of the base (None: all of them) and of each adapter slot.

    `slot_bytes` is of all the layer's tensors together. Raises InvariantError when a slot is not in
    its owner's region.
    """
    base = range(layout.num_base)
    runs = _runs(layer_id, BASE_OWNER, base, base if base_slots is None else base_slots)
    for owner, slots in sorted(adapter_slots.items()):
        runs += _runs(layer_id, owner, layout.adapter_range(owner), slots)
    return LayerMemory(
        layer_id=layer_id,
        num_slots=layout.num_slots,
        slot_bytes=slot_bytes,
        runs=tuple(runs),
        **asdict(usage),
    )


def _runs(layer_id: int, owner: int, region: range, slots: Iterable[int]) -> list[SlotRun]:
    """Neighbouring slots together, ascending."""
    runs: list[SlotRun] = []
    for slot in sorted(slots):
        if slot not in region:
            raise InvariantError(f"layer {layer_id}: slot {slot} of owner {owner} is not its own")
        if runs and slot == runs[-1].first + runs[-1].count:
            runs[-1] = SlotRun(runs[-1].first, runs[-1].count + 1, owner)
        else:
            runs.append(SlotRun(slot, 1, owner))
    return runs
