"""An instance as its manager holds it, and what the manager needs of others.

manager.py --> [Running] --> process (processes.py), links (links.py)
watch.py --> [Running.fault] --> why it counts as lost, or ""
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from sgl_elastic.errors import EngineFailedError
from sgl_elastic.instance import rank_messages as m
from sgl_elastic.instance.links import RankLink
from sgl_elastic.instance.state import Instance, InstanceState
from sgl_elastic.processes import Process
from sgl_elastic.types import Placement

_PINGS = 4  # in the time after which a silent rank counts as hung


class EngineLink(Protocol):
    """What reaches an instance by SGLang's own messages."""

    def connect(self, instance: str, input_ipc: str, wake: Callable[[], None]) -> None:
        """Open the way to an instance, before it starts. `wake` precedes a first request."""

    def disconnect(self, instance: str) -> None:
        """Close it."""

    def pause(self, instance: str) -> None:
        """All ranks stop at the same step, and park."""

    def warm_up(self, instance: str, num_ranks: int, timeout_s: float) -> None:
        """A short request on each rank; returns when they are answered."""

    def num_running(self) -> int:
        """Requests that have not been answered in full."""

    def lose(self, instance: str) -> None:
        """The instance is gone: nothing goes there any more, its requests wait."""

    def wait_for_outputs(self, num_sent: Mapping[str, int]) -> None:
        """Until so many tokens of each request came by. Raises EngineFailedError at a time-out."""

    def states(self) -> list[tuple[int, m.RequestState]]:
        """(rank, state) of each request that has tokens, as far as they came by."""


@dataclass(frozen=True)
class Timeouts:
    """How long the manager waits for what, in seconds."""

    start_s: float = 300.0
    step_s: float = 30.0  # any one instruction
    freeze_s: float = 5.0
    silent_s: float = 0.0  # carrying out an instruction, no rank hangs before this


@dataclass
class Running:
    """An instance and its processes. `lost` says why it is gone; "" while it is there.

    `placement` outlives the record's: a lost instance's replacement gets the same memory.
    """

    record: Instance
    process: Process
    links: list[RankLink] = field(default_factory=list)
    lost: str = ""
    placement: Placement | None = None
    stopped_since_s: float | None = None  # when the supervisor was first seen stopped
    is_waiting: bool = False  # attached, and not told to run since
    asked_s: float = 0.0  # when its ranks were last asked for a sign of life
    is_reading: bool = False  # its ranks read from disk, and say nothing meanwhile
    num_read: Mapping[int, int] = field(default_factory=dict)  # by device: bytes from disk

    def lose(self, reason: str) -> None:
        """End what is left of it; whoever waits for its ranks hears why."""
        self.lost, self.placement = reason, self.record.placement
        self.process.kill_group()
        for link in self.links:
            link.fail(f"instance {self.record.instance_id} is lost: {reason}")

    def fault(self, now_s: float, hang_s: float, silent_s: float) -> str:
        """Why it counts as lost at `now_s`, "" if it does not; asks its ranks for a sign of life.

        Its supervisor has ended, a rank's connection has, or either has done nothing for `hang_s`,
        or a rank that has an instruction for `silent_s` if that is longer.
        """
        status = self.process.poll()
        if status is not None:
            return f"its supervisor ended with {status}"
        if self.record.state is InstanceState.STARTING:
            return ""  # whoever starts it waits with deadlines
        gone = [f"{link.name}: {link.lost}" for link in self.links if link.lost]
        silent = [
            link.name
            for link in self.links
            if link.silent_s(now_s) > (max(hang_s, silent_s) if link.is_awaited else hang_s)
        ]
        if gone or silent:
            return gone[0] if gone else f"{silent[0]} has not answered for {hang_s:g} s"
        return self._stopped_too_long(now_s, hang_s) or self._ask(now_s, hang_s)

    def _stopped_too_long(self, now_s: float, hang_s: float) -> str:
        if not self.process.is_stopped():
            self.stopped_since_s = None
            return ""
        since_s = self.stopped_since_s = self.stopped_since_s or now_s
        return f"its supervisor is stopped for {hang_s:g} s" if now_s - since_s > hang_s else ""

    def _ask(self, now_s: float, hang_s: float) -> str:
        """All ranks at once: ranks of DP attention step together, also when they are idle."""
        if now_s - self.asked_s < hang_s / _PINGS:
            return ""
        self.asked_s = now_s
        try:
            for link in self.links:
                link.ping(now_s)
        except EngineFailedError as error:
            return str(error)
        return ""
