"""Spares as the front sees them: processes that have imported all an engine needs, and copies.

    runtime.py --fill--> [SparePool] --start--> `python -m sgl_elastic.instance.spare_process`
    InstanceTable --start_instance--> [SparePool] --Become--> a spare --fork--> CopiedProcess
                                          '--> supervise.start, where there is no spare

A spare is not used up, so one is enough for any number of instances and ranks; a second one only
bridges the seconds in which a dead one is replaced. Which one is asked is a pure table (`Spares`).
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from sgl_elastic.errors import ElasticConfigError, EngineFailedError
from sgl_elastic.instance import engine_config, supervise
from sgl_elastic.instance.process import InstanceSpec
from sgl_elastic.instance.spare_messages import (
    TIMEOUT_S,
    Become,
    Born,
    Ended,
    FromSpare,
    Ready,
    Refused,
    WaitFor,
    spare_channel,
)
from sgl_elastic.instance.supervise import EngineSettings
from sgl_elastic.processes import CopiedProcess, LocalProcess, Process, giving_way

logger = logging.getLogger(__name__)

_MODULE = "sgl_elastic.instance.spare_process"
# One thread, or it cannot be copied: numpy's OpenBLAS starts the others when it is imported.
_OF_SPARES = {engine_config.SPARE: "1", "OMP_NUM_THREADS": "1"}
_START_S = 300.0
_NO_HURRY_S = 45.0  # as a standby's start (starting.py)
Answer = TypeVar("Answer", Ready, Born, Ended)


class SpareState(StrEnum):
    """What a spare is doing."""

    STARTING = "starting"  # it imports
    READY = "ready"  # it can be copied


@dataclass(frozen=True)
class Spares:
    """Spares by their process ids, the oldest first, and how many there should be. Pure."""

    wanted: int
    members: tuple[tuple[int, SpareState], ...] = ()

    def __post_init__(self) -> None:
        if self.wanted < 0:
            raise ElasticConfigError(f"{self.wanted} spares make no sense: use 0 for none")

    @property
    def num_missing(self) -> int:
        """How many are yet to be started."""
        return max(self.wanted - len(self.members), 0)

    def add(self, pid: int) -> Spares:
        """With one more, which starts."""
        return replace(self, members=(*self.members, (pid, SpareState.STARTING)))

    def note_ready(self, pid: int) -> Spares:
        """This one can be copied now; one that was dropped meanwhile stays away."""
        ready = (pid, SpareState.READY)
        return replace(self, members=tuple(ready if m[0] == pid else m for m in self.members))

    def drop(self, pid: int) -> Spares:
        """Without this one."""
        return replace(self, members=tuple(m for m in self.members if m[0] != pid))

    def choose(self) -> int | None:
        """The one to copy: the oldest that is ready, else the one that will be soonest."""
        return min(self.members, key=lambda m: m[1] is not SpareState.READY, default=(None,))[0]


@dataclass(frozen=True)
class SpareMemory:
    """A spare for people. Bytes as the operating system counts them, 0 when it is gone.

    `pss_bytes` shares each page among the processes that have it, `rss_bytes` does not.
    """

    pid: int
    state: SpareState
    pss_bytes: int
    rss_bytes: int


class Spare:
    """One process, and the way to it. Safe to use from any thread."""

    def __init__(self, environment: Mapping[str, str], module: str = _MODULE) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = LocalProcess(
                [sys.executable, "-m", module],
                stdin=theirs.fileno(),
                env={**os.environ, **environment, **_OF_SPARES},
                start_new_session=True,
            )
        self._channel = spare_channel(ours.detach(), FromSpare, "a spare")
        self._lock = threading.Lock()  # a channel is one thread's at a time
        self._is_ready = False

    def wait_until_ready(self) -> None:
        """Raises EngineFailedError when it ends before, or is late."""
        with self._lock:
            if not self._is_ready:
                self._expect(Ready, _START_S)
                self._is_ready = True

    def copy(self, spec: InstanceSpec, environment: Mapping[str, str]) -> CopiedProcess:
        """A copy that goes on as this instance's supervisor. Raises EngineFailedError."""
        self.wait_until_ready()
        with self._lock:
            self._channel.send(Become(spec.to_json(), dict(environment)))
            born, pidfd = self._expect(Born, TIMEOUT_S)
        return CopiedProcess(born.pid, pidfd, self._status_of)

    def end(self) -> None:
        """Kill it; its copies go on. Harmless a second time."""
        self.process.kill_group()
        with self._lock:
            self._channel.close()

    def _status_of(self, pid: int) -> int | None:
        with suppress(EngineFailedError, OSError), self._lock:
            self._channel.send(WaitFor(pid))
            return self._expect(Ended, TIMEOUT_S)[0].status
        return None  # nobody can tell any more

    def _expect(self, kind: type[Answer], timeout_s: float) -> tuple[Answer, int]:
        """The answer, and the descriptor that came with it, or -1."""
        message, fds = self._channel.receive(timeout_s)
        with fds:
            if isinstance(message, Refused):
                raise EngineFailedError(f"a spare cannot be copied: {message.reason}")
            if not isinstance(message, kind):
                name = type(message).__name__
                raise EngineFailedError(f"a spare sent {name}, not {kind.__name__}")
            return message, fds.take(0) if len(fds) else -1


