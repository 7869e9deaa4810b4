"""What new ranks are told when a device is lost: requests of all, KV of those that are left."""

from __future__ import annotations

from sgl_elastic.instance import rank_messages as m
from sgl_elastic.instance.handover import (
    FrozenInstance,
    attach_messages,
    hand_over,
    kept_kv,
    with_reads,
)
from sgl_elastic.types import Placement, Step, StepKind

DEVICES = (0, 2, 3)


def frozen(rank: int) -> m.Frozen:
    """A rank with a sequence and a request of its own."""
    sequence = m.KvSequence(bytes(8), bytes([rank, *bytes(7)]), None, None, 0.0)
    state = m.RequestState(f"r{rank}", bytes(8), 1, {}, {})
    return m.Frozen((sequence,), (state,))


OLD = FrozenInstance("i1", DEVICES, tuple(frozen(rank) for rank in range(3)))


def test_kv_of_a_lost_device_is_left_out_and_its_requests_are_not() -> None:
    kept = kept_kv(OLD, (0, 3))
    assert [len(each.sequences) for each in kept.ranks] == [1, 0, 1]
    activations, handed = hand_over(kept, (0, 3), {2: 3}, lambda one, other: f"device-{one}")
    assert handed.ranks == {"r0": 0, "r1": 1, "r2": 1}
    assert [[state.rid for state in each.requests] for each in activations] == [
        ["r0"],
        ["r1", "r2"],
    ]
    assert [each.sequences for each in activations] == [
        OLD.ranks[0].sequences,
        OLD.ranks[2].sequences,
    ]
    assert [move.sequences for each in activations for move in each.moves] == [()]


def test_kv_that_was_on_the_device_is_not_taken_over_in_fresh_memory() -> None:
    """The lost device is back with an empty worker."""
    activations, _ = hand_over(kept_kv(OLD, (0, 3)), DEVICES, {}, lambda one, other: "")
    assert [len(each.sequences) for each in activations] == [1, 0, 1]
    assert activations[1].requests == OLD.ranks[1].requests


def test_nothing_is_left_out_where_all_are_there() -> None:
    assert kept_kv(OLD, (0, 1, 2, 3)) is OLD


def test_each_rank_reads_its_own() -> None:
    placement = Placement((0, 3), (0, 0, 3, 3), (10, 10))
    attaches = attach_messages(placement, (), lambda one, other: f"device-{one}", False)
    reads = (
        Step(StepKind.READ_EXPERTS, 3, expert_ids=(2, 3), parts=((1, (2, 3)), (2, (3,)))),
        Step(StepKind.READ_EXPERTS, 0, expert_ids=(1,)),
        Step(StepKind.READ_TRUNK, 0),
    )
    told = with_reads(attaches, placement, reads)
    assert [(each.disk_experts, each.disk_parts, each.loads_trunk) for each in told] == [
        ((1,), (), True),
        ((), ((1, (2, 3)), (2, (3,))), False),
    ]
    assert [each.expert_ids for each in told] == [(0, 1), (2, 3)]
