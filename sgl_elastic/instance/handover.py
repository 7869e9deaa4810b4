"""What ranks are told when memory or requests become theirs: a pure part of manager.py.

    placement, adapters --> [attach_messages] --> Attach, one a rank
    FrozenInstance, new devices --> [hand_over] --> Activate, one a rank, and HandedOver

A rank takes over the KV of its own device in place. What a leaving device holds is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from sgl_elastic.instance import rank_messages as m
from sgl_elastic.types import AdapterEntry, Placement, Step, StepKind

# device id, device id of who asks -> path of the former's memory worker's socket
SocketOf = Callable[[int, int], object]
AreApart = Callable[[int, int], bool]  # whether two devices are on different nodes


# How ranks come to what they hold: `attach_messages`, or a baseline's own.
AttachMessages = Callable[[Placement, Iterable[AdapterEntry], SocketOf, bool], list[m.Attach]]


@dataclass(frozen=True)
class FrozenInstance:
    """What a frozen instance published: `ranks[r]` by the rank on `device_ids[r]`."""

    instance_id: str
    device_ids: tuple[int, ...]
    ranks: tuple[m.Frozen, ...]

    def num_sent(self) -> dict[str, int]:
        """Tokens of each request that its frozen rank had sent on their way."""
        return {state.rid: state.num_sent for each in self.ranks for state in each.requests}


@dataclass(frozen=True)
class HandedOver:
    """Where frozen requests went: request id -> rank of the new instance.

    KV slots: what the frozen ranks had in use, and of these what the new ranks say they have taken
    over, where it lies or by copying it. The rest is computed again.
    """

    ranks: Mapping[str, int]
    rank_of_old: Mapping[int, int]  # old rank -> new rank, for requests without any token yet
    num_frozen_slots: int = 0
    num_kept_slots: int = 0
    num_copied_slots: int = 0

    def with_taken(self, done: Sequence[m.RankDone]) -> HandedOver:
        """With what the new ranks have answered."""
        return replace(
            self,
            num_kept_slots=sum(each.num_kept_slots for each in done),
            num_copied_slots=sum(each.num_copied_slots for each in done),
        )


def attach_messages(
    placement: Placement,
    adapters: Iterable[AdapterEntry],
    socket_of: SocketOf,
    must_load: bool,
) -> list[m.Attach]:
    """What each rank of the placement maps. With `must_load`, rank 0 reads the trunk for all."""
    return [
        m.Attach(
            socket=str(socket_of(device_id, device_id)),
            expert_ids=placement.experts_of(device_id),
            kv_tokens=placement.kv_tokens_of(device_id),
            adapters=tuple(adapters),
            must_load=must_load,
            loads_trunk=must_load and rank == 0,
        )
        for rank, device_id in enumerate(placement.device_ids)
    ]


def with_reads(
    attaches: Sequence[m.Attach], placement: Placement, reads: Sequence[Step]
) -> list[m.Attach]:
    """The same messages, one a rank of the placement, that say what its rank reads from disk."""
    trunk = {step.device_id for step in reads if step.kind is StepKind.READ_TRUNK}
    experts = {step.device_id: step for step in reads if step.kind is StepKind.READ_EXPERTS}
    nothing = Step(StepKind.READ_EXPERTS, -1)
    return [
        msgspec.structs.replace(
            attach,
            disk_experts=() if (read := experts.get(device_id, nothing)).parts else read.expert_ids,
            disk_parts=read.parts,
            loads_trunk=device_id in trunk,
        )
        for device_id, attach in zip(placement.device_ids, attaches, strict=True)
    ]


def kept_kv(frozen: FrozenInstance, device_ids: Collection[int]) -> FrozenInstance:
    """The requests of all ranks, and KV only of those on these devices: that of others is gone."""
    if set(frozen.device_ids) <= set(device_ids):
        return frozen
    ranks = tuple(
        each if device_id in device_ids else m.Frozen((), each.requests)
        for device_id, each in zip(frozen.device_ids, frozen.ranks, strict=True)
    )
    return replace(frozen, ranks=ranks)


def new_ranks(
    old_devices: Sequence[int], new_devices: Sequence[int], kv_moves: Mapping[int, int]
) -> dict[int, int]:
    """Old rank -> the new rank that goes on with its work: on its device, else by `kv_moves`."""
    device_to_rank = {device_id: rank for rank, device_id in enumerate(new_devices)}
    return {
        rank: device_to_rank[d if d in device_to_rank else kv_moves[d]]
        for rank, d in enumerate(old_devices)
    }


def hand_over(
    old: FrozenInstance,
    new_devices: Sequence[int],
    kv_moves: Mapping[int, int],
    socket_of: SocketOf,
    are_apart: AreApart = lambda one, other: False,
) -> tuple[list[m.Activate], HandedOver]:
    """What each new rank takes over."""
    old_devices, frozen = old.device_ids, old.ranks

    def moved(old_rank: int, device_id: int) -> m.KvMove:
        """The sequence used last first: room may end before they do."""
        source = old_devices[old_rank]
        path, is_apart = str(socket_of(source, device_id)), are_apart(source, device_id)
        return m.KvMove(path, tuple(reversed(frozen[old_rank].sequences)), is_apart)

    rank_of_old = new_ranks(old_devices, new_devices, kv_moves)
    activations = []
    for rank, device_id in enumerate(new_devices):
        sources = [source for source, target in rank_of_old.items() if target == rank]
        stays = [source for source in sources if old_devices[source] == device_id]
        leaves = [source for source in sources if old_devices[source] != device_id]
        activations.append(
            m.Activate(
                sequences=tuple(s for at in stays for s in frozen[at].sequences),
                moves=tuple(moved(at, device_id) for at in leaves),
                requests=tuple(q for at in sources for q in frozen[at].requests),
            )
        )
    states = [(rank_of_old[old], q) for old, each in enumerate(frozen) for q in each.requests]
    ranks = {state.rid: rank for rank, state in states}
    num_frozen_slots = sum(each.num_kv_slots for each in frozen)
    return activations, HandedOver(ranks, rank_of_old, num_frozen_slots)


def frozen_of(states: Sequence[tuple[int, m.RequestState]], num_ranks: int) -> tuple[m.Frozen, ...]:
    """What the ranks of a lost instance would have published: (rank, state) each, but no KV."""
    return tuple(
        m.Frozen((), tuple(state for at, state in states if at % num_ranks == rank))
        for rank in range(num_ranks)
    )
