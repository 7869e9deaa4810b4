"""What may happen to an adapter, as a table: no clock, no file, no engine.

    command + situation --> [decide] --> what the library does

A situation is what the library knows of a name. A state (`AdapterState`) is what is told of it: a
loaded adapter is on the device or in the host cache, one on disk may have failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final


class AdapterState(Enum):
    """What a listing says."""

    ON_DISK = "on_disk"
    LOADING = "loading"
    IN_HOST_CACHE = "in_host_cache"
    ON_DEVICE = "on_device"
    DRAINING = "draining"
    FAILED = "failed"


class Situation(Enum):
    """What the library knows of a name."""

    ABSENT = "absent"  # nobody has said it, and it is not below the root
    ON_DISK = "on disk"  # a folder is known; nothing is loaded
    EVICTED = "evicted"  # it was loaded and left for another; asked for, it comes back
    LOADING = "loading"
    LOADED = "loaded"
    REPLACING = "being replaced"  # loaded, and a new version on its way
    LEAVING = "to be unloaded"  # a load or a replacement goes on; the unload is next
    DRAINING = "being unloaded"  # no new request finds it, old ones may still use it


class Command(Enum):
    """What is asked for."""

    LOAD = "load"
    REPLACE = "replace"
    PIN = "pin"  # or unpin
    UNLOAD = "unload"
    USE = "use"  # by a request for the model


class Action(Enum):
    """What the library does about a command."""

    START = "start"  # begin the work
    BRING_BACK = "bring back"  # load it, as the command says: what was evicted is still managed
    JOIN = "join"  # what is wanted is on its way: wait for it
    JOIN_IF_SAME = "join if same"  # as JOIN for the same folder, BUSY for another
    QUEUE = "queue"  # begin when what goes on has ended
    COMPARE = "compare"  # nothing if that content is loaded, AdapterExistsError if another is
    NOTHING = "nothing"  # it is so already
    FORGET = "forget"  # nothing is loaded; not loaded on demand any more
    UNKNOWN = "unknown"  # UnknownAdapterError
    NOT_LOADED = "not loaded"  # AdapterNotLoadedError
    BUSY = "busy"  # AdapterBusyError


_S, _A = Situation, Action

# A row for each situation; its actions stand in the order of the commands.
_ACTIONS: Final[Mapping[Situation, tuple[Action, ...]]] = {
    # LOAD, REPLACE, PIN, UNLOAD, USE
    _S.ABSENT: (_A.START, _A.UNKNOWN, _A.UNKNOWN, _A.UNKNOWN, _A.UNKNOWN),
    _S.ON_DISK: (_A.START, _A.NOT_LOADED, _A.NOT_LOADED, _A.FORGET, _A.START),
    _S.EVICTED: (_A.START, _A.BRING_BACK, _A.BRING_BACK, _A.FORGET, _A.START),
    _S.LOADING: (_A.JOIN_IF_SAME, _A.BUSY, _A.BUSY, _A.QUEUE, _A.JOIN),
    _S.LOADED: (_A.COMPARE, _A.START, _A.START, _A.START, _A.NOTHING),
    # The old version answers until the new one is there.
    _S.REPLACING: (_A.JOIN_IF_SAME, _A.JOIN_IF_SAME, _A.BUSY, _A.QUEUE, _A.NOTHING),
    _S.LEAVING: (_A.BUSY, _A.BUSY, _A.BUSY, _A.JOIN, _A.UNKNOWN),
    _S.DRAINING: (_A.BUSY, _A.BUSY, _A.BUSY, _A.JOIN, _A.UNKNOWN),
}


def decide(command: Command, situation: Situation) -> Action:
    """What to do about a command. Total: every pair has an answer."""
    return _ACTIONS[situation][list(Command).index(command)]
