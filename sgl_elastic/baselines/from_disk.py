"""Instances whose weights come from disk: the paper's baselines, and elastic without peer copies.

    coordinator --> [DiskInstances] --Attach(disk_experts, loads_trunk)--> ranks read and answer

With `shares_memory` only what no device of the present placement has is read, and KV is handed
over; without it everything is read, and requests go on after their KV has been computed again.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from sgl_elastic.errors import EngineFailedError
from sgl_elastic.instance import handover
from sgl_elastic.instance import rank_messages as m
from sgl_elastic.instance.manager import InstanceManager
from sgl_elastic.types import Placement


@dataclass(frozen=True)
class _LetGo:
    """What is left of an instance that gave its memory up."""

    instance_id: str
    device_ids: tuple[int, ...]
    frozen: tuple[m.Frozen, ...]


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


def without_kv(frozen: tuple[m.Frozen, ...]) -> tuple[m.Frozen, ...]:
    """The requests' states alone: their KV will be computed again."""
    return tuple(m.Frozen((), each.requests) for each in frozen)


class DiskInstances(InstanceManager):
    """An InstanceManager whose later instances read from disk. `CutOverInstances` besides."""

    def __init__(self, *args: Any, shares_memory: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self._shares_memory = shares_memory
        self._let_go: _LetGo | None = None

    def serving(self) -> tuple[str, Placement]:
        if self._active and self._active not in self._running:
            raise EngineFailedError(
                f"{self._active} was let go and no instance has taken its place: restart the server"
            )
        return super().serving()

    def keep_standbys(self, stop: threading.Event) -> None:
        if self._standbys.capacity_ranks and self._active in self._running:
            super().keep_standbys(stop)

    def let_go(self, instance: str) -> None:
        """A frozen instance gives its memory up; who it served is remembered for `activate`.

        It parks or ends as after any switch. Harmless a second time.
        """
        if self._let_go is not None and self._let_go.instance_id == instance:
            return
        running = self._running[instance]
        devices, frozen = running.record.device_ids, tuple(running.frozen)
        self.retire(instance)
        self._let_go = _LetGo(instance, devices, frozen)

    def activate(self, instance: str, old: str, kv_moves: Mapping[int, int]) -> None:
        if self._shares_memory:
            super().activate(instance, old, kv_moves)
            return
        new = self._running[instance]
        devices, frozen = self._frozen_of(old)
        activations, self._handed = handover.hand_over(
            devices,
            without_kv(frozen),
            new.record.device_ids,
            kv_moves,
            self._hmm.socket_path,
            self._hmm.are_apart,
        )
        self._take_over(new, activations)
        self._let_go = None

    def _frozen_of(self, old: str) -> tuple[tuple[int, ...], tuple[m.Frozen, ...]]:
        left = self._let_go
        if left is not None and left.instance_id == old:
            return left.device_ids, left.frozen
        running = self._running[old]
        return running.record.device_ids, tuple(running.frozen)

    def _attach_messages(self, placement: Placement, *, must_load: bool) -> list[m.Attach]:
        attaches = super()._attach_messages(placement, must_load=must_load)
        if must_load:  # the first instance, by the loader's own way
            return attaches
        present = self.serving()[1] if self._shares_memory else None
        return read_from_disk(attaches, placement, present)
