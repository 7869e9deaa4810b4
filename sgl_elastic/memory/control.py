"""The HMM's control plane: does a plan's memory steps on the devices' workers, and undoes them.

    coordinator --> [Hmm] --DeviceClient--> worker of device 0, 1, ..  (CopyFrom: worker to worker)

Undo takes back exactly what `execute` changed: pages that were there before a step stay. What a
device was told to do is remembered until it is undone, unmapped, or `commit` says that it stands.
What could not be taken back because the worker hangs, or may have been done although no answer
came, is pending: nothing else is done on that device before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from sgl_elastic import wire
from sgl_elastic.errors import ElasticError, MemoryLostError, MemoryWorkerError
from sgl_elastic.memory import partial_adapters
from sgl_elastic.memory.messages import Copied
from sgl_elastic.memory.runs import Runs, Slots, difference, num_slots, pages_under, union
from sgl_elastic.memory.slots import (
    adapter_slots,
    expert_slots,
    kv_slots,
    kv_slots_above,
    loaded_parts,
    part_slots,
    trunk_slots,
)
from sgl_elastic.memory.worker_processes import DeviceWorkers, Here, Launcher, WorkerOptions
from sgl_elastic.plan.redundancy import most_copy_pages
from sgl_elastic.types import AdapterEntry, Placement, Step, StepKind

logger = logging.getLogger(__name__)

Changes = dict[str, Runs]  # slots, by region, that a step changed

_MAPPING = frozenset({StepKind.MAP_TRUNK, StepKind.MAP_EXPERTS, StepKind.MAP_KV})
_AFTER_THE_SWITCH = frozenset({StepKind.UNMAP_EXPERTS, StepKind.REMOVE_DEVICE})


class Hmm(DeviceWorkers):
    """All devices' memory. `execute` and `undo` are for one thread, the others for any.

    `budget_bytes` has all devices that may ever be added. Sockets go to `directory`, which is made
    with mode 0700 (ElasticConfigError if it has another). `timeout_s` bounds every call,
    `copy_timeout_s` those that copy or map pages, `start_timeout_s` a worker's start.
    `verify_copies` compares the digests of all copied slots. `library` is the vendor's; "" = its
    usual name. `launcher` says where workers run; None = here. `content_of` an adapter's folder
    changes when its files do. KV is to leave room for `num_copies` copies of experts in
    each layer of each device.
    """

    def __init__(
        self,
        directory: Path,
        budget_bytes: Mapping[int, int],
        *,
        backend: str = "host",
        library: str = "",
        page_bytes: int = 2 << 20,
        timeout_s: float = 30.0,
        copy_timeout_s: float = 600.0,
        start_timeout_s: float = 120.0,
        verify_copies: bool = False,
        launcher: Launcher | None = None,
        content_of: Callable[[Path], str | None] = lambda folder: "",
        num_copies: int = 0,
    ) -> None:
        wire.make_private(directory)
        options = WorkerOptions(backend, library, page_bytes, timeout_s, start_timeout_s)
        super().__init__(launcher or Here(directory), budget_bytes, options)
        self._page_bytes = page_bytes
        self._copy_timeout_s = copy_timeout_s
        self._verify_copies = verify_copies
        self._content_of = content_of
        self._adapters: tuple[AdapterEntry, ...] = ()
        self._reserve_pages = 0  # of each device, for adapters
        self._num_copies = num_copies
        self._started: set[int] = set()  # devices that steps have added
        self._changes: dict[Step, Changes] = {}  # what executed steps changed
        self._pending_unmap: dict[int, Changes] = {}  # by device; done first

    def adapters(self) -> tuple[AdapterEntry, ...]:
        """The adapters whose experts go with the base's."""
        return self._adapters

    def set_adapters(self, adapters: tuple[AdapterEntry, ...]) -> None:
        """From now on these; their pages are mapped and loaded by the engines' ranks."""
        self._adapters = adapters

    def drop_partial_adapters(self, placement: Placement, *, keeps_copies: bool = False) -> None:
        """A rank was lost: adapters that are whole stay, and the pages of others are taken back.

        No rank may be attached. `keeps_copies`: what is on a device that is not its home stays.
        Raises MemoryWorkerError.
        """
        self._adapters = partial_adapters.drop_partial_adapters(
            self.shape(), placement, self._adapters, self.client, keeps_copies=keeps_copies
        )

    def drop_changed_adapters(self, expert_ids: Iterable[int]) -> bool:
        """Adapters that replace some of these experts are to be read again: unless they changed.

        Returns whether one has since it was loaded; it is unloaded then.
        """
        wanted = frozenset(expert_ids)
        changed = [
            adapter
            for adapter in self._adapters
            if any(wanted.intersection(ids) for ids in adapter.experts.values())
            and self._content_of(Path(adapter.path)) != adapter.content
        ]
        for adapter in changed:
            logger.error(
                "elastic: adapter %s is unloaded: part of it was lost with a device, and its "
                "folder %s has changed since; load it again",
                adapter.name,
                adapter.path,
            )
        self._adapters = tuple(each for each in self._adapters if each not in changed)
        return bool(changed)

    def reserve_for_adapters(self, num_bytes: int) -> None:
        """KV is to leave so much of each device to adapters, those that are there included.

        Otherwise it would take all that is left, and no adapter could be loaded later.
        """
        self._reserve_pages = -(-num_bytes // self._page_bytes)

    def headroom_pages(self) -> int:
        """What KV leaves of a device now, to adapters and to copies of experts."""
        if self._shape is None:
            return self._reserve_pages
        slot_bytes = {region.name: region.slot_bytes for region in self._shape.regions}
        everything = range(self._shape.num_experts)
        taken = sum(
            num_slots(pages_under(runs, slot_bytes[name], self._page_bytes))
            for adapter in self._adapters
            for name, runs in adapter_slots(self._shape, adapter, everything).items()
        )
        copies = most_copy_pages(self._shape, self._num_copies, self._adapters)
        return max(0, self._reserve_pages - taken) + copies

    def require(self, device_ids: Iterable[int]) -> None:
        """Workers that have died are forgotten, so that their devices may be added again.

        Not those of `device_ids`, whose pages are in use. Raises MemoryLostError for these.
        """
        dead = set(self.dead_workers())
        self.forget(dead - set(device_ids))
        for device_id in set(self._pending_unmap) - dead:
            self._flush_pending_if_possible(device_id)
        if lost := self.lost(device_ids):
            raise MemoryLostError(
                f"the memory workers of devices {list(lost)} have died: the engine goes on with "
                "the pages it has mapped until other devices have what was lost; ask again when "
                "the recovery in GET /v1/scale has ended"
            )

    def lost(self, device_ids: Iterable[int]) -> tuple[int, ...]:
        """Those of these devices whose memory is gone, ascending."""
        there = set(self.device_ids()) - set(self.dead_workers())
        return tuple(sorted(set(device_ids) - there))

    def forget(self, device_ids: Iterable[int]) -> None:
        """Clear up after devices whose memory is gone, so that they may be added again."""
        for device_id in device_ids:
            self.remove_device(device_id)

    def held(self, device_ids: Iterable[int]) -> dict[int, frozenset[tuple[int, int]]]:
        """Device -> (layer id, expert id) that it has with content, the adapters' with it."""
        return {
            device_id: loaded_parts(
                self.shape(), self._adapters, self.client(device_id).expert_slots().loaded
            )
            for device_id in device_ids
        }

    def keep_only(self, placement: Placement) -> None:
        """On its devices no expert stays but the placement's. Raises MemoryWorkerError.

        Of others no rank may be attached.
        """
        for device_id in placement.device_ids:
            own = expert_slots(self.shape(), self._adapters, placement.experts_of(device_id))
            mapped = self.client(device_id).expert_slots().mapped
            if left := difference(mapped, own):
                self._unmap(device_id, left)

    def remove_device(self, device_id: int) -> None:
        """End the device's worker, dead or alive; harmless without one. Its memory is gone then."""
        super().remove_device(device_id)
        self._started.discard(device_id)
        self._changes = {s: c for s, c in self._changes.items() if s.device_id != device_id}
        self._pending_unmap.pop(device_id, None)

    def map_placement(self, placement: Placement) -> None:
        """The first placement: start its devices, and put pages behind all that it needs."""
        for device_id in placement.device_ids:
            experts = placement.experts_of(device_id)
            kv_tokens = placement.kv_tokens_of(device_id)
            self.execute(Step(StepKind.ADD_DEVICE, device_id))
            self.execute(Step(StepKind.MAP_TRUNK, device_id))
            self.execute(Step(StepKind.MAP_EXPERTS, device_id, expert_ids=experts))
            self.execute(Step(StepKind.MAP_KV, device_id, num_tokens=kv_tokens))
        self.commit()

    def execute(self, step: Step) -> int:
        """Do a step that is memory's; a second time does nothing. Raises StepFailedError's kin.

        Returns the bytes that were copied, as the device's worker counted them.
        """
        self._flush_pending(step.device_id)
        try:
            changes, num_bytes = self._do(step)
        except ElasticError:
            self._unmap_what_may_be_mapped(step)
            raise
        if changes:
            self._changes[step] = union(self._changes.get(step, {}), changes)
        return num_bytes

    def undo(self, step: Step) -> None:
        """Take back what `execute` of this step changed; nothing if it was not executed.

        On a worker that has died there is nothing to take back. Steps that run after the switch
        have no undo: MemoryWorkerError.
        """
        device_id = step.device_id
        if step.kind in _AFTER_THE_SWITCH:
            raise MemoryWorkerError(f"{step.kind} on device {device_id} cannot be undone")
        if step.kind is StepKind.ADD_DEVICE and device_id in self._started:
            self.remove_device(device_id)
        if step in self._changes and device_id not in self.dead_workers():
            self._undo_slots(step, self._changes[step])
        self._changes.pop(step, None)

    def commit(self) -> None:
        """What was executed stands: a later undo of the same steps takes nothing back."""
        self._started.clear()
        self._changes.clear()

    def _do(self, step: Step) -> tuple[Changes, int]:
        """Returns what undo has to take back from the device's slots, and the bytes copied."""
        match step.kind:
            case StepKind.ADD_DEVICE:
                if self.add_device(step.device_id):
                    self._started.add(step.device_id)
            case StepKind.REMOVE_DEVICE:
                self.remove_device(step.device_id)
            case StepKind.UNMAP_EXPERTS | StepKind.TRIM_KV:
                self._unmap(step.device_id, self._slots_of(step))
            case StepKind.COPY_TRUNK | StepKind.COPY_EXPERTS:
                copied = self._copy(step, self._slots_of(step))
                return copied.slots, copied.num_bytes
            case StepKind.MAP_TRUNK | StepKind.MAP_EXPERTS | StepKind.MAP_KV:
                slots = self._slots_of(step)
                return self.client(step.device_id).map_slots(slots, self._copy_timeout_s), 0
            case _:
                raise MemoryWorkerError(f"{step.kind} is a step of the engine, not of memory")
        return {}, 0

    def _slots_of(self, step: Step) -> dict[str, Runs]:
        match step.kind:
            case StepKind.MAP_TRUNK | StepKind.COPY_TRUNK:
                return trunk_slots(self.shape())
            case StepKind.MAP_KV:
                return kv_slots(self.shape(), step.num_tokens)
            case StepKind.TRIM_KV:
                return kv_slots_above(self.shape(), step.num_tokens)
            case _ if step.parts:
                return part_slots(self.shape(), self._adapters, step.parts)
            case _:
                return expert_slots(self.shape(), self._adapters, step.expert_ids)

    def _copy(self, step: Step, slots: Slots) -> Copied:
        self.client(step.source_id)  # a dead source is named as such
        return self.client(step.device_id).copy_from(
            self.socket_path(step.source_id, step.device_id),
            slots,
            verify=self._verify_copies,
            by_bytes=self.are_apart(step.source_id, step.device_id),
            timeout_s=self._copy_timeout_s,
        )

    def _unmap(self, device_id: int, slots: Slots) -> None:
        """Take pages back; earlier steps then have changed these slots no longer."""
        self.client(device_id).unmap_slots(slots, self._copy_timeout_s)
        for step, changes in self._changes.items():
            if step.device_id == device_id:
                self._changes[step] = difference(changes, slots)
        if device_id in self._pending_unmap:
            self._pending_unmap[device_id] = difference(self._pending_unmap[device_id], slots)

    def _undo_slots(self, step: Step, changes: Changes) -> None:
        """Of a worker that this scale has started all is taken back by the undo of its start."""
        device_id = step.device_id
        try:
            if step.kind in _MAPPING:
                pending = self._pending_unmap.get(device_id, {})
                self._pending_unmap[device_id] = union(pending, changes)
                self._unmap(device_id, changes)
            else:
                self.client(device_id).mark_loaded(changes, is_loaded=False)
        except MemoryWorkerError as error:
            if device_id not in self._started:
                raise
            logger.warning("device %d ends with what it has: %s", device_id, error)

    def _unmap_what_may_be_mapped(self, step: Step) -> None:
        """A failed step has changed nothing, unless its answer is what failed.

        Only experts can come to a device that stays; one that joins ends, with all its pages. KV
        is mapped again under the serving instance, whose pages these may be.
        """
        worker = self._workers.get(step.device_id)
        if step.kind is StepKind.MAP_EXPERTS and worker is not None and worker.client.is_in_doubt:
            pending = self._pending_unmap.get(step.device_id, {})
            self._pending_unmap[step.device_id] = union(pending, self._slots_of(step))
            self._flush_pending_if_possible(step.device_id)

    def _flush_pending(self, device_id: int) -> None:
        """Unmap what is pending. Raises MemoryWorkerError while that is impossible."""
        if pending := self._pending_unmap.get(device_id):
            self._unmap(device_id, pending)

    def _flush_pending_if_possible(self, device_id: int) -> None:
        try:
            self._flush_pending(device_id)
        except ElasticError as error:
            logger.warning("device %d keeps pages that are not its own yet: %s", device_id, error)
