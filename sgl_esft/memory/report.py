"""What GET /v1/memory answers: the experts' memory of every device, as counted just now.

    moe_layer.py, expert_memory.py -> [MemoryReport] -> JSON -> [MemoryReport] -> table, picture

Sizes are in bytes. The JSON has the derived numbers too, for readers without this package.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from sgl_esft.config import EXPERT_MEMORY_KINDS
from sgl_esft.errors import InvariantError, ServerAnswerError
from sgl_esft.weave.slot_layout import SlotLayout

if TYPE_CHECKING:  # so that a client needs no extension module
    from sgl_esft.weave.expert_memory import SlotUsage

BASE_OWNER: Final = -1


@dataclass(frozen=True)
class SlotRun:
    """Neighbouring mapped slots of one owner."""

    first: int
    count: int
    owner: int  # adapter slot; -1 = base

    @classmethod
    def from_json(cls, value: object) -> SlotRun:
        fields = _object(value, "run")
        return cls(
            first=_count(fields, "first"),
            count=_count(fields, "count", minimum=1),
            owner=_count(fields, "owner", minimum=BASE_OWNER),
        )


@dataclass(frozen=True)
class LayerMemory:
    """The slots of one MoE layer on one device, all its tensors together."""

    layer_id: int
    num_slots: int
    slot_bytes: int
    runs: tuple[SlotRun, ...]  # ascending; a slot in none of them has no memory of its own
    reserved_bytes: int  # addresses
    mapped_bytes: int  # of them with memory behind
    shared_bytes: int  # of them on pages that several slots share
    used_bytes: int  # what the mapped slots themselves need

    @property
    def padded_bytes(self) -> int:
        """What padding would map: every slot."""
        return self.num_slots * self.slot_bytes

    def to_json(self) -> dict[str, object]:
        runs = [asdict(run) for run in self.runs]
        return {**asdict(self), "runs": runs, "padded_bytes": self.padded_bytes}

    @classmethod
    def from_json(cls, value: object) -> LayerMemory:
        fields = _object(value, "layer")
        layer = cls(
            layer_id=_count(fields, "layer_id"),
            num_slots=_count(fields, "num_slots", minimum=1),
            slot_bytes=_count(fields, "slot_bytes", minimum=1),
            runs=tuple(SlotRun.from_json(run) for run in _list(fields, "runs")),
            reserved_bytes=_count(fields, "reserved_bytes"),
            mapped_bytes=_count(fields, "mapped_bytes"),
            shared_bytes=_count(fields, "shared_bytes"),
            used_bytes=_count(fields, "used_bytes"),
        )
        if not _in_order(layer.runs, layer.num_slots):
            raise ServerAnswerError(
                f"layer {layer.layer_id}: its runs overlap, or leave its {layer.num_slots} slots."
            )
        return layer


@dataclass(frozen=True)
class PoolMemory:
    """A device's pages."""

    page_bytes: int
    budget_bytes: int | None  # the pool never grows beyond; None = no limit of ours
    used_bytes: int  # of pages in a layer
    free_bytes: int  # of pages kept for the next adapter
    peak_used_bytes: int
    num_created: int  # pages, since the start
    num_destroyed: int

    @classmethod
    def from_json(cls, value: object) -> PoolMemory:
        fields = _object(value, "pool")
        return cls(
            page_bytes=_count(fields, "page_bytes", minimum=1),
            budget_bytes=_optional_count(fields, "budget_bytes"),
            used_bytes=_count(fields, "used_bytes"),
            free_bytes=_count(fields, "free_bytes"),
            peak_used_bytes=_count(fields, "peak_used_bytes"),
            num_created=_count(fields, "num_created"),
            num_destroyed=_count(fields, "num_destroyed"),
        )


@dataclass(frozen=True)
class KvMemory:
    """The KV cache of one device."""

    num_tokens: int
    bytes_per_token: int

    @classmethod
    def from_json(cls, value: object) -> KvMemory:
        fields = _object(value, "kv")
        return cls(_count(fields, "num_tokens"), _count(fields, "bytes_per_token", minimum=1))


