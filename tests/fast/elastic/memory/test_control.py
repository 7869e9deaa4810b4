"""The control plane: steps and their undo, adapters, budgets, workers that die."""

import os
import signal
import stat
from dataclasses import replace

import pytest

from sgl_elastic.errors import ElasticConfigError, MemoryLostError, MemoryWorkerError
from sgl_elastic.memory.control import Hmm
from sgl_elastic.types import Placement, Step, StepKind
from tests.fast.elastic.memory_workers import (
    ADAPTERS,
    PAGE,
    SHAPE,
    comes_to,
    digests,
    expected_digests,
    fill,
    hmm_of,
)

W13, W2 = "experts.0.w13", "experts.0.w2"
ADD, REMOVE = StepKind.ADD_DEVICE, StepKind.REMOVE_DEVICE
OLD = Placement((0,), (0,) * 8, (40,))
SCALE_UP = (
    Step(ADD, 1),
    Step(StepKind.MAP_TRUNK, 1),
    Step(StepKind.MAP_EXPERTS, 1, expert_ids=(4, 5, 6, 7)),
    Step(StepKind.MAP_KV, 1, num_tokens=60),
    Step(StepKind.COPY_TRUNK, 1, source_id=0),
    Step(StepKind.COPY_EXPERTS, 1, source_id=0, expert_ids=(4, 5, 6, 7)),
)


@pytest.fixture
def hmm(tmp_path):
    """Device 0 serves OLD with both adapters; its content is valid."""
    with hmm_of(tmp_path, add=False) as found:
        found.set_adapters(ADAPTERS)
        found.map_placement(OLD)
        fill(found, 0, content(range(8)))
        yield found


def content(experts, trunk=True):
    """Slots with the experts, adapters' too, as ADAPTERS says, spelled out by hand."""
    woven = {0: {1: 8, 4: 9, 6: 10}, 1: {5: 8, 0: 11, 1: 12, 7: 13}}
    slots = {"trunk": [(0, 1)]} if trunk else {}
    for layer in (0, 1):
        runs = [(e, 1) for e in experts]
        runs += [(slot, 1) for e, slot in woven[layer].items() if e in experts]
        slots |= {f"experts.{layer}.w13": runs, f"experts.{layer}.w2": runs}
    return slots


def in_use(hmm):
    """What undo must restore; pages that were made stay, free."""
    return {
        device_id: (usage.used_pages, usage.pages, usage.mapped_slots, usage.loaded_slots)
        for device_id, usage in hmm.usage().items()
    }


def execute(hmm, *steps):
    for step in steps:
        hmm.execute(step)


def kill(hmm, device_id):
    process = hmm._workers[device_id].process
    process.kill()
    process.wait(10)


def test_the_first_placement_maps_what_it_names(hmm):
    usage = hmm.usage()[0]
    assert usage.mapped_slots == {"trunk": 1, "expert": 2 * (8 + 3) + 2 * (8 + 4), "kv": 2 * 41}
    assert usage.used_pages == sum(usage.pages.values())
    assert usage.loaded_slots["kv"] == 0
    assert hmm.device_ids() == (0,)


def test_a_scale_up_copies_trunk_experts_and_adapters(hmm):
    execute(hmm, *SCALE_UP)
    wanted = content((4, 5, 6, 7))
    assert digests(hmm, 1, wanted) == expected_digests(wanted)
    usage = hmm.usage()[1]
    assert usage.loaded_slots == {"trunk": 1, "expert": 2 * (4 + 2) + 2 * (4 + 2), "kv": 0}
    assert usage.mapped_slots["kv"] == 2 * 61
    before = in_use(hmm)
    execute(hmm, *SCALE_UP)
    assert in_use(hmm) == before, "steps are idempotent"
    hmm.undo(SCALE_UP[5])
    assert hmm.usage()[1].loaded_slots == {"trunk": 1, "expert": 0, "kv": 0}


@pytest.mark.parametrize("num_steps", range(len(SCALE_UP) + 1))
def test_undo_of_the_steps_done_restores_usage_exactly(hmm, num_steps):
    before = in_use(hmm)
    for step in SCALE_UP[:num_steps]:
        hmm.execute(step)
        hmm.execute(step)  # a retry must not make undo forget what the first try did
    for step in reversed(SCALE_UP):  # those that were not executed are harmless
        hmm.undo(step)
    assert in_use(hmm) == before
    assert hmm.device_ids() == (0,)
    assert not hmm.socket_path(1).exists()


def test_undo_leaves_what_was_there_before_the_step(hmm):
    map_experts = SCALE_UP[2]
    hmm.execute(Step(ADD, 1))
    hmm.client(1).map_slots({W13: [(4, 1)]})
    before = in_use(hmm)
    hmm.execute(map_experts)
    hmm.undo(map_experts)
    assert in_use(hmm) == before
    hmm.undo(map_experts)
    hmm.undo(Step(ADD, 0))  # device 0 was there before the commit
    assert in_use(hmm) == before
    # What was unmapped since is not undone: its pages are somebody else's by then.
    execute(hmm, map_experts, Step(StepKind.UNMAP_EXPERTS, 1, expert_ids=(4,)))
    hmm.client(1).map_slots({W13: [(4, 1)]})
    hmm.undo(map_experts)
    assert in_use(hmm) == before


