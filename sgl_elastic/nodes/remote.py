"""A node and its processes, as the front sees them.

    Cluster --> [Node] --call--> agent there      states, every 0.1 s --> poll(), is_stopped()
       authority --'  '--> [RemoteProcess], which has the face of a local one

A node whose agent has ended, or has not answered for SILENT_S, is lost for good: all its processes
count as killed, because they end with their agent, or cannot be told any more from ended ones.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sgl_elastic.errors import ElasticError, NodeLostError
from sgl_elastic.nodes.certificates import Authority

logger = logging.getLogger(__name__)

SILENT_S = 20.0  # for one answer of an agent
PERIOD_S = 0.1  # between two looks at a node's processes
_POLL_S = 0.02


class Agent(Protocol):
    """How an agent is called; ray_agents.py has the real one."""

    def call(self, method: str, arguments: Sequence[Any], timeout_s: float) -> Any:
        """What the method answers. Raises NodeLostError, or the agent's own error."""

    def end(self) -> None:
        """The agent ends at once, and its children with it; harmless when it has ended."""


class Node:
    """One node of the cluster, found at `host`. Safe to use from any thread.

    Raises NodeLostError when its agent does not take the certificate that it is given: nothing
    leads to a node without one.
    """

    def __init__(self, name: str, host: str, agent: Agent, authority: Authority) -> None:
        self.name = name
        self._agent = agent
        self._lost = ""
        self._states: dict[int, ProcessState] = {}
        self._stopping = threading.Event()
        directory, gateway, port = self._admit(host, authority)
        self.directory, self.address = Path(directory), (str(gateway), int(port))

    @property
    def lost(self) -> str:
        """Why the node is gone; "" while it is there."""
        return self._lost

    def call(self, method: str, *arguments: Any) -> Any:
        """Ask the agent. Raises NodeLostError when it is gone, and its own errors."""
        if self._lost:
            raise NodeLostError(self._lost)
        try:
            return self._agent.call(method, arguments, SILENT_S)
        except NodeLostError as error:
            self._lose(str(error))
            raise NodeLostError(self._lost) from error

    def watch(self, on_beats: Callable[[Sequence[BeatState]], None]) -> None:
        """From now on look at the node's processes, until `close`."""
        threading.Thread(
            target=self._watch, args=(on_beats,), name=f"elastic-{self.name}", daemon=True
        ).start()

    def process(self, started: tuple[int, int]) -> RemoteProcess:
        """What `start_worker` or `start_supervisor` of the agent has answered."""
        return RemoteProcess(self, *started)

    def state_of(self, number: int) -> ProcessState:
        """As it was last seen."""
        if self._lost:
            return -signal.SIGKILL, False
        return self._states.get(number, (None, False))

    def close(self) -> None:
        """End the agent and all that it started. Harmless a second time."""
        self._stopping.set()
        with contextlib.suppress(NodeLostError):
            self.call("close")
        self._agent.end()
        self._lost = self._lost or f"{self.name} was closed"

    def _admit(self, host: str, authority: Authority) -> tuple[str, str, int]:
        """Sign its key; where it is then found."""
        try:
            certificate = authority.sign(str(self.call("public_key")), host)
            found: tuple[str, str, int] = self.call("join", certificate, authority.certificate)
            return found
        except ElasticError as error:
            self._agent.end()
            raise NodeLostError(
                f"{self.name} has no certificate, so it is refused: {error}"
            ) from error

    def _watch(self, on_beats: Callable[[Sequence[BeatState]], None]) -> None:
        while not self._stopping.wait(PERIOD_S):
            try:
                states: NodeStates = self.call("states")
            except ElasticError as error:
                self._lose(str(error))
                return
            self._states, beats = states
            on_beats(beats)

    def _lose(self, reason: str) -> None:
        if self._lost:
            return
        self._lost = f"{self.name} is lost: {reason}; restart the server when it is back"
        if not self._stopping.is_set():
            logger.error("elastic: %s", self._lost)
            self._agent.end()  # should it come back, its processes must not


@dataclass(eq=False)
class RemoteProcess:
    """`Process` of sgl_elastic/processes.py, a child of a node's agent."""

    node: Node
    number: int
    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.node.state_of(self.number)[0]
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        began = time.monotonic()
        while (status := self.poll()) is None:
            if timeout is not None and time.monotonic() - began >= timeout:
                raise subprocess.TimeoutExpired(f"process {self.pid} of {self.node.name}", timeout)
            time.sleep(_POLL_S)
        return status

    def terminate(self) -> None:
        self._end("terminate")

    def kill(self) -> None:
        self._end("kill")

    def kill_group(self) -> None:
        self._end("kill_group")
        self.wait()

    def is_stopped(self) -> bool:
        return self.node.state_of(self.number)[1]

    def give_way(self, how: str, at_most_s: float = 0.0) -> None:
        with contextlib.suppress(NodeLostError):
            self.node.call("give_way", self.number, how, at_most_s)

    def _end(self, how: str) -> None:
        """Harmless on a node that is lost: there it has ended."""
        with contextlib.suppress(NodeLostError):
            status = self.node.call("end", self.number, how)
            if status is not None:
                self.returncode = status


# What an agent says of its node: plain values, which travel by Ray. Pure.

ProcessState = tuple[int | None, bool]  # how it ended (None: it runs), whether it is stopped
BeatState = tuple[str, int, float, int]  # instance, rank, seconds since its loop turned, process id
NodeStates = tuple[dict[int, ProcessState], list[BeatState]]
