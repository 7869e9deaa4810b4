"""All nodes of one server: which device is where, and how sockets are found from there.

    Hmm --start, socket_path--> [Cluster] --> Node of the device --> its agent
    engines.py --node_of, expose-->  '--> tunnels: of this process, and between all nodes

Devices are numbered over the nodes in order, so many a node. The front is on no node: what it
needs of the nodes, and they of it, comes by tunnels even where it shares a machine with one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from sgl_elastic.errors import ElasticConfigError, NodeLostError
from sgl_elastic.memory.worker_processes import socket_name
from sgl_elastic.nodes.remote import BeatState, Node
from sgl_elastic.nodes.tunnel import Tunnels
from sgl_elastic.processes import Process

logger = logging.getLogger(__name__)

_RANKS = "ranks.sock"  # where the front's instance manager listens


class Cluster:
    """`Launcher` of memory/worker_processes.py. `directory` has the front's sockets.

    Owns `nodes` and `tunnels`: `close` ends them.
    """

    def __init__(
        self, nodes: Sequence[Node], devices_per_node: int, tunnels: Tunnels, directory: Path
    ) -> None:
        self.nodes = tuple(nodes)
        self._devices_per_node = devices_per_node
        self._tunnels = tunnels
        self._directory = directory
        self._on_beats: Callable[[Sequence[BeatState]], None] = lambda beats: None
        for index, node in enumerate(self.nodes):
            first = index * devices_per_node
            for device_id in range(first, first + devices_per_node):
                self._offer_device(node, device_id)
            self._lead_to_front(node, _RANKS)
        tunnels.offer(_RANKS, directory / _RANKS)
        for node in self.nodes:
            node.watch(self._note_beats)

    def node_of(self, device_id: int) -> Node:
        """Where a device is. Raises ElasticConfigError for one that is nowhere."""
        index = device_id // self._devices_per_node
        if not 0 <= index < len(self.nodes):
            raise ElasticConfigError(
                f"device {device_id} is on no node: there are {len(self.nodes)} of "
                f"{self._devices_per_node} devices"
            )
        return self.nodes[index]

    def on_beats(self, listener: Callable[[Sequence[BeatState]], None]) -> None:
        """Hear when the loops of ranks have turned."""
        self._on_beats = listener

    # ---- memory workers ----

    def start(self, device_id: int, argv: Sequence[str]) -> Process:
        node = self.node_of(device_id)
        return node.process(node.call("start_worker", device_id, list(argv)))

    def socket_path(self, device_id: int, seen_from: int | None = None) -> Path:
        at = self._directory if seen_from is None else self.node_of(seen_from).directory
        return at / socket_name(device_id)

    def node_name(self, device_id: int) -> str:
        return self.node_of(device_id).name

    def are_apart(self, one: int, other: int) -> bool:
        return self.node_of(one) is not self.node_of(other)

    def clean(self, device_id: int) -> None:
        with contextlib.suppress(NodeLostError):  # its folder goes with the next agent's start
            self.node_of(device_id).call("clean_worker", device_id)

    # ---- sockets ----

    def expose(self, name: str, path: Path, node: Node) -> None:
        """The front's socket at `path` is there for processes of the node, by this name."""
        self._tunnels.offer(name, path)
        self._lead_to_front(node, name)

    def withdraw(self, name: str) -> None:
        """No new connections to what `expose` named."""
        self._tunnels.withdraw(name)

    def close(self) -> None:
        """End all that runs on the nodes, and the agents. Harmless a second time."""
        for node in self.nodes:
            node.close()
        self._tunnels.close()

    def _note_beats(self, beats: Sequence[BeatState]) -> None:
        self._on_beats(beats)

    def _offer_device(self, owner: Node, device_id: int) -> None:
        name = socket_name(device_id)
        owner.call("offer", name)
        self._tunnels.open(self._directory / name, name, owner.address)
        for node in self.nodes:
            if node is not owner:
                node.call("lead", name, *owner.address)

    def _lead_to_front(self, node: Node, name: str) -> None:
        node.call("lead", name, *self._tunnels.address)
