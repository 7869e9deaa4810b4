"""A serving device's memory worker is killed: real workers, the real planner, fakes of the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from sgl_elastic.coordinator.coordinator import Coordinator
from sgl_elastic.coordinator.operations import Operation
from sgl_elastic.coordinator.planning import Planner
from sgl_elastic.coordinator.steps import RetryPolicy
from sgl_elastic.errors import MemoryLostError, StepFailedError
from sgl_elastic.memory.control import Hmm
from sgl_elastic.memory.runs import Slots
from sgl_elastic.memory.slots import expert_slots, part_slots
from sgl_elastic.types import OperationState, Placement, ScaleRequest, Step, StepKind
from tests.fast.elastic import fault_cells as cells
from tests.fast.elastic.memory.test_control import content, in_use, kill
from tests.fast.elastic.memory_workers import SHAPE, digests, expected_digests, fill
from tests.fast.elastic.scale_fakes import World, always, finished, never

MAX_DEVICES = 2
LIMIT = 40  # KV tokens of a rank; device 1 has had more


class Scene:
    """Devices 0 and 1 serve; `prepare` fills what a rank would read from disk."""

    def __init__(self, hmm: Hmm) -> None:
        self.hmm = hmm
        self.world = World(cells.TWO)
        self.world.prepare = self._prepare  # type: ignore[method-assign]
        self.reads: list[Step] = []
        planner = Planner(hmm, MAX_DEVICES, LIMIT, 1)
        self.coordinator = Coordinator(
            hmm,
            self.world,
            self.world,
            planner.make_plan,
            planner.describe,
            retry_policy=RetryPolicy(attempts=2, first_pause_s=0.01),
            make_loss_plan=planner.make_loss_plan,
        )

    def _prepare(self, placement: Placement, reads: Sequence[Step] = ()) -> str:
        self.reads += reads
        name = World.prepare(self.world, placement, reads)
        for step in reads:
            fill(self.hmm, step.device_id, self._slots_of(step))
        return name

    def _slots_of(self, step: Step) -> Slots:
        if step.kind is StepKind.READ_TRUNK:
            return {"trunk": [(0, 1)]}
        if step.parts:
            return part_slots(SHAPE, self.hmm.adapters(), step.parts)
        return expert_slots(SHAPE, self.hmm.adapters(), step.expert_ids)

    def recovered(self, *, is_serving: bool) -> Operation:
        operation = self.coordinator.recover(is_serving=is_serving)
        assert operation is not None
        return operation

    def check_content(self) -> None:
        """Each device has its own, adapters too, and nothing else."""
        placement = self.world.table[1]
        for device_id in placement.device_ids:
            wanted = content(placement.experts_of(device_id))
            assert digests(self.hmm, device_id, wanted) == expected_digests(wanted)
            num_experts = sum(
                count for name, runs in wanted.items() if name != "trunk" for _, count in runs
            )
            usage = self.hmm.usage()[device_id]
            assert usage.mapped_slots["expert"] == usage.loaded_slots["expert"] == num_experts


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with cells.serving(tmp_path, "down") as found:
        yield Scene(found.hmm)


@pytest.mark.parametrize("is_serving", [True, False])
@pytest.mark.parametrize("lost", [0, 1])
def test_the_other_device_goes_on_and_the_lost_one_is_taken_back(
    scene: Scene, lost: int, is_serving: bool
) -> None:
    """What serves goes on meanwhile; what does not is waited for."""
    before = in_use(scene.hmm)
    kill(scene.hmm, lost)
    assert scene.coordinator.is_memory_lost()
    operation = scene.recovered(is_serving=is_serving)
    assert operation.state is OperationState.SUCCEEDED, operation
    assert scene.world.table[1].device_ids == (1 - lost,)
    assert [(step.kind, step.device_id) for step in scene.reads] == [
        (StepKind.READ_EXPERTS, 1 - lost)
    ]
    assert scene.reads[0].expert_ids == cells.TWO.experts_of(lost)
    assert not scene.coordinator.is_memory_lost()
    names = [call[0] for call in scene.world.calls]
    assert (names.index("hold") < names.index("prepare")) != is_serving
    assert not scene.world.is_held
    back = finished(scene.coordinator, ScaleRequest(2))
    assert back.state is OperationState.SUCCEEDED, back
    scene.check_content()
    assert in_use(scene.hmm).keys() == before.keys()


def test_what_was_read_is_what_the_rank_has_counted(scene: Scene) -> None:
    kill(scene.hmm, 1)
    operation = scene.recovered(is_serving=True)
    read = next(step for step in operation.steps if step.kind is StepKind.READ_EXPERTS)
    assert read.state == "done"
    assert read.copied_bytes == 7, "World.num_read of device 0"
    assert operation.plan["read_bytes"] == read.num_bytes > 0
    assert operation.plan["lost"] == [1]


def test_kv_that_nobody_uses_gives_way_at_once(scene: Scene) -> None:
    kill(scene.hmm, 0)
    assert scene.hmm.usage()[1].mapped_slots["kv"] == 2 * (60 + 1)
    assert scene.recovered(is_serving=False).state is OperationState.SUCCEEDED
    assert scene.hmm.usage()[1].mapped_slots["kv"] == 2 * (LIMIT + 1)
    assert scene.world.named("resize_kv") == []


def test_copies_that_a_device_has_are_not_read(scene: Scene) -> None:
    """Experts on two devices: the seam for redundant ones."""
    scene.hmm.execute(Step(StepKind.MAP_EXPERTS, 0, expert_ids=(4, 5, 6, 7)))
    copy = Step(StepKind.COPY_EXPERTS, 0, source_id=1, expert_ids=(4, 5, 6, 7))
    scene.hmm.execute(copy)
    scene.hmm.commit()
    kill(scene.hmm, 1)
    operation = scene.recovered(is_serving=False)
    assert operation.state is OperationState.SUCCEEDED, operation
    assert scene.reads == []
    assert operation.plan["read_bytes"] == operation.plan["copied_bytes"] == 0
    scene.check_content()


def test_copies_of_some_layers_are_not_read(scene: Scene) -> None:
    """As redundant experts are: each layer has other ones. Of the rest all layers are read."""
    layer_0 = {n: r for n, r in content((4, 5), trunk=False).items() if n.startswith("experts.0.")}
    layer_1 = {n: r for n, r in content((6,), trunk=False).items() if n.startswith("experts.1.")}
    for slots in (layer_0, layer_1):
        scene.hmm.client(0).map_slots(slots)
        fill(scene.hmm, 0, slots)
    kill(scene.hmm, 1)
    assert scene.recovered(is_serving=False).state is OperationState.SUCCEEDED
    [read] = scene.reads
    assert read.parts == ((0, (6, 7)), (1, (4, 5, 7)))
    scene.check_content()


def test_copies_in_the_way_are_done_without_at_the_next_attempt(scene: Scene) -> None:
    slots = {"experts.0.w13": [(5, 1)], "experts.0.w2": [(5, 1)]}
    scene.hmm.client(0).map_slots(slots)
    fill(scene.hmm, 0, slots)
    kill(scene.hmm, 1)
    scene.world.fault = always("prepare")
    assert scene.recovered(is_serving=False).state is OperationState.ROLLED_BACK
    scene.world.fault = never
    assert scene.recovered(is_serving=False).state is OperationState.SUCCEEDED
    assert not scene.reads[-1].parts, "all of it, in all layers"
    scene.check_content()


def test_a_copy_without_the_adapters_experts_is_none(scene: Scene) -> None:
    """Expert 7 has one in adapter b; expert 5, too; 4 and 6 in a."""
    scene.hmm.client(0).map_slots({name: [(5, 1)] for name in content((5,), trunk=False)})
    fill(scene.hmm, 0, {name: [(5, 1)] for name in content((5,), trunk=False)})
    kill(scene.hmm, 1)
    assert scene.recovered(is_serving=False).state is OperationState.SUCCEEDED
    assert scene.reads[0].expert_ids == (4, 5, 6, 7)
    scene.check_content()


@pytest.mark.parametrize("is_serving", [True, False])
@pytest.mark.parametrize("name", ["prepare", "freeze", "activate"])
def test_after_a_failure_it_is_tried_again(scene: Scene, name: str, is_serving: bool) -> None:
    kill(scene.hmm, 1)
    before = in_use(scene.hmm)
    scene.world.fault = always(name)
    failed = scene.recovered(is_serving=is_serving)
    assert failed.state is OperationState.ROLLED_BACK
    assert failed.undo_errors == ()
    assert in_use(scene.hmm) == before
    assert scene.coordinator.is_memory_lost(), "it is still to be recovered"
    with pytest.raises(MemoryLostError):
        scene.coordinator.submit(ScaleRequest(1))
    scene.world.fault = never
    if scene.world.state_of("i0") == "frozen":
        scene.world.resume("i0")
    assert scene.recovered(is_serving=is_serving).state is OperationState.SUCCEEDED
    scene.check_content()


def test_an_adapter_that_has_changed_is_not_read_again(tmp_path: Path) -> None:
    """The other one is; of the first no page stays. What is whole without reading stays too."""
    contents = {Path("/a"): "another", Path("/b"): ""}
    with cells.serving(tmp_path, "down", content_of=contents.__getitem__) as found:
        scene = Scene(found.hmm)
        kill(scene.hmm, 1)
        operation = scene.recovered(is_serving=False)
        assert operation.state is OperationState.SUCCEEDED, operation
        assert [adapter.name for adapter in scene.hmm.adapters()] == ["b"]
        b_alone = {0: 0, 1: 3}  # layer -> adapter's experts on device 0
        mapped = scene.hmm.usage()[0].mapped_slots["expert"]
        assert mapped == sum(2 * (8 + count) for count in b_alone.values())


def test_what_needs_no_reading_may_have_changed(scene: Scene) -> None:
    scene.hmm._content_of = lambda folder: "another"
    assert not scene.hmm.drop_changed_adapters((2, 3)), "no adapter has these"
    assert not scene.hmm.drop_changed_adapters(())
    assert scene.hmm.drop_changed_adapters((6,))
    assert [adapter.name for adapter in scene.hmm.adapters()] == ["b"]


@pytest.mark.parametrize("is_serving", [True, False])
def test_with_no_device_left_all_of_it_is_read(scene: Scene, is_serving: bool) -> None:
    """The same devices come back, with other workers."""
    for device_id in (0, 1):
        kill(scene.hmm, device_id)
    operation = scene.recovered(is_serving=is_serving)
    assert operation.state is OperationState.SUCCEEDED, operation
    assert scene.world.table[1].device_ids == (0, 1)
    assert {step.kind for step in scene.reads} == {StepKind.READ_TRUNK, StepKind.READ_EXPERTS}
    scene.check_content()


def test_another_is_lost_while_the_first_loss_is_made_good(scene: Scene) -> None:
    kill(scene.hmm, 1)

    def kill_the_other(name: str) -> None:
        if name == "prepare":
            scene.world.gate = lambda name: None
            kill(scene.hmm, 0)
            raise StepFailedError("its memory is gone")

    scene.world.gate = kill_the_other
    assert scene.recovered(is_serving=False).state is OperationState.ROLLED_BACK
    assert scene.recovered(is_serving=False).state is OperationState.SUCCEEDED
    scene.check_content()
