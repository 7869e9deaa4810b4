"""A Ray cluster of several nodes on this machine, for tests: Ray's own utility, as a context."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

STORE_BYTES = 80 << 20  # of a node's object store, which we do not use


@contextmanager
def ray_cluster(num_nodes: int) -> Iterator[str]:
    """Its address. Every node is a set of processes with an id of its own, and all share one IP."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray.cluster_utils import Cluster

    sizes = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**sizes, "include_dashboard": False})
    try:
        for _ in range(num_nodes - 1):
            cluster.add_node(**sizes)
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()