@dataclass(frozen=True)
class DeviceMemory:
    """The experts' memory of one device."""

    rank: int
    device: str
    expert_memory: str  # one of EXPERT_MEMORY_KINDS
    pool: PoolMemory | None  # None when padded
    resident_bytes: int | None  # the operating system's own count; None where it keeps none
    adapters: Mapping[str, int]  # adapter name -> adapter slot
    kv: KvMemory | None
    layers: tuple[LayerMemory, ...]

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
        return {
            "rank": self.rank,
            "device": self.device,
            "expert_memory": self.expert_memory,
            "pool": asdict(self.pool) if self.pool else None,
            "resident_bytes": self.resident_bytes,
            "adapters": dict(self.adapters),
            "kv": asdict(self.kv) if self.kv else None,
            "layers": [layer.to_json() for layer in self.layers],
            "mapped_bytes": self.mapped_bytes,
            "used_bytes": self.used_bytes,
            "reserved_bytes": self.reserved_bytes,
            "shared_bytes": self.shared_bytes,
            "padded_bytes": self.padded_bytes,
            "fragmentation": self.fragmentation,
            "padded_fragmentation": self.padded_fragmentation,
            "kv_tokens_gained": self.kv_tokens_gained,
        }

    @classmethod
    def from_json(cls, value: object) -> DeviceMemory:
        fields = _object(value, "device")
        pool, kv = fields.get("pool"), fields.get("kv")
        adapters = _object(fields.get("adapters"), "adapters")
        return cls(
            rank=_count(fields, "rank"),
            device=_text(fields, "device"),
            expert_memory=_kind(fields),
            pool=None if pool is None else PoolMemory.from_json(pool),
            resident_bytes=_optional_count(fields, "resident_bytes"),
            adapters={name: _count(adapters, name) for name in adapters},
            kv=None if kv is None else KvMemory.from_json(kv),
            layers=tuple(LayerMemory.from_json(layer) for layer in _list(fields, "layers")),
        )


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
        listed = _list(_object(value, "answer"), "devices")
        report = cls(tuple(DeviceMemory.from_json(device) for device in listed))
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
        reserved_bytes=usage.reserved_bytes,
        mapped_bytes=usage.mapped_bytes,
        shared_bytes=usage.shared_bytes,
        used_bytes=usage.used_bytes,
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


def _in_order(runs: Iterable[SlotRun], num_slots: int) -> bool:
    """Whether runs ascend without overlap and stay below `num_slots`."""
    edges = [edge for run in runs for edge in (run.first, run.first + run.count)]
    return all(a <= b for a, b in itertools.pairwise([*edges, num_slots]))


def _object(value: object, what: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ServerAnswerError(f"memory report: {what} is {value!r:.80}, not an object.")
    return value


def _list(fields: Mapping[str, object], key: str) -> Sequence[object]:
    value = fields.get(key)
    if not isinstance(value, list):
        raise ServerAnswerError(f"memory report: {key} is {value!r:.80}, not a list.")
    return value


def _count(fields: Mapping[str, object], key: str, minimum: int = 0) -> int:
    value = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ServerAnswerError(
            f"memory report: {key} is {value!r:.80}, not an integer of at least {minimum}."
        )
    return value


def _optional_count(fields: Mapping[str, object], key: str) -> int | None:
    return None if fields.get(key) is None else _count(fields, key)


def _text(fields: Mapping[str, object], key: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str):
        raise ServerAnswerError(f"memory report: {key} is {value!r:.80}, not text.")
    return value


def _kind(fields: Mapping[str, object]) -> str:
    kind = _text(fields, "expert_memory")
    if kind not in EXPERT_MEMORY_KINDS:
        raise ServerAnswerError(
            f"memory report: expert_memory is {kind!r:.80}, not {' or '.join(EXPERT_MEMORY_KINDS)}."
        )
    return kind
