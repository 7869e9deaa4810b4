"""Which parts a strategy is made of, and which parts its ablations leave out.

ElasticOptions --> [make_memory, make_instances, make_coordinator] --> runtime.py

elastic             Hmm                Planner          InstanceManager  Coordinator
 no_shared_allocator StagedMemory
 no_peer_copy                           UncopiedPlanner  DiskInstances, which share memory
 no_standby                                              nothing is parked
 no_zero_copy                           CutOverPlanner   DiskInstances    CutOverCoordinator
cold_restart        Hmm                CutOverPlanner   DiskInstances    CutOverCoordinator
extravagant         Hmm                FreshPlanner     DiskInstances    Coordinator
colocated           Hmm, two a device  FreshPlanner     DiskInstances    Coordinator
horizontal          Hmm                ReplicaPlanner   ReplicatedInstances, ReplicaCoordinator
                                                        and a ReplicaRequestRouter
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sgl_elastic.baselines import plans
from sgl_elastic.baselines.cold_restart import CutOverCoordinator
from sgl_elastic.baselines.from_disk import DiskInstances
from sgl_elastic.baselines.horizontal import (
    ReplicaCoordinator,
    ReplicaPlanner,
    ReplicaRequestRouter,
    ReplicatedInstances,
)
from sgl_elastic.baselines.staged_memory import StagedMemory
from sgl_elastic.baselines.strategies import ScaleStrategy
from sgl_elastic.coordinator.coordinator import Coordinator
from sgl_elastic.coordinator.operations import Journal
from sgl_elastic.coordinator.planning import Planner
from sgl_elastic.coordinator.ports import Front
from sgl_elastic.front.router import RequestRouter
from sgl_elastic.instance.manager import EngineLink, EngineSettings, InstanceManager, Timeouts
from sgl_elastic.memory.control import Hmm
from sgl_elastic.options import ElasticOptions

if TYPE_CHECKING:
    from sgl_elastic.memory.worker_processes import Launcher
    from sgl_elastic.nodes.cluster import Cluster

_S = ScaleStrategy
_CHOICES = {
    _S.ELASTIC: plans.same_devices,
    _S.COLD_RESTART: plans.same_devices,
    _S.EXTRAVAGANT: plans.other_devices,
    _S.COLOCATED: plans.other_halves,
}


def make_cluster(options: ElasticOptions, directory: Path) -> Cluster | None:
    """The nodes of `--nodes ray`, with an agent on each; None on one machine.

    Raises ElasticConfigError, NodeLostError.
    """
    if not options.spans_nodes:
        return None
    from sgl_elastic.nodes import ray_agents  # only here does anything name Ray

    return ray_agents.start(
        directory,
        address=options.ray_address,
        num_devices=options.max_devices,
        devices_per_node=options.devices_per_node,
    )


def make_memory(
    options: ElasticOptions,
    directory: Path,
    backend: str,
    page_bytes: int,
    launcher: Launcher | None = None,
) -> Hmm:
    """The memory of all devices. Colocated: of each device two halves, each with a worker.

    The second half of device d is device d + max_devices; what a strategy that holds two copies
    may need is so set aside from the start, as the paper's baseline does. `launcher` says where the
    workers run, None = on this machine.
    """
    num_devices, num_bytes = options.max_devices, options.device_bytes
    if options.strategy is _S.COLOCATED:
        num_devices, num_bytes = 2 * num_devices, num_bytes // 2
    budgets = dict.fromkeys(range(num_devices), num_bytes)
    verify = options.verify_copies
    if options.ablation.shared_allocator:
        return Hmm(
            directory,
            budgets,
            backend=backend,
            page_bytes=page_bytes,
            verify_copies=verify,
            launcher=launcher,
        )
    return StagedMemory(
        directory,
        budgets,
        num_devices,
        backend=backend,
        page_bytes=page_bytes,
        verify_copies=verify,
    )


def place_engines(cluster: Cluster | None, settings: EngineSettings) -> EngineSettings:
    """The settings of instances, for where they run."""
    if cluster is None:
        return settings
    from sgl_elastic.nodes.engines import SpreadEngines

    return SpreadEngines(cluster, settings.directory).settings(settings)


def router_type_of(options: ElasticOptions) -> type[RequestRouter]:
    """The kind of router; all are made alike."""
    return ReplicaRequestRouter if options.strategy is _S.HORIZONTAL else RequestRouter


def make_instances(
    options: ElasticOptions, settings: EngineSettings, hmm: Hmm, engine_link: EngineLink
) -> InstanceManager:
    """The instance manager; from disk where the strategy or an ablation wants it."""
    parts = (settings, hmm, engine_link)
    standby_ranks, max_devices = options.standby_ranks, options.max_devices
    if isinstance(hmm, StagedMemory):
        hmm.add_staging()
    if options.strategy is _S.ELASTIC and options.ablation.peer_copy and not cuts_over(options):
        return InstanceManager(*parts, standby_ranks=standby_ranks, max_devices=max_devices)
    # Reading weights takes as long as it takes.
    timeouts = Timeouts(step_s=Timeouts.start_s, silent_s=Timeouts.start_s)
    if options.strategy is _S.HORIZONTAL:
        return ReplicatedInstances(
            *parts, timeouts=timeouts, standby_ranks=0, max_devices=max_devices
        )
    shares_memory = options.strategy is _S.ELASTIC and options.ablation.zero_copy
    return DiskInstances(
        *parts,
        shares_memory=shares_memory,
        timeouts=timeouts,
        standby_ranks=standby_ranks,
        max_devices=max_devices,
    )


def make_coordinator(
    options: ElasticOptions, hmm: Hmm, instances: InstanceManager, front: Front
) -> Coordinator:
    """The coordinator of the strategy, with its planner and journal."""
    journal = Journal(Path(options.journal) if options.journal else None)
    planner = _planner(options, hmm)
    if isinstance(instances, ReplicatedInstances) and isinstance(front, ReplicaRequestRouter):
        return ReplicaCoordinator(
            hmm, instances, front, planner.make_plan, planner.describe, journal
        )
    if isinstance(instances, DiskInstances) and cuts_over(options):
        return CutOverCoordinator(
            hmm, instances, front, planner.make_plan, planner.describe, journal
        )
    return Coordinator(hmm, instances, front, planner.make_plan, planner.describe, journal)


def cuts_over(options: ElasticOptions) -> bool:
    """Whether the old instance lets go of its memory before the new one has any."""
    return options.strategy is _S.COLD_RESTART or not options.ablation.zero_copy


def _planner(options: ElasticOptions, hmm: Hmm) -> Planner:
    limits = (hmm, options.max_devices, options.kv_limit)
    if options.strategy is _S.HORIZONTAL:
        return ReplicaPlanner(*limits)
    if options.strategy is _S.ELASTIC and not cuts_over(options):
        kind = Planner if options.ablation.peer_copy else plans.UncopiedPlanner
        return kind(*limits, headroom_pages=hmm.headroom_pages, node_of=hmm.node_name)
    other = plans.CutOverPlanner if cuts_over(options) else plans.FreshPlanner
    return other(*limits, options.strategy, _CHOICES[options.strategy])
