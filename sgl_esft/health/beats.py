"""Where loops beat. The hook is called on each turn of a scheduler's loop, idle or busy.

    Scheduler.ingest_requests --> [beat_rank] --> board
    detokenizer's receive --> [BeatingSocket] --> board

An idle scheduler sleeps for a second at most, an idle detokenizer here for half a one.
"""

from __future__ import annotations

from typing import Any

from sgl_esft import env
from sgl_esft.errors import InvariantError
from sgl_esft.health.board import DETOKENIZER, Board, Slot, rank_slot

_WAIT_MS = 500

_own: Slot | None = None


def beat_rank(scheduler: Any) -> None:
    """The loop of this process's rank has turned."""
    global _own
    if _own is None:
        from sgl_esft import sglang_api

        _own = slot_of(rank_slot(sglang_api.rank_in_server()))
    _own.beat()


def slot_of(index: int) -> Slot:
    """This process's slot on the board that the front made. Raises InvariantError."""
    path = env.health_board()
    if path is None:
        raise InvariantError(f"{env.HEALTH_BOARD} is not set, and there is a hook that needs it")
    return Board.open(path).slot(index)


class BeatingSocket:
    """A zmq socket whose `recv` beats while it waits. Everything else is the socket's."""

    def __init__(self, socket: Any, slot: Slot | None = None) -> None:
        self._socket = socket
        self._slot = slot or slot_of(DETOKENIZER)
        self._slot.beat()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recv(self, flags: int = 0) -> Any:
        self._wait(flags)
        return self._socket.recv(flags)

    def recv_pyobj(self, flags: int = 0) -> Any:
        """Where SGLang is told to use pickle between its processes."""
        self._wait(flags)
        return self._socket.recv_pyobj(flags)

    def _wait(self, flags: int) -> None:
        self._slot.beat()
        while not flags and not self._socket.poll(_WAIT_MS):
            self._slot.beat()
