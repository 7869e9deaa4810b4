"""Ray, which puts an agent on each node. The only file that names it.

    address --[connect]--> nodes of the cluster, in order --[place]--> an agent on each, pinned

Ray is an optional package, imported when it is asked for. Only strings and numbers go through it,
public keys and certificates among them; no private key does, nor weights and requests (tunnel.py).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_elastic.errors import (
    ElasticConfigError,
    ElasticError,
    ElasticInternalError,
    NodeLostError,
)
from sgl_elastic.nodes.agent import NodeAgent
from sgl_elastic.nodes.certificates import Authority, own_identity
from sgl_elastic.nodes.cluster import Cluster
from sgl_elastic.nodes.remote import Node
from sgl_elastic.nodes.tunnel import Tunnels

START_S = 120.0  # for an agent: Ray may have to start a process for it
_THREADS = 16  # of an agent: one call that waits for a process delays no other


@dataclass(frozen=True)
class Place:
    """A node as Ray knows it."""

    node_id: str
    address: str


@dataclass(frozen=True)
class RayAgent:
    """`Agent` of remote.py."""

    ray: Any
    handle: Any

    def call(self, method: str, arguments: Sequence[Any], timeout_s: float) -> Any:
        errors = self.ray.exceptions
        try:
            asked = getattr(self.handle, method).remote(*arguments)
            return self.ray.get(asked, timeout=timeout_s)
        except errors.GetTimeoutError as error:
            raise NodeLostError(f"its agent has not answered for {timeout_s:g} s") from error
        except errors.RayTaskError as error:
            raise _cause_of(error, method) from error
        except errors.RayError as error:
            raise NodeLostError(f"its agent has ended: {_first_line(error)}") from error

    def end(self) -> None:
        with contextlib.suppress(self.ray.exceptions.RayError, ValueError):
            self.ray.kill(self.handle)


def start(directory: Path, *, address: str, num_devices: int, devices_per_node: int) -> Cluster:
    """Join the Ray cluster and put an agent on as many nodes as the devices need.

    `address` "" = the cluster that runs on this machine. Raises ElasticConfigError without Ray,
    without a cluster, or with too few nodes; NodeLostError when an agent does not start.
    """
    ray = _ray()
    _join(ray, address)
    own_address = ray.util.get_node_ip_address()
    num_nodes = -(-num_devices // devices_per_node)
    places = choose(_places(ray), own_address, num_nodes, devices_per_node)
    authority = Authority()
    tunnels = Tunnels(own_identity(authority, own_address), own_address)
    nodes: list[Node] = []
    try:
        for number, place in enumerate(places):
            agent = _start_agent(ray, place)
            name = f"node {number} ({place.address})"
            nodes.append(Node(name, place.address, agent, authority))
        return Cluster(nodes, devices_per_node, tunnels, directory)
    except ElasticError:
        for node in nodes:
            node.close()
        tunnels.close()
        raise


def choose(
    places: Sequence[Place], own_address: str, num_nodes: int, devices_per_node: int
) -> list[Place]:
    """The nodes to use, this machine's first. Raises ElasticConfigError for too few. Pure."""
    if len(places) < num_nodes:
        raise ElasticConfigError(
            f"the Ray cluster has {len(places)} nodes; --max-devices needs {num_nodes} of "
            f"{devices_per_node} devices: add nodes, or raise --devices-per-node"
        )
    in_order = sorted(places, key=lambda p: (p.address != own_address, p.address, p.node_id))
    return in_order[:num_nodes]


def _ray() -> Any:
    try:
        import ray
        import ray.exceptions
        import ray.util
    except ImportError as error:
        raise ElasticConfigError(
            "--nodes ray needs Ray, which is not installed: pip install sgl-esft[ray]"
        ) from error
    return ray


def _join(ray: Any, address: str) -> None:
    if ray.is_initialized():
        return
    try:
        with _own_signals():
            ray.init(
                address=address or "auto",
                namespace=f"sgl-elastic-{os.getpid()}-{secrets.token_hex(4)}",
                logging_level="warning",
            )
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise ElasticConfigError(
            f"no Ray cluster at {address or 'this machine'}: {_first_line(error)}; start one by "
            "`ray start --head`, or name it by --ray-address"
        ) from error


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """How this process ends is its own matter: Ray's handler of SIGTERM is taken away again."""
    try:
        handler = signal.getsignal(signal.SIGTERM)
        yield
    finally:
        with contextlib.suppress(ValueError):  # not in the main thread, where Ray sets none
            signal.signal(signal.SIGTERM, handler)


def _places(ray: Any) -> list[Place]:
    return [
        Place(str(node["NodeID"]), str(node["NodeManagerAddress"]))
        for node in ray.nodes()
        if node["Alive"]
    ]


def _start_agent(ray: Any, place: Place) -> RayAgent:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    pinned = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
    handle = (
        ray.remote(NodeAgent)
        .options(
            num_cpus=0,
            max_restarts=0,
            max_concurrency=_THREADS,
            scheduling_strategy=pinned,
        )
        .remote(place.address)
    )
    agent = RayAgent(ray, handle)
    agent.call("public_key", (), START_S)
    return agent


def _cause_of(error: Any, method: str) -> ElasticError:
    """An agent's own error, as it was raised there."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, ElasticError):
        return type(cause)(str(cause))
    return ElasticInternalError(f"an agent failed at {method}: {cause or _first_line(error)}")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
