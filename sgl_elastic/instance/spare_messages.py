"""What the front and a spare say to each other; the spare's end of a socket pair is its stdin.

spares.py --Become, WaitFor--> spare_process.py --Ready, Born, Ended, Refused--> spares.py
"""

from __future__ import annotations

import socket
from typing import Any, TypeAlias, TypeVar

import msgspec

from sgl_elastic import wire
from sgl_elastic.errors import EngineFailedError

TIMEOUT_S = 10.0  # to be copied, or to tell how a copy has ended: milliseconds on an idle machine


class Become(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Make a copy that goes on as this instance's supervisor."""

    spec: str  # InstanceSpec as JSON
    environment: dict[str, str]  # all of it


class WaitFor(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """How has this copy ended?"""

    pid: int


class Ready(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Everything is imported, and every hook is in place."""


class Born(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The copy, the leader of a process group; its pidfd comes along."""

    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """`status` as subprocess's `returncode`."""

    status: int


class Refused(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """There is no copy."""

    reason: str


ToSpare: TypeAlias = Become | WaitFor
FromSpare: TypeAlias = Ready | Born | Ended | Refused
Heard = TypeVar("Heard")
SpareChannel: TypeAlias = wire.Channel[Heard]


def spare_channel(descriptor: int, may_arrive: Any, peer: str) -> wire.Channel[Any]:
    """One end of the socket pair; the descriptor is its own from now on."""
    return wire.Channel(
        socket.socket(fileno=descriptor),
        msgspec.msgpack.Decoder(may_arrive),
        peer=peer,
        failure=EngineFailedError,
        timeout_s=TIMEOUT_S,
    )
