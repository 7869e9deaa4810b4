"""What a memory worker is asked and what it answers.

    DeviceClient --> Asked(name, number, Request) --> worker --> Answered(number, Reply) --> client
                                              (Pages, Part: as many as `is_last` takes)

Each is a frozen, tagged Struct; other fields or types are WireErrors. `slots` maps names of regions
to runs (first, count) of slots. A request that cannot be done is answered by Failure, and then
changed nothing.

A client numbers its requests 1, 2, .. over all its connections, and an answer repeats the number of
its request, in each of its parts. An answer to an earlier request is late or doubled: the client
drops it. A request that comes again by the same connection is answered again, and not carried out
again; one with a number that its client has passed, by whatever connection, is refused
(request_fence.py).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from sgl_elastic.types import MemoryShape

Number = Annotated[int, msgspec.Meta(ge=1)]
ClientName = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Position = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
RunField = tuple[Position, Count]
SlotsField = dict[str, tuple[RunField, ...]]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Root of all requests and replies."""


class AskHello(Message, frozen=True):
    """Who are you?"""


class Define(Message, frozen=True):
    """These are the regions. The same shape a second time is fine, another one is not."""

    shape: MemoryShape


class MapSlots(Message, frozen=True):
    """Pages behind these slots, all or nothing; answered by the Slots that had none before."""

    slots: SlotsField


class UnmapSlots(Message, frozen=True):
    """Take them back; answered by the Slots that had pages before."""

    slots: SlotsField


class AskPages(Message, frozen=True):
    """The pages behind these slots. `must_be_loaded`: fail unless their content is valid."""

    slots: SlotsField
    must_be_loaded: bool = False


class AskBytes(Message, frozen=True):
    """The bytes of these slots, for a peer that cannot map their pages; answered in Parts."""

    slots: SlotsField
    must_be_loaded: bool = False


class AskScratch(Message, frozen=True):
    """The one page for engines that are parked."""


class MarkLoaded(Message, frozen=True):
    """The content of these (mapped) slots is valid, or, with `is_loaded` false, no longer."""

    slots: SlotsField
    is_loaded: bool = True


class CopyFrom(Message, frozen=True):
    """Copy slots from the worker at `socket_path`; answered by Copied.

    Slots that are loaded already are passed over. `verify`: compare digests afterwards.
    `by_bytes`: that worker is on another node, from where bytes come but no pages.
    """

    socket_path: str
    slots: SlotsField
    verify: bool = False
    by_bytes: bool = False


class AskUsage(Message, frozen=True):
    """What takes how much."""


class AskDigest(Message, frozen=True):
    """The digest of one slot's bytes."""

    region: str
    slot: Position


class AskExperts(Message, frozen=True):
    """Which slots of EXPERT regions have pages, and which of them valid content?"""


class Stop(Message, frozen=True):
    """Answer Done, then end the worker."""


class Done(Message, frozen=True):
    """It is done."""


class Failure(Message, frozen=True):
    """It could not be done: the class of sgl_elastic.errors, and what it says."""

    error: str
    text: str


class Hello(Message, frozen=True):
    """Who answers."""

    device_id: int
    pid: int
    backend: str
    page_bytes: int
    budget_pages: int


class Changed(Message, frozen=True):
    """The slots that the request changed."""

    slots: SlotsField


class Copied(Message, frozen=True):
    """The slots that were not loaded before, and how many bytes were copied into them.

    The bytes are counted call by call where they are copied, not from the slots' sizes.
    """

    slots: SlotsField
    num_bytes: Position


class PageRun(Message, frozen=True):
    """Consecutive page positions of a region: ids of the pages behind them, from `first` on."""

    region: str
    first: Position
    page_ids: tuple[int, ...]


class PageExport(Message, frozen=True):
    """How to import one page: the descriptor with this index (-1 = none), at `key`."""

    page_id: int
    key: int
    num_bytes: int
    fd_index: Annotated[int, msgspec.Meta(ge=-1)]


class Pages(Message, frozen=True):
    """Part of an answer. Exports are of pages that this connection has not been sent yet."""

    runs: tuple[PageRun, ...]
    exports: tuple[PageExport, ...]
    is_last: bool


class Part(Message, frozen=True):
    """Part of an answer: bytes of the slots' stream (memory/runs.py), from `position` on."""

    position: Position
    data: bytes
    is_last: bool


class Usage(Message, frozen=True):
    """A device's memory in use, in pages of `page_bytes`; by kind of region where it is a dict.

    `resident_bytes` is what the operating system says is behind all pages, free ones and the
    scratch page too; -1 where it cannot say. The scratch page counts in no other number.
    """

    device_id: int
    page_bytes: int
    budget_pages: int
    used_pages: int
    free_pages: int  # made once, in no region now; they stay, and are the next to be used
    peak_pages: int
    pages: dict[str, int]
    mapped_slots: dict[str, int]
    loaded_slots: dict[str, int]
    resident_bytes: int


class ExpertSlots(Message, frozen=True):
    """Slots of EXPERT regions that have pages; those of them with valid content."""

    mapped: SlotsField
    loaded: SlotsField


class Digest(Message, frozen=True):
    """xxh3 of 64 bits, in hexadecimal."""

    digest: str


Request = (
    AskHello
    | Define
    | MapSlots
    | UnmapSlots
    | AskPages
    | AskBytes
    | AskScratch
    | MarkLoaded
    | CopyFrom
    | AskUsage
    | AskDigest
    | AskExperts
    | Stop
)
Reply = Done | Failure | Hello | Changed | Copied | Pages | Part | Usage | Digest | ExpertSlots


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request; its number is greater than that of all earlier ones of this client.

    `client` is a name that no other client has, the same in all of its connections.
    """

    client: ClientName
    number: Number
    request: Request


class Answered(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An answer, or a part of one, and the number of the request that it belongs to."""

    number: Number
    reply: Reply


REQUESTS: msgspec.msgpack.Decoder[Asked] = msgspec.msgpack.Decoder(Asked)
REPLIES: msgspec.msgpack.Decoder[Answered] = msgspec.msgpack.Decoder(Answered)
