"""What the process that serves HTTP asks of the ranks besides a plain load or unload.

    sglang_engine.py --[Command] as the path of SGLang's load message--> lora_manager.py, every rank
                     <--[Reply] as the answer's table of adapters--

SGLang sends a load message to all ranks, between the same two steps of each, and the elastic
runtime holds it back while a scale runs. Commands travel in it, so all of that is theirs too. A
client's path never gets there: it is resolved before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, TypeAlias

from sgl_esft import errors
from sgl_esft.errors import EsftError, InvariantError, RequestTimeoutError

PREFIX: Final = "esft-command:"
_REPLY: Final = "esft-reply"

Verb: TypeAlias = Literal["stage", "poll", "place", "drop", "report"]


@dataclass(frozen=True)
class RankCommand:
    """`stage`: read an adapter into host memory, in the background; `poll`: how far is that?

    `place`: copy the next piece into its slot; `drop`: forget what was staged; `report`: what is
    on the device. A load message without a command takes a staged adapter in.
    """

    verb: Verb
    adapter_id: str = ""
    name: str = ""
    path: str = ""
    pinned: bool = False
    number: int = 0  # of the message, repeated in its reply

    def encode(self) -> str:
        return PREFIX + json.dumps(asdict(self))


def is_command(path: str | None) -> bool:
    """Whether a load message's path is a command."""
    return path is not None and path.startswith(PREFIX)


def decode(path: str) -> RankCommand:
    """The command in a load message's path. Raises InvariantError for anything else."""
    try:
        return RankCommand(**json.loads(path.removeprefix(PREFIX)))
    except (TypeError, ValueError) as error:
        raise InvariantError(f"{path[:200]!r} is not a command: {error}") from error


@dataclass(frozen=True)
class StageState:
    """How far the ranks are with one adapter, all of them together."""

    num_bytes_read: int = 0
    num_bytes: int = 0  # on this machine's ranks; 0 = not known yet
    is_read: bool = False
    layers_placed: int = 0
    num_layers: int = 0  # to be placed; 0 = stays in host memory
    is_known: bool = True  # False: nothing is staged (any more)
    error: str = ""  # "NameError: message" of the first rank that failed


def merge_states(states: Sequence[StageState]) -> StageState:
    """All ranks' state: the sum of their bytes, the slowest's layers, the first error."""
    return StageState(
        num_bytes_read=sum(state.num_bytes_read for state in states),
        num_bytes=sum(state.num_bytes for state in states),
        is_read=all(state.is_read for state in states),
        layers_placed=min(state.layers_placed for state in states),
        num_layers=max(state.num_layers for state in states),
        is_known=all(state.is_known for state in states),
        error=next((state.error for state in states if state.error), ""),
    )


@dataclass(frozen=True)
class RankReport:
    """One rank's adapters and what its cache of adapter slots did."""

    rank: int
    num_slots: int
    is_resident: bool  # a loaded adapter keeps its slot
    slots: dict[str, tuple[int, int]] = field(default_factory=dict)  # id -> slot, mapped bytes
    num_hits: int = 0
    num_misses: int = 0
    num_evictions: int = 0


def reply_table(
    command: RankCommand, reply: dict[str, Any] | list[dict[str, Any]]
) -> dict[str, str]:
    """The reply to a command in the form of SGLang's table of loaded adapters."""
    return {_REPLY: json.dumps({"number": command.number, "reply": reply})}


def is_reply(table: dict[str, Any] | None) -> bool:
    """Whether a table of adapters is the answer to a command."""
    return bool(table) and _REPLY in (table or {})


def read_reply(table: dict[str, Any] | None, number: int) -> Any:
    """The reverse. Raises InvariantError when the rank did not take it for a command.

    Raises RequestTimeoutError for the reply to another one, whose sender has given up.
    """
    if not table or _REPLY not in table:
        raise InvariantError(f"a rank answered a command with {str(table)[:200]}")
    said = json.loads(table[_REPLY])
    if said["number"] != number:
        raise RequestTimeoutError("a rank answered an earlier command late: ask again")
    return said["reply"]


def named(error: EsftError) -> str:
    """An error as ranks report it: "NameError: message"."""
    return f"{type(error).__name__}: {error}"


def error_of(text: str) -> EsftError:
    """The error that a rank reported by `named`."""
    name, colon, message = text.partition(": ")
    kind = getattr(errors, name, None)
    if colon and isinstance(kind, type) and issubclass(kind, EsftError):
        return kind(message)
    return InvariantError(f"a rank failed: {text}")
