"""Which parts a strategy is made of, and which parts its ablations leave out.

ElasticOptions --> [make_memory, make_router, make_instances, make_coordinator] --> runtime.py

                     plan             is carried out by  instances        besides
elastic              Planner          scale              InstanceManager
 no_shared_allocator                                                      StagedMemory
 no_peer_copy        without_copies                      with DiskAttach, which share memory
 no_standby                                              nothing is parked
 no_zero_copy        FreshPlanner     cold_restart       with DiskAttach
cold_restart         FreshPlanner     cold_restart       with DiskAttach
extravagant          FreshPlanner     side_by_side       with DiskAttach
colocated            FreshPlanner     side_by_side       with DiskAttach  two workers a device
horizontal           ReplicaPlanner   HorizontalScale    Replicas         ReplicaRouter
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_elastic.autoscale.slo import SloWindow
from sgl_elastic.baselines import plans
from sgl_elastic.baselines.from_disk import DiskAttach
from sgl_elastic.baselines.horizontal import (
    HorizontalScale,
    ReplicaPlanner,
    ReplicaRouter,
    Replicas,
)
from sgl_elastic.baselines.restarts import cold_restart, side_by_side
from sgl_elastic.baselines.strategies import ScaleStrategy
from sgl_elastic.coordinator.coordinator import Coordinator, MakePlan
from sgl_elastic.coordinator.expert_copies import RedundantExperts
from sgl_elastic.coordinator.operations import Journal
from sgl_elastic.coordinator.planning import Planner
from sgl_elastic.coordinator.ports import Memory, Wire
from sgl_elastic.coordinator.recovery import Watched
from sgl_elastic.coordinator.scale import CarryOut, scale
from sgl_elastic.front.rank_choice import RankPolicy
from sgl_elastic.front.router import RequestRouter
from sgl_elastic.instance.manager import InstanceManager
from sgl_elastic.instance.running import EngineLink, Timeouts
from sgl_elastic.instance.spares import SparePool
from sgl_elastic.instance.supervise import EngineSettings
from sgl_elastic.memory.control import Hmm
from sgl_elastic.memory.copied_experts import CopiedExperts
from sgl_elastic.options import ElasticOptions
from sgl_elastic.plan.redundancy import most_per_device
from sgl_elastic.types import Placement
from sgl_esft.lifecycle.folders import fingerprint

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
    num_workers, num_bytes = options.max_devices, options.device_bytes
    if options.strategy is _S.COLOCATED:
        num_workers, num_bytes = 2 * num_workers, num_bytes // 2
    if not options.ablation.shared_allocator:
        num_workers *= 2  # of each device one that stages
    return Hmm(
        directory,
        dict.fromkeys(range(num_workers), num_bytes),
        backend=backend,
        page_bytes=page_bytes,
        verify_copies=options.verify_copies,
        launcher=launcher,
        content_of=fingerprint,
        num_copies=most_per_device(options.redundant_experts),
    )


def make_spares(
    options: ElasticOptions,
    backend: str,
    environment: Callable[[int], Mapping[str, str]],
    on_lost: Callable[[], None],
) -> SparePool:
    """What instances on this machine begin as copies of; empty where there are to be none."""
    return SparePool(options.spares_on(backend), environment, on_lost)


def place_engines(
    cluster: Cluster | None, spares: SparePool, settings: EngineSettings
) -> EngineSettings:
    """The settings of instances, for where they run and how they start there."""
    if cluster is None:
        return replace(settings, start=spares.start_instance)
    from sgl_elastic.nodes.engines import SpreadEngines

    return SpreadEngines(cluster, settings.directory).settings(settings)


def make_router(
    options: ElasticOptions, wire: Wire, policy: RankPolicy, window: SloWindow
) -> RequestRouter | ReplicaRouter:
    """Where requests wait or go."""

    def make() -> RequestRouter:
        return RequestRouter(wire, window, policy=policy)

    return ReplicaRouter(wire, make, window) if options.strategy is _S.HORIZONTAL else make()


def make_instances(
    options: ElasticOptions, settings: EngineSettings, hmm: Hmm, engine_link: EngineLink
) -> InstanceManager:
    """The instance manager; from disk where the strategy or an ablation wants it."""
    make = partial(
        InstanceManager,
        settings,
        hmm,
        engine_link,
        standby_ranks=options.standby_ranks,
        max_devices=options.max_devices,
    )
    if options.strategy is _S.ELASTIC and options.ablation.peer_copy and not cuts_over(options):
        return make()

    def present() -> Placement:
        return manager.serving()[1]

    shares_memory = options.strategy is _S.ELASTIC and options.ablation.zero_copy
    manager = make(
        attach_messages=DiskAttach(present if shares_memory else None),
        # Reading weights takes as long as it takes.
        timeouts=Timeouts(step_s=Timeouts.start_s, silent_s=Timeouts.start_s),
    )
    return manager


def make_coordinator(
    options: ElasticOptions,
    hmm: Hmm,
    manager: InstanceManager,
    router: RequestRouter | ReplicaRouter,
) -> tuple[Coordinator, Watched]:
    """The coordinator of the strategy, and what its watchdog is to watch."""
    journal = Journal(Path(options.journal) if options.journal else None)
    make_plan, planner = make_planner(options, hmm)
    if isinstance(router, ReplicaRouter):
        replicas, carry_out = Replicas(manager), HorizontalScale(router)
        horizontal = Coordinator(
            hmm, replicas, router, make_plan, planner.describe, journal, carry_out=carry_out
        )
        return horizontal, replicas
    memory: Memory = hmm
    if not options.ablation.shared_allocator:
        memory = staged = plans.StagedMemory(hmm, options.max_devices)
        staged.add_staging()
    way, describe = way_of(options), planner.describe
    recovers = options.strategy is _S.ELASTIC and memory is hmm and not cuts_over(options)
    coordinator = Coordinator(
        memory,
        manager,
        router,
        make_plan,
        describe,
        journal,
        carry_out=way,
        make_loss_plan=planner.make_loss_plan if recovers else None,
        redundancy=make_redundancy(options, hmm, manager),
    )
    return coordinator, manager


def make_redundancy(
    options: ElasticOptions, hmm: Hmm, manager: InstanceManager
) -> RedundantExperts | None:
    """Copies of experts; None where there are to be none."""
    num_copies = options.redundant_experts
    if not num_copies:
        return None
    memory = CopiedExperts(hmm, most_per_device(num_copies), verify=options.verify_copies)
    return RedundantExperts(num_copies, memory, manager)


def way_of(options: ElasticOptions) -> CarryOut:
    """How plans are carried out where one instance serves."""
    if cuts_over(options):
        return cold_restart
    return scale if options.strategy is _S.ELASTIC else side_by_side


def cuts_over(options: ElasticOptions) -> bool:
    """Whether the old instance lets go of its memory before the new one has any."""
    return options.strategy is _S.COLD_RESTART or not options.ablation.zero_copy


def make_planner(options: ElasticOptions, hmm: Hmm) -> tuple[MakePlan, Planner]:
    """What makes the strategy's plans, and what describes them."""
    limits = (hmm, options.max_devices, options.kv_limit)
    planner = Planner(*limits, headroom_pages=hmm.headroom_pages, node_of=hmm.node_name)
    if options.strategy is _S.HORIZONTAL:
        return ReplicaPlanner(hmm, options.max_devices).make_plan, planner
    if options.strategy is _S.ELASTIC and not cuts_over(options):
        copies = options.ablation.peer_copy
        return planner.make_plan if copies else plans.without_copies(planner.make_plan), planner
    choose, cuts = _CHOICES[options.strategy], cuts_over(options)
    fresh = plans.FreshPlanner(*limits, options.strategy, choose, removes_first=cuts)
    return fresh.make_plan, planner
