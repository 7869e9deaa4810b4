"""The paper's baselines over fakes: what is done in which order, and what a failure leaves."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from sgl_elastic import assembly, options
from sgl_elastic.autoscale.slo import SloTargets, SloWindow
from sgl_elastic.baselines import from_disk, plans
from sgl_elastic.baselines.restarts import cold_restart, side_by_side
from sgl_elastic.baselines.strategies import ScaleStrategy
from sgl_elastic.coordinator.coordinator import Coordinator
from sgl_elastic.coordinator.operations import Operation
from sgl_elastic.coordinator.planning import Planner
from sgl_elastic.coordinator.scale import CarryOut, scale
from sgl_elastic.errors import BadScaleError, DoesNotFitError, EngineFailedError, StepFailedError
from sgl_elastic.front.rank_choice import RankPolicy
from sgl_elastic.instance import rank_messages as m
from sgl_elastic.instance.handover import FrozenInstance, HandedOver, attach_messages, hand_over
from sgl_elastic.instance.state import InstanceState
from sgl_elastic.memory.control import Hmm
from sgl_elastic.plan.planner import placement_at_switch
from sgl_elastic.types import OperationState, Placement, Plan, ScaleRequest, Step, StepKind
from tests.fast.elastic import memory_workers
from tests.fast.elastic.front.test_router import FakeWire
from tests.fast.elastic.scale_fakes import OLD, World, always, finished, make_coordinator

S = ScaleStrategy
ONE = Placement((0,), (0,) * 6, (100,))


def request(dp_size: int, *device_ids: int, leave: tuple[int, ...] = ()) -> ScaleRequest:
    return ScaleRequest(dp_size, device_ids, leave)


def fresh(
    strategy: ScaleStrategy, max_devices: int, world: World | None = None
) -> plans.FreshPlanner:
    choose, cuts = assembly._CHOICES[strategy], strategy is S.COLD_RESTART
    memory = world or World()
    return plans.FreshPlanner(memory, max_devices, None, strategy, choose, removes_first=cuts)


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
    world = World()
    world.budget_pages = lambda device_id: 5  # type: ignore[method-assign]
    with pytest.raises(DoesNotFitError):
        fresh(S.EXTRAVAGANT, 5, world).make_plan(request(3), OLD)


def test_colocated_goes_from_one_half_of_each_device_to_the_other() -> None:
    planner = fresh(S.COLOCATED, 4)
    up = planner.make_plan(request(3), OLD)
    assert up.new.device_ids == (4, 5, 6)
    back = planner.make_plan(request(1), up.new)
    assert back.new.device_ids == (0,)
    assert back.kv_moves == {4: 0, 5: 0, 6: 0}


def test_a_cold_restart_removes_all_before_it_maps_anything() -> None:
    planner = fresh(S.COLD_RESTART, 4)
    made = planner.make_plan(request(1), OLD)
    assert made.before == ()
    gone = [(StepKind.REMOVE_DEVICE, 0), (StepKind.REMOVE_DEVICE, 1)]
    assert kinds(made.after) == [*gone, *everything(0)]
    assert made.new.experts_of(0) == tuple(range(6))
    with pytest.raises(BadScaleError, match="leave"):  # it means nothing where all leave
        planner.make_plan(request(1, leave=(0,)), OLD)


@pytest.mark.parametrize("strategy", [S.EXTRAVAGANT, S.COLOCATED, S.COLD_RESTART])
def test_the_present_size_is_nothing_to_do(strategy: ScaleStrategy) -> None:
    made = fresh(strategy, 4).make_plan(request(2), OLD)
    assert (made.old, made.new, made.before, made.after) == (OLD, OLD, (), ())


def test_without_peer_copies_a_plan_only_maps() -> None:
    world = World()
    made = Planner(world, 4).make_plan(request(3), OLD)
    uncopied = plans.without_copies(Planner(world, 4).make_plan)(request(3), OLD)
    copies = {StepKind.COPY_TRUNK, StepKind.COPY_EXPERTS}
    assert copies & {step.kind for step in made.before}
    assert uncopied.before == tuple(s for s in made.before if s.kind not in copies)
    assert uncopied.after == made.after


# ---- how they are carried out ----


class FrozenWorld(World):
    """The fakes with a frozen request and its KV; whose old instance may be gone when it is."""

    def freeze(self, instance: str) -> FrozenInstance:
        device_ids = super().freeze(instance).device_ids
        self.may_hand_over = {InstanceState.FROZEN, InstanceState.PARKED}
        return FrozenInstance(instance, device_ids, (m.Frozen((SEQUENCE,), (STATE,)),))

    def activate(self, instance: str, frozen: FrozenInstance, kv_moves: object) -> HandedOver:
        self.taken_over = frozen
        return super().activate(instance, frozen, {})


def scaled(
    world: World, carry_out: CarryOut, plan: Plan | None = None
) -> tuple[Coordinator, Operation]:
    strategy = S.COLD_RESTART if carry_out is cold_restart else S.EXTRAVAGANT
    make_plan = (lambda *_: plan) if plan else fresh(strategy, 5, world).make_plan
    coordinator = make_coordinator(world, make_plan, carry_out=carry_out)
    return coordinator, finished(coordinator)


def names(world: World) -> list[str]:
    return [call[0] for call in world.calls if call[0] != "serving"]


def test_side_by_side_the_new_instance_computes_all_kv_again() -> None:
    world = FrozenWorld()
    _, operation = scaled(world, side_by_side)
    assert operation.state is OperationState.SUCCEEDED
    before = [*["execute"] * 12, "prepare", "hold", "freeze", "activate"]
    after = ["switch", "start_serving", "release", "retire", "execute", "execute"]
    assert names(world) == [*before, *after]
    assert world.taken_over.ranks == (m.Frozen((), (STATE,)),)
    assert world.active() == ["i1"]


@pytest.mark.parametrize(
    ("carry_out", "name"),
    [
        (side_by_side, "execute"),
        (side_by_side, "prepare"),
        (side_by_side, "freeze"),
        (side_by_side, "activate"),
        (cold_restart, "freeze"),
    ],
)
def test_a_failure_before_the_switch_leaves_everything_as_it_was(
    carry_out: CarryOut, name: str
) -> None:
    world = FrozenWorld(fault=always(name))
    before = world.model()
    assert scaled(world, carry_out)[1].state is OperationState.ROLLED_BACK
    assert world.model() == before


def test_a_cold_restart_holds_until_the_new_instance_is_there() -> None:
    world = FrozenWorld()
    coordinator, operation = scaled(world, cold_restart)
    assert operation.state is OperationState.SUCCEEDED
    steps = ["execute"] * (2 + 3 * 4)
    begun = ["hold", "freeze", "retire", *steps, "prepare", "activate"]
    assert names(world) == [*begun, "switch", "start_serving", "release"]
    assert [phase.name for phase in operation.phases] == [
        "plan", "switch", "retire", "memory", "prepare", "switch",
    ]  # fmt: skip
    # All but planning is down time.
    down_s = sum(phase.seconds for phase in operation.phases[2:])
    assert operation.gap_s > down_s - 1e-9
    assert world.taken_over.ranks == (m.Frozen((), (STATE,)),), "no KV"
    assert world.active() == ["i1"]
    assert coordinator.serving[0] == "i1"


def test_a_start_that_fails_is_tried_again_and_nothing_stays_held() -> None:
    world = FrozenWorld(fault=always("prepare"))
    _, operation = scaled(world, cold_restart)
    assert operation.state is OperationState.DEGRADED
    assert len(world.named("prepare")) == 3
    assert not world.is_held
    assert world.active() == []


@pytest.mark.parametrize("name", ["switch", "start_serving", "release"])
def test_a_switch_that_fails_once_activates_once(name: str) -> None:
    world, failures = FrozenWorld(), iter([EngineFailedError("once")])
    world.fault = lambda at, called: next(failures, None) if called == name else None
    _, operation = scaled(world, cold_restart)
    assert operation.state is OperationState.SUCCEEDED
    assert len(world.named("activate")) == 1
    assert len(world.named(name)) == 2


def test_a_plan_with_steps_before_is_no_cold_restart() -> None:
    world = FrozenWorld()
    made = Plan(OLD, ONE, (Step(StepKind.ADD_DEVICE, 3),), (), {}, {})
    assert scaled(world, cold_restart, made)[1].state is OperationState.ROLLED_BACK
    assert world.named("hold", "freeze") == []


# ---- what is read from disk ----


def path_of(device: int, seen_from: int) -> str:
    return f"/{device}"


def test_the_first_instance_reads_by_its_loader_and_later_ones_what_is_not_shared() -> None:
    asked: list[bool] = []

    def present() -> Placement:
        asked.append(True)
        return OLD

    new = Placement((0, 1, 2), (0, 0, 2, 1, 1, 2), (10, 10, 10))
    sharing = from_disk.DiskAttach(present)
    first = sharing(new, (), path_of, must_load=True)
    assert first == attach_messages(new, (), path_of, must_load=True)
    assert asked == [], "nothing serves yet"
    told = sharing(new, (), path_of, must_load=False)
    assert [each.disk_experts for each in told] == [(), (), (2, 5)]
    assert [each.loads_trunk for each in told] == [False, False, True]
    alone = from_disk.DiskAttach(None)(new, (), path_of, must_load=False)
    assert [each.disk_experts for each in alone] == [(0, 1), (3, 4), (2, 5)]
    assert all(each.loads_trunk and not each.must_load for each in alone)


def test_requests_go_on_without_their_kv() -> None:
    ranks = (m.Frozen((SEQUENCE,), (STATE,)), m.Frozen((SEQUENCE,), ()))
    frozen = from_disk.without_kv(FrozenInstance("i1", (0, 1), ranks))
    (activation,), handed = hand_over(frozen, (2,), {0: 2, 1: 2}, path_of)
    assert activation.requests == (STATE,)
    assert activation.sequences == ()
    assert [move.sequences for move in activation.moves] == [(), ()]
    assert handed.ranks == {"r": 0}


# ---- assembly ----


def chosen(line: str) -> options.ElasticOptions:
    return options.parse(["--elastic", *line.split()])[0]


@pytest.mark.parametrize(
    ("line", "way", "order"),
    [
        ("", scale, "copies"),
        ("--ablate no_standby", scale, "copies"),
        ("--ablate no_peer_copy", scale, "maps"),
        ("--ablate no_zero_copy", cold_restart, "removes first"),
        ("--scale-strategy cold_restart", cold_restart, "removes first"),
        ("--scale-strategy extravagant", side_by_side, "maps, then removes"),
        ("--scale-strategy colocated", side_by_side, "maps, then removes"),
    ],
)
def test_which_parts_a_strategy_has(line: str, way: CarryOut, order: str) -> None:
    found = chosen(f"{line} --max-devices 6 --kv-tokens 100")
    assert assembly.way_of(found) is way
    make_plan, _ = assembly.make_planner(found, World())  # type: ignore[arg-type]
    made = make_plan(request(3), OLD)
    before, after = ({step.kind for step in steps} for steps in (made.before, made.after))
    assert (StepKind.COPY_TRUNK in before) == (order == "copies")
    assert (before == set()) == (order == "removes first")
    assert (StepKind.REMOVE_DEVICE in after) == ("removes" in order)


def test_only_elastic_with_standbys_keeps_any() -> None:
    assert chosen("").standby_ranks == 4
    assert chosen("--ablate no_standby --standby-ranks 3").standby_ranks == 0
    assert chosen("--scale-strategy cold_restart").standby_ranks == 0


def test_colocated_halves_every_device(tmp_path: Path) -> None:
    found = chosen("--scale-strategy colocated --max-devices 2 --device-memory 64MiB")
    hmm = assembly.make_memory(found, tmp_path / "sockets", "host", 4096)
    halves = (32 << 20) // 4096
    assert [hmm.budget_pages(device) for device in range(4)] == [halves] * 4


def test_staging_workers_are_there_before_the_first_scale(tmp_path: Path) -> None:
    found = chosen("--ablate no_shared_allocator --max-devices 2 --device-memory 1MiB")
    with closing(assembly.make_memory(found, tmp_path / "sockets", "host", 4096)) as hmm:
        router = assembly.make_router(found, FakeWire(), RankPolicy(), SloWindow(SloTargets(1, 1)))
        coordinator, watched = assembly.make_coordinator(found, hmm, World(), router)  # type: ignore[arg-type]
        assert hmm.device_ids() == (2, 3)
        assert coordinator.serving == ("i0", OLD)
        assert isinstance(watched, World), "the instance manager itself"


def test_without_an_ipc_safe_allocator_copies_are_staged(tmp_path: Path) -> None:
    budgets = dict.fromkeys(range(4), memory_workers.BUDGET)
    made = Hmm(tmp_path / "sockets", budgets, page_bytes=memory_workers.PAGE, timeout_s=10.0)
    copy = Step(StepKind.COPY_TRUNK, 1, source_id=0)
    with closing(made) as hmm:
        memory = plans.StagedMemory(hmm, 2)
        for device in range(2):
            hmm.add_device(device)
        hmm.define(memory_workers.SHAPE)
        memory.add_staging()
        for device in range(2):
            memory.execute(Step(StepKind.MAP_TRUNK, device))
        memory_workers.fill(hmm, 0, {"trunk": [(0, 1)]})
        memory.execute(copy)
        assert hmm.client(1).digest("trunk", 0) == hmm.client(0).digest("trunk", 0)
        usage = hmm.usage()
        assert usage[3].used_pages == 0
        assert usage[3].peak_pages == usage[1].used_pages > 0
        assert usage[2].peak_pages == 0
        memory.undo(copy)
        memory.execute(Step(StepKind.MAP_EXPERTS, 0, expert_ids=(1,)))
        with pytest.raises(StepFailedError):
            memory.execute(Step(StepKind.COPY_EXPERTS, 1, source_id=0, expert_ids=(1,)))
        assert hmm.usage()[3].used_pages == 0, "also after a copy that failed"


STATE = m.RequestState("r", b"", 3, {}, {})
SEQUENCE = m.KvSequence(b"", b"", None, None, 0.0)
