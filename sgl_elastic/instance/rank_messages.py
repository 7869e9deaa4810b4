"""What the instance manager and an engine's ranks say to each other (wire.py carries it).

    manager  --Attach, Park, Detach, Activate, ResizeKv, PlaceCopies, Run, ..-->  rank
    rank     --RankHello, Declared, Loaded, Started, Frozen, RankDone, HeatReport, ..-->  manager

To a rank each goes in a Told with its number, which the rank's RankDone or Failed repeats.
Arrays of numbers travel as little-endian bytes: token ids and KV slots as int64.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sgl_elastic.types import AdapterEntry, ExpertCopy, MemoryShape, Placement

# The id of a pause of ours, by which a rank tells it from a client's.
PAUSE_TO_PARK = "sgl_elastic.park"


class KvSequence(msgspec.Struct, frozen=True):
    """One path of the prefix cache, root to leaf: its tokens and where their KV lies."""

    token_ids: bytes  # int64 each
    slots: bytes  # int64 each, KV slots of the device
    extra_key: str | None  # the adapter's id and what the client said
    cache_salt: str | None
    last_access: float  # seconds; only the order matters


class RequestState(msgspec.Struct, frozen=True):
    """What a running request has besides what its client sent: enough to go on elsewhere."""

    rid: str
    output_ids: bytes  # int64 each
    num_sent: int  # of them, already sent to the detokenizer
    fields: dict[str, bool | int | float | str | None]  # SGLang's own counters, by their names
    lists: dict[str, list[Any]]  # log-probabilities: numbers, or lists of numbers


class RankHello(msgspec.Struct, frozen=True, tag=True):
    """A rank has started."""

    instance: str
    rank: int
    pid: int


class Declared(msgspec.Struct, frozen=True, tag=True):
    """The rank has built its model's skeleton: what memory must look like."""

    shape: MemoryShape


class Attach(msgspec.Struct, frozen=True, tag=True):
    """Map this memory. `must_load`: nothing is in it yet, read it from disk and say Loaded.

    A parked rank reads `disk_experts`, of others `disk_parts`, (layer id, expert ids), and the
    trunk where it `loads_trunk`, before RankDone.
    """

    socket: str  # of the device's memory worker
    expert_ids: tuple[int, ...]
    kv_tokens: int
    adapters: tuple[AdapterEntry, ...]
    copies: dict[int, tuple[int, ...]] = msgspec.field(default_factory=dict)  # see PlaceCopies
    must_load: bool = False
    loads_trunk: bool = False
    disk_experts: tuple[int, ...] = ()
    disk_parts: tuple[tuple[int, tuple[int, ...]], ...] = ()


class Park(msgspec.Struct, frozen=True, tag=True):
    """(while loading) Map the scratch page everywhere: warm up without a device's memory."""


class PlaceCopies(msgspec.Struct, frozen=True, tag=True):
    """(to a frozen rank) These are the copies of experts now, those of all devices.

    What the rank has of them is mapped and loaded in its device's memory worker. The ranks compute
    different experts from then on, so they must all have done it before one of them runs.
    """

    placement: Placement
    copies: tuple[ExpertCopy, ...]


class Started(msgspec.Struct, frozen=True, tag=True):
    """The rank's event loop begins."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """What Attach asked to load is in memory."""

    num_disk_bytes: int


class Frozen(msgspec.Struct, frozen=True, tag=True):
    """The rank has stopped at a token boundary and waits for instructions."""

    sequences: tuple[KvSequence, ...]
    requests: tuple[RequestState, ...]
    num_kv_slots: int = 0  # in use; sequences that begin alike name some of them twice


class Detach(msgspec.Struct, frozen=True, tag=True):
    """Let go of all memory but the scratch page; forget KV and requests."""


class KvMove(msgspec.Struct, frozen=True):
    """Sequences whose KV lies on another device, to be copied from there.

    `by_bytes`: that device is on another node.
    """

    source_socket: str
    sequences: tuple[KvSequence, ...]
    by_bytes: bool = False


class Activate(msgspec.Struct, frozen=True, tag=True):
    """Take over KV in place, copy what lies elsewhere; `requests` will come, and go on."""

    sequences: tuple[KvSequence, ...]
    moves: tuple[KvMove, ...]
    requests: tuple[RequestState, ...]


class ResizeKv(msgspec.Struct, frozen=True, tag=True):
    """Another KV capacity, pages included. Shrinking is only said to a frozen rank."""

    num_tokens: int


class Run(msgspec.Struct, frozen=True, tag=True):
    """Leave the parking place."""


class Wake(msgspec.Struct, frozen=True, tag=True):
    """A request is on its way to some rank: do not sleep through it. Not answered."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Still there? Answered between two batches, and while parked."""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The rank's loop turns."""


class Exit(msgspec.Struct, frozen=True, tag=True):
    """End the process."""


class AdapterTable(msgspec.Struct, frozen=True, tag=True):
    """(rank to manager) The adapters in memory have changed."""

    adapters: tuple[AdapterEntry, ...]


class HeatReport(msgspec.Struct, frozen=True, tag=True):
    """(rank to manager) Layer id -> tokens by expert id, counted since the rank was attached."""

    tokens: dict[int, tuple[int, ...]]


class RankDone(msgspec.Struct, frozen=True, tag=True):
    """An instruction was carried out; `number` says which, so a late answer is no other's."""

    seconds: float = 0.0
    num_bytes: int = 0  # read from disk
    num_kept_slots: int = 0  # KV slots taken over where they lie
    num_copied_slots: int = 0  # KV slots copied: from another device, or further down
    number: int = 0  # messages that the rank had received, the instruction with them; 0: any


class Failed(msgspec.Struct, frozen=True, tag=True):
    """An instruction could not be carried out; the rank is as it was before."""

    error: str  # class name
    message: str
    number: int = 0  # as of RankDone


ToRank = Attach | Park | Detach | Activate | ResizeKv | PlaceCopies | Run | Wake | Ping | Exit


class Told(msgspec.Struct, frozen=True):
    """A message to a rank. Numbers rise from 1: one that is not newer than the last was doubled."""

    number: int
    message: ToRank


FromRank = (
    RankHello
    | Declared
    | Loaded
    | Started
    | Frozen
    | AdapterTable
    | HeatReport
    | RankDone
    | Failed
    | Pong
)