class SparePool:
    """The spares of one server; `close` ends them. Safe to use from any thread.

    `environment` is what an instance of so many ranks has besides this process's; `on_lost` hears
    of each that has ended by itself.
    """

    def __init__(
        self,
        num_spares: int,
        environment: Callable[[int], Mapping[str, str]],
        on_lost: Callable[[], None] = lambda: None,
        start: Callable[[Mapping[str, str]], Spare] = Spare,
    ) -> None:
        self._table = Spares(num_spares)
        self._environment = environment
        self._on_lost = on_lost
        self._start = start
        self._spares: dict[int, Spare] = {}
        self._is_closed = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Start the first one, if any is wanted, and do not wait: a first instance will."""
        if self._table.num_missing:
            self._add()

    def fill(self, should_stop: Callable[[], bool]) -> None:
        """Start what is missing, one after the other, with time that nothing else wants.

        Raises EngineFailedError when one does not start.
        """
        for spare in list(self._spares.values()):
            self._await(spare)
        while self._table.num_missing and not should_stop():
            added = self._add()
            if added is None:
                return
            with giving_way(added.process, "when_idle", _NO_HURRY_S):
                self._await(added)

    def start_instance(
        self,
        settings: EngineSettings,
        name: str,
        device_ids: tuple[int, ...],
        more_argv: tuple[str, ...],
        /,
    ) -> Process:
        """All processes of an instance, from a spare if there is one. Raises EngineFailedError."""
        spec = supervise.spec_of(settings, name, device_ids, more_argv)
        own = settings.environment(len(device_ids))
        while (spare := self._choose()) is not None:
            try:
                return spare.copy(spec, {**os.environ, **own})
            except EngineFailedError as error:
                logger.warning("elastic: a spare is of no use: %s", error)
                self._drop(spare)
                self._on_lost()
        if self._is_closed:
            raise EngineFailedError(f"instance {name} is not started: the server ends")
        return supervise.start(spec, own)

    def seen(self) -> tuple[SpareMemory, ...]:
        """All of them, with what memory they have."""
        return tuple(SpareMemory(pid, state, *_memory(pid)) for pid, state in self._table.members)

    def close(self) -> None:
        """End all of them, and start no more. Harmless a second time."""
        with self._lock:
            self._is_closed = True
            spares = list(self._spares.values())
        for spare in spares:
            self._drop(spare)

    def _add(self) -> Spare | None:
        with self._lock:
            if self._is_closed:
                return None
            spare = self._start(self._environment(1))
            pid = spare.process.pid
            self._spares[pid] = spare
            self._table = self._table.add(pid)
        threading.Thread(
            target=self._watch, args=(spare,), name="elastic-spare", daemon=True
        ).start()
        logger.info("elastic: a spare starts, process %d", pid)
        return spare

    def _await(self, spare: Spare) -> None:
        try:
            spare.wait_until_ready()
        except EngineFailedError:
            self._drop(spare)
            raise
        with self._lock:
            self._table = self._table.note_ready(spare.process.pid)

    def _choose(self) -> Spare | None:
        """The best there is; one that still starts hurries."""
        with self._lock:
            pid = self._table.choose()
            spare = None if pid is None else self._spares[pid]
            is_starting = (pid, SpareState.STARTING) in self._table.members
        if spare is not None and is_starting:
            spare.process.give_way("foreground")
        return spare

    def _watch(self, spare: Spare) -> None:
        status = spare.process.wait()
        if self._drop(spare):
            logger.warning("elastic: a spare ended with %s: another one takes its place", status)
            self._on_lost()

    def _drop(self, spare: Spare) -> bool:
        """End it; False if somebody has."""
        with self._lock:
            was_there = self._spares.pop(spare.process.pid, None) is not None
            self._table = self._table.drop(spare.process.pid)
        spare.end()
        return was_there


def _memory(pid: int) -> tuple[int, int]:
    """PSS and RSS in bytes."""
    with suppress(OSError, ValueError, KeyError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return kib["Pss"] << 10, kib["Rss"] << 10
    return 0, 0