def test_what_is_committed_stays(hmm):
    execute(hmm, *SCALE_UP)
    hmm.commit()
    before = in_use(hmm)
    for step in reversed(SCALE_UP):
        hmm.undo(step)
    assert in_use(hmm) == before


def test_experts_leave_with_their_adapters_and_come_back(hmm):
    unmap = Step(StepKind.UNMAP_EXPERTS, 0, expert_ids=(4, 5, 6, 7))
    execute(hmm, *SCALE_UP, unmap, unmap)
    usage = hmm.usage()[0]
    assert usage.mapped_slots["expert"] == 2 * (4 + 1) + 2 * (4 + 2)
    staying = content((0, 1, 2, 3))
    assert digests(hmm, 0, staying) == expected_digests(staying)
    with pytest.raises(MemoryWorkerError, match="cannot be undone"):
        hmm.undo(unmap)
    execute(
        hmm,
        Step(StepKind.MAP_EXPERTS, 0, expert_ids=(4, 5, 6, 7)),
        Step(StepKind.COPY_EXPERTS, 0, source_id=1, expert_ids=(4, 5, 6, 7)),
        Step(REMOVE, 1),
        Step(REMOVE, 1),
    )
    everything = content(range(8))
    assert digests(hmm, 0, everything) == expected_digests(everything)
    assert hmm.device_ids() == (0,)


def test_engines_steps_are_refused(hmm):
    for kind in (StepKind.SHRINK_KV, StepKind.GROW_KV):
        with pytest.raises(MemoryWorkerError, match="a step of the engine"):
            hmm.execute(Step(kind, 0, num_tokens=3))


def test_budgets_are_known_before_a_device_is_added(hmm):
    assert hmm.budget_pages(1) == 100
    assert hmm.client(0).info.budget_pages == 100
    for call in (hmm.budget_pages, hmm.add_device):
        with pytest.raises(MemoryWorkerError, match="no memory budget"):
            call(7)
    with pytest.raises(MemoryWorkerError, match="add the device"):
        hmm.client(1)


def test_a_worker_that_dies_is_seen_named_and_can_be_replaced(hmm):
    execute(hmm, *SCALE_UP)
    pid = hmm.client(1).info.pid
    os.kill(pid, signal.SIGKILL)
    assert comes_to(hmm.dead_workers, (1,)) == (1,)
    with pytest.raises(MemoryWorkerError, match="device 1 ended with -9"):
        hmm.execute(SCALE_UP[2])
    assert list(hmm.usage()) == [0]
    for step in reversed(SCALE_UP):
        hmm.undo(step)
    assert hmm.dead_workers() == ()
    hmm.execute(SCALE_UP[0])
    assert hmm.client(1).info.pid != pid
    assert hmm.usage()[1].used_pages == 0


def test_a_worker_that_does_not_start_is_named(tmp_path):
    with (
        hmm_of(tmp_path, add=False, backend="acl", start_timeout_s=20.0) as hmm,
        pytest.raises(MemoryWorkerError, match="ended with 1"),
    ):
        hmm.add_device(0)
    assert not hmm.socket_path(0).exists()


def test_sockets_are_private_and_nothing_runs_after_close(tmp_path):
    with hmm_of(tmp_path, num_devices=1) as hmm:
        path = hmm.socket_path(0)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        process = hmm._workers[0].process
    assert process.poll() == 0
    assert not path.exists()
    hmm.close()
    path.parent.chmod(0o755)
    with pytest.raises(ElasticConfigError, match="mode 0755"), hmm_of(tmp_path):
        pass


def test_the_shape_is_known_before_steps_and_the_same_for_ever(tmp_path):
    with pytest.raises(MemoryWorkerError, match="define it first"):
        Hmm(tmp_path / "s", {0: PAGE}, page_bytes=PAGE).execute(SCALE_UP[1])
    with hmm_of(tmp_path, num_devices=1) as hmm:
        hmm.define(SHAPE)
        with pytest.raises(MemoryWorkerError, match="another memory shape"):
            hmm.define(replace(SHAPE, max_adapters=9))
        with pytest.raises(MemoryWorkerError, match="start them with the same"):
            hmm.define(replace(SHAPE, page_bytes=2 * PAGE))
        assert hmm.shape() is SHAPE


def test_a_lost_device_that_serves_is_named_and_one_that_does_not_may_join_again(hmm):
    hmm.add_device(1)
    kill(hmm, 1)
    with pytest.raises(MemoryWorkerError, match="its memory is lost"):
        hmm.add_device(1)
    hmm.require((0,))
    assert hmm.device_ids() == (0,)
    execute(hmm, *SCALE_UP)
    assert hmm.device_ids() == (0, 1)
    kill(hmm, 0)
    for _ in range(2):
        with pytest.raises(MemoryLostError, match=r"devices \[0\] have died"):
            hmm.require((0, 1))
    assert hmm.dead_workers() == (0,), "it is not forgotten"
