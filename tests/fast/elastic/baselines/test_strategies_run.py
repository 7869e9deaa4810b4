"""The paper's baselines over fakes: what is done in which order, and what a failure leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_elastic import assembly, options
from sgl_elastic.baselines import from_disk, plans
from sgl_elastic.baselines.cold_restart import CutOverCoordinator
from sgl_elastic.baselines.staged_memory import StagedMemory
from sgl_elastic.baselines.strategies import (
    PROGRESSION,
    AblationSwitches,
    ScaleStrategy,
    parse_switches,
)
from sgl_elastic.coordinator.coordinator import Coordinator, RetryPolicy
from sgl_elastic.coordinator.operations import Operation
from sgl_elastic.coordinator.planning import Planner
from sgl_elastic.errors import BadScaleError, DoesNotFitError, ElasticConfigError
from sgl_elastic.instance import rank_messages as m
from sgl_elastic.instance.handover import attach_messages, hand_over
from sgl_elastic.instance.state import InstanceState
from sgl_elastic.plan.planner import placement_at_switch
from sgl_elastic.types import OperationState, Placement, Plan, ScaleRequest, Step, StepKind
from tests.fast.elastic import memory_workers
from tests.fast.elastic.scale_fakes import OLD, Ticks, World, always

S = ScaleStrategy
ONE = Placement((0,), (0,) * 6, (100,))
WAIT_S = 10.0


def request(dp_size: int, *device_ids: int, leave: tuple[int, ...] = ()) -> ScaleRequest:
    return ScaleRequest(dp_size, device_ids, leave)


def fresh(strategy: ScaleStrategy, max_devices: int, world: World | None = None) -> Planner:
    kind = plans.CutOverPlanner if strategy is S.COLD_RESTART else plans.FreshPlanner
    choose = assembly._CHOICES[strategy]
    return kind(world or World(), max_devices, None, strategy, choose)


def kinds(steps: tuple[Step, ...]) -> list[tuple[StepKind, int]]:
    return [(step.kind, step.device_id) for step in steps]


def everything(device_id: int) -> list[tuple[StepKind, int]]:
    names = (StepKind.ADD_DEVICE, StepKind.MAP_TRUNK, StepKind.MAP_EXPERTS, StepKind.MAP_KV)
    return [(kind, device_id) for kind in names]


# ---- plans ----


def test_extravagant_takes_other_devices_and_removes_the_old_ones_last() -> None:
    made = fresh(S.EXTRAVAGANT, 5).make_plan(request(3), OLD)
    assert made.new.device_ids == (2, 3, 4)
    assert kinds(made.before) == [*everything(2), *everything(3), *everything(4)]
    removed = [(StepKind.REMOVE_DEVICE, 0), (StepKind.REMOVE_DEVICE, 1)]
    assert kinds(made.after) == removed
    assert made.copied_bytes == 0
    assert placement_at_switch(made) == made.new
    assert made.kv_moves == {0: 2, 1: 3}


def test_extravagant_needs_free_devices() -> None:
    planner = fresh(S.EXTRAVAGANT, 5)
    with pytest.raises(BadScaleError, match="needs 6 devices"):
        planner.make_plan(request(4), OLD)
    with pytest.raises(BadScaleError, match="that are free"):
        planner.make_plan(request(2, 1, 2), OLD)
    assert planner.make_plan(request(2, 4, 2), OLD).new.device_ids == (2, 4)


def test_colocated_goes_from_one_half_of_each_device_to_the_other() -> None:
    planner = fresh(S.COLOCATED, 4)
    up = planner.make_plan(request(3), OLD)
    assert up.new.device_ids == (4, 5, 6)
    back = planner.make_plan(request(1), up.new)
    assert back.new.device_ids == (0,)
    assert back.kv_moves == {4: 0, 5: 0, 6: 0}


def test_a_cold_restart_removes_all_before_it_maps_anything() -> None:
    made = fresh(S.COLD_RESTART, 4).make_plan(request(1), OLD)
    assert made.before == ()
    gone = [(StepKind.REMOVE_DEVICE, 0), (StepKind.REMOVE_DEVICE, 1)]
    assert kinds(made.after) == [*gone, *everything(0)]
    assert made.new.experts_of(0) == tuple(range(6))


@pytest.mark.parametrize("strategy", [S.EXTRAVAGANT, S.COLOCATED, S.COLD_RESTART])
def test_the_present_size_is_nothing_to_do(strategy: ScaleStrategy) -> None:
    made = fresh(strategy, 4).make_plan(request(2), OLD)
    assert (made.old, made.new, made.before, made.after) == (OLD, OLD, (), ())


def test_leave_means_nothing_where_all_leave() -> None:
    with pytest.raises(BadScaleError, match="leave"):
        fresh(S.COLD_RESTART, 4).make_plan(request(1, leave=(0,)), OLD)


def test_memory_that_does_not_fit_is_refused() -> None:
    world = World()
    world.budget_pages = lambda device_id: 5  # type: ignore[method-assign]
    with pytest.raises(DoesNotFitError):
        fresh(S.EXTRAVAGANT, 5, world).make_plan(request(3), OLD)


def test_without_peer_copies_a_plan_only_maps() -> None:
    world = World()
    made = Planner(world, 4).make_plan(request(3), OLD)
    uncopied = plans.UncopiedPlanner(world, 4).make_plan(request(3), OLD)
    copies = {StepKind.COPY_TRUNK, StepKind.COPY_EXPERTS}
    assert copies & {step.kind for step in made.before}
    assert uncopied.before == tuple(s for s in made.before if s.kind not in copies)
    assert uncopied.after == made.after


# ---- the coordinator of a cold restart ----


class CutOverWorld(World):
    """The fakes with an instance that can let go."""

    def let_go(self, instance: str) -> None:
        self.call("let_go", instance)
        self._move(instance, InstanceState.PARKED)

    def activate(self, instance: str, old: str, kv_moves: Any) -> None:
        self.call("activate", instance, old, dict(kv_moves))
        assert self.state_of(old) is InstanceState.PARKED
        self._move(instance, InstanceState.ACTIVE)


def restarted(world: CutOverWorld) -> tuple[Coordinator, Operation]:
    planner = fresh(S.COLD_RESTART, 4, world)
    coordinator = CutOverCoordinator(
        world,
        world,
        world,
        planner.make_plan,
        planner.describe,
        retry_policy=RetryPolicy(attempts=3, first_pause_s=0.5),
        clock=Ticks().clock(),
    )
    operation = coordinator.submit(request(3))
    ended = coordinator.wait(operation.operation_id, WAIT_S)
    assert ended.finished
    return coordinator, ended


def names(world: World) -> list[str]:
    return [call[0] for call in world.calls if call[0] != "serving"]


def test_a_cold_restart_holds_until_the_new_instance_is_there() -> None:
    world = CutOverWorld()
    coordinator, operation = restarted(world)
    assert operation.state is OperationState.SUCCEEDED
    steps = ["execute"] * (2 + 3 * 4)
    wanted = ["hold", "freeze", "let_go", *steps, "prepare", "activate", "switch", "release"]
    assert names(world) == wanted
    assert [phase.name for phase in operation.phases] == [
        "plan", "switch", "retire", "memory", "prepare", "switch",
    ]  # fmt: skip
    # All but planning is down time.
    down_s = sum(phase.seconds for phase in operation.phases[2:])
    assert operation.gap_s > down_s - 1e-9
    assert world.active() == ["i1"]
    assert coordinator.serving[0] == "i1"


def test_a_freeze_that_fails_leaves_everything_as_it_was() -> None:
    world = CutOverWorld(fault=always("freeze"))
    before = world.model()
    _, operation = restarted(world)
    assert operation.state is OperationState.ROLLED_BACK
    assert world.model() == before


def test_a_start_that_fails_is_tried_again_and_nothing_stays_held() -> None:
    world = CutOverWorld(fault=always("prepare"))
    _, operation = restarted(world)
    assert operation.state is OperationState.DEGRADED
    assert len(world.named("prepare")) == 3
    assert not world.is_held
    assert world.active() == []


def test_a_release_that_fails_once_activates_once() -> None:
    failures = iter([True])
    world = CutOverWorld()
    switch = world.switch

    def flaky(instance: str, placement: Placement) -> None:
        if next(failures, False):
            raise EngineError("once")
        switch(instance, placement)

    world.switch = flaky  # type: ignore[method-assign]
    _, operation = restarted(world)
    assert operation.state is OperationState.SUCCEEDED
    assert len(world.named("activate")) == 1


class EngineError(from_disk.EngineFailedError):
    """An error that is tried again."""


def test_a_plan_with_steps_before_is_no_cold_restart() -> None:
    world = CutOverWorld()
    made = Plan(OLD, ONE, (Step(StepKind.ADD_DEVICE, 3),), (), {}, {})
    coordinator = CutOverCoordinator(
        world, world, world, lambda *_: made, lambda _: {}, clock=Ticks().clock()
    )
    operation = coordinator.submit(request(1))
    assert coordinator.wait(operation.operation_id, WAIT_S).state is OperationState.ROLLED_BACK
    assert world.named("hold", "freeze") == []


# ---- what is read from disk ----


def path_of(device: int, seen_from: int) -> str:
    return f"/{device}"


def attaches(placement: Placement) -> list[m.Attach]:
    return attach_messages(placement, (), path_of, must_load=False)


def test_a_baseline_reads_everything() -> None:
    new = Placement((1, 2), (1, 2, 1, 2, 1, 2), (10, 10))
    told = from_disk.read_from_disk(attaches(new), new, None)
    assert [each.disk_experts for each in told] == [(0, 2, 4), (1, 3, 5)]
    assert all(each.loads_trunk and not each.must_load for each in told)


def test_elastic_without_copies_reads_what_is_new_to_a_device() -> None:
    new = Placement((0, 1, 2), (0, 0, 2, 1, 1, 2), (10, 10, 10))
    told = from_disk.read_from_disk(attaches(new), new, OLD)
    assert [each.disk_experts for each in told] == [(), (), (2, 5)]
    assert [each.loads_trunk for each in told] == [False, False, True]


def test_requests_go_on_without_their_kv() -> None:
    state = m.RequestState("r", b"", 3, {}, {})
    sequence = m.KvSequence(b"", b"", None, None, 0.0)
    frozen = from_disk.without_kv((m.Frozen((sequence,), (state,)), m.Frozen((sequence,), ())))
    activations, handed = hand_over((0, 1), frozen, (2,), {0: 2, 1: 2}, path_of)
    (activation,) = activations
    assert activation.requests == (state,)
    assert activation.sequences == ()
    assert [move.sequences for move in activation.moves] == [(), ()]
    assert handed.ranks == {"r": 0}


# ---- assembly ----


def chosen(line: str) -> options.ElasticOptions:
    return options.parse(["--elastic", *line.split()])[0]


@pytest.mark.parametrize(
    ("line", "planner", "cuts_over"),
    [
        ("", Planner, False),
        ("--ablate no_standby", Planner, False),
        ("--ablate no_peer_copy", plans.UncopiedPlanner, False),
        ("--ablate no_zero_copy", plans.CutOverPlanner, True),
        ("--scale-strategy cold_restart", plans.CutOverPlanner, True),
        ("--scale-strategy extravagant", plans.FreshPlanner, False),
        ("--scale-strategy colocated", plans.FreshPlanner, False),
    ],
)
def test_which_planner_a_strategy_has(line: str, planner: type, cuts_over: bool) -> None:
    found = chosen(line)
    assert type(assembly._planner(found, World())) is planner  # type: ignore[arg-type]
    assert assembly.cuts_over(found) is cuts_over


def test_only_elastic_with_standbys_keeps_any() -> None:
    assert chosen("").standby_ranks == 4
    assert chosen("--ablate no_standby --standby-ranks 3").standby_ranks == 0
    assert chosen("--scale-strategy cold_restart").standby_ranks == 0


def test_switches_are_parsed_and_checked() -> None:
    assert parse_switches("") == AblationSwitches()
    assert parse_switches("no_standby, no_peer_copy") == replace(
        AblationSwitches(), standby=False, peer_copy=False
    )
    text = ",".join(f"no_{name}" for name in PROGRESSION[-1].off)
    assert parse_switches(text) == PROGRESSION[-1]
    with pytest.raises(ElasticConfigError, match="no_magic: there are no_shared"):
        parse_switches("no_magic")
    with pytest.raises(ElasticConfigError, match="use the elastic strategy"):
        chosen("--scale-strategy colocated --ablate no_standby")


def test_colocated_halves_every_device(tmp_path: Path) -> None:
    found = chosen("--scale-strategy colocated --max-devices 2 --device-memory 64MiB")
    hmm = assembly.make_memory(found, tmp_path / "sockets", "host", 4096)
    halves = (32 << 20) // 4096
    assert [hmm.budget_pages(device) for device in range(4)] == [halves] * 4


def test_without_an_ipc_safe_allocator_copies_are_staged(tmp_path: Path) -> None:
    budgets = dict.fromkeys(range(2), memory_workers.BUDGET)
    hmm = StagedMemory(
        tmp_path / "sockets", budgets, 2, page_bytes=memory_workers.PAGE, timeout_s=10.0
    )
    try:
        for device in range(2):
            hmm.add_device(device)
        hmm.define(memory_workers.SHAPE)
        hmm.add_staging()
        for device in range(2):
            hmm.execute(Step(StepKind.MAP_TRUNK, device))
        trunk = {"trunk": [(0, 1)]}
        memory_workers.fill(hmm, 0, trunk)
        hmm.execute(Step(StepKind.COPY_TRUNK, 1, source_id=0))
        assert hmm.client(1).digest("trunk", 0) == hmm.client(0).digest("trunk", 0)
        usage = hmm.usage()
        assert usage[3].used_pages == 0
        assert usage[3].peak_pages == usage[1].used_pages > 0
        assert usage[2].peak_pages == 0
    finally:
        hmm.close()


def test_the_server_says_so_when_nothing_serves() -> None:
    instances = from_disk.DiskInstances.__new__(from_disk.DiskInstances)
    instances.__dict__.update(_active="i1", _running={})
    with pytest.raises(from_disk.EngineFailedError, match="restart the server"):
        instances.serving()


class Bare(from_disk.DiskInstances):
    """Only the books: what would go to processes is written down."""

    def __init__(self, *, shares_memory: bool) -> None:
        self._shares_memory = shares_memory
        self._let_go = None
        self._running = {}
        self._hmm: Any = SimpleNamespace(
            socket_path=lambda device, seen_from: f"/{device}", are_apart=lambda one, other: False
        )
        self.retired: list[str] = []
        self.told: list[m.Activate] = []

    def add(self, name: str, *device_ids: int, frozen: tuple[m.Frozen, ...] = ()) -> None:
        record = SimpleNamespace(device_ids=device_ids, instance_id=name)
        self._running[name] = SimpleNamespace(record=record, frozen=list(frozen))  # type: ignore[assignment]

    def retire(self, instance: str) -> None:
        self.retired.append(instance)
        del self._running[instance]

    def _take_over(self, new: Any, activations: list[m.Activate]) -> None:
        self.told = activations


STATE = m.RequestState("r", b"", 3, {}, {})
SEQUENCE = m.KvSequence(b"", b"", None, None, 0.0)


def test_who_let_go_is_remembered_until_the_next_has_its_requests() -> None:
    instances = Bare(shares_memory=False)
    instances.add("i1", 0, frozen=(m.Frozen((SEQUENCE,), (STATE,)),))
    instances.let_go("i1")
    instances.let_go("i1")
    assert instances.retired == ["i1"]
    instances.add("i2", 0, 1)
    instances.activate("i2", "i1", {})
    assert [(a.sequences, a.requests) for a in instances.told] == [((), (STATE,)), ((), ())]
    assert instances.handed_over().ranks == {"r": 0}
    assert instances._let_go is None


def test_an_instance_that_has_not_let_go_hands_over_requests_only() -> None:
    instances = Bare(shares_memory=False)
    instances.add("i1", 0, frozen=(m.Frozen((SEQUENCE,), (STATE,)),))
    instances.add("i2", 3)
    instances.activate("i2", "i1", {0: 3})
    assert instances.told == [m.Activate((), (m.KvMove("/0", ()),), (STATE,))]


def test_shared_memory_keeps_its_kv() -> None:
    instances = Bare(shares_memory=True)
    instances.add("i1", 0, frozen=(m.Frozen((SEQUENCE,), (STATE,)),))
    instances.add("i2", 0)
    instances.activate("i2", "i1", {})
    assert instances.told == [m.Activate((SEQUENCE,), (), (STATE,))]
