"""Weights from disk instead of from peers, and requests that go on without their KV.

    instance/manager.py --AttachMessages--> [DiskAttach] --Attach(disk_experts, loads_trunk)--> rank
    Scaling.freeze --FrozenInstance--> [without_kv] --> Instances.activate

The paper's baselines read everything and compute KV again; elastic scaling without peer copies
reads only what no device of the present placement has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import msgspec

from sgl_elastic.instance import rank_messages as m
from sgl_elastic.instance.handover import FrozenInstance, SocketOf, attach_messages
from sgl_elastic.types import AdapterEntry, Placement


@dataclass(frozen=True)
class DiskAttach:
    """`AttachMessages` of an InstanceManager whose later instances read from disk.

    `present` is asked what serves, with whose devices memory is shared; None: nothing is shared.
    """

    present: Callable[[], Placement] | None

    def __call__(
        self,
        placement: Placement,
        adapters: Iterable[AdapterEntry],
        socket_of: SocketOf,
        must_load: bool,
    ) -> list[m.Attach]:
        attaches = attach_messages(placement, adapters, socket_of, must_load)
        if must_load:  # the first instance, by the loader's own way
            return attaches
        return read_from_disk(attaches, placement, self.present and self.present())


def read_from_disk(
    attaches: list[m.Attach], placement: Placement, present: Placement | None
) -> list[m.Attach]:
    """The same messages, one a rank of `placement`, that say what to read from disk.

    What a device has already by the placement `present` is not read; None: it has nothing.
    """
    return [
        msgspec.structs.replace(
            attach,
            disk_experts=tuple(
                e for e in attach.expert_ids if present is None or present.homes[e] != device_id
            ),
            loads_trunk=present is None or device_id not in present.device_ids,
        )
        for device_id, attach in zip(placement.device_ids, attaches, strict=True)
    ]


def without_kv(frozen: FrozenInstance) -> FrozenInstance:
    """The requests' states alone: their KV will be computed again."""
    return replace(frozen, ranks=tuple(m.Frozen((), each.requests) for each in frozen.ranks))
