"""The HMM's control plane: starts the devices' workers and does a plan's memory steps on them.

    coordinator --> [Hmm] --DeviceClient--> worker of device 0, 1, ..  (CopyFrom: worker to worker)

Undo takes back exactly what `execute` changed: pages that were there before a step stay. What a
device was told to do is remembered until it is undone, unmapped, or `commit` says that it stands.
What could not be taken back because the worker hangs, or may have been done although no answer
came, is pending: nothing else is done on that device before.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from sgl_elastic import wire
from sgl_elastic.errors import ElasticError, MemoryLostError, MemoryWorkerError
from sgl_elastic.memory import partial_adapters, processes
from sgl_elastic.memory.client import DeviceClient
from sgl_elastic.memory.messages import Usage
from sgl_elastic.memory.processes import Here, Launcher, Worker, WorkerOptions
from sgl_elastic.memory.runs import Runs, Slots, difference, merge, pages_under
from sgl_elastic.memory.slots import adapter_slots, expert_slots, kv_slots, trunk_slots
from sgl_elastic.types import AdapterEntry, MemoryShape, Placement, Step, StepKind

logger = logging.getLogger(__name__)

Changes = dict[str, Runs]  # slots, by region, that a step changed

_MAPPING = frozenset({StepKind.MAP_TRUNK, StepKind.MAP_EXPERTS, StepKind.MAP_KV})
_AFTER_THE_SWITCH = frozenset({StepKind.UNMAP_EXPERTS, StepKind.REMOVE_DEVICE})


class Hmm:
    """All devices' memory. `execute` and `undo` are for one thread, the others for any.

    `budget_bytes` has all devices that may ever be added. Sockets go to `directory`, which is made
    with mode 0700 (ElasticConfigError if it has another). `timeout_s` bounds every call,
    `copy_timeout_s` those that copy or map pages, `start_timeout_s` a worker's start.
    `verify_copies` compares the digests of all copied slots. `library` is the vendor's; "" = its
    usual name. `launcher` says where workers run; None = here.
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
    ) -> None:
        wire.make_private(directory)
        self._launcher = launcher or Here(directory)
        self._budget_bytes = dict(budget_bytes)
        self._page_bytes = page_bytes
        self._copy_timeout_s = copy_timeout_s
        self._options = WorkerOptions(backend, library, page_bytes, timeout_s, start_timeout_s)
        self._verify_copies = verify_copies
        self._shape: MemoryShape | None = None
        self._adapters: tuple[AdapterEntry, ...] = ()
        self._reserve_pages = 0  # of each device, for adapters
        self._workers: dict[int, Worker] = {}
        self._workers_lock = threading.Lock()  # starting and ending workers
        self._changes: dict[Step, Changes] = {}  # what executed steps changed
        self._pending_unmap: dict[int, Changes] = {}  # slots that are to be unmapped, by device
        self._actions: Mapping[StepKind, Callable[[Step], Changes]] = {
            StepKind.ADD_DEVICE: self._add,
            StepKind.MAP_TRUNK: lambda s: self._map(s, trunk_slots(self.shape())),
            StepKind.MAP_EXPERTS: lambda s: self._map(s, self._experts(s)),
            StepKind.MAP_KV: lambda s: self._map(s, kv_slots(self.shape(), s.num_tokens)),
            StepKind.COPY_TRUNK: lambda s: self._copy(s, trunk_slots(self.shape())),
            StepKind.COPY_EXPERTS: lambda s: self._copy(s, self._experts(s)),
            StepKind.UNMAP_EXPERTS: self._unmap_experts,
            StepKind.REMOVE_DEVICE: self._remove,
        }

    def shape(self) -> MemoryShape:
        """What the model's memory looks like. Raises MemoryWorkerError before `define`."""
        if self._shape is None:
            raise MemoryWorkerError("the model's memory shape is not known yet: define it first")
        return self._shape

    def define(self, shape: MemoryShape) -> None:
        """Tell all devices, later ones too, the regions. Another shape later is refused."""
        if shape.page_bytes != self._page_bytes:
            raise MemoryWorkerError(
                f"the shape has pages of {shape.page_bytes} bytes, the workers of "
                f"{self._page_bytes}: start them with the same"
            )
        for device_id in self.device_ids():
            self.client(device_id).define(shape)
        self._shape = shape

    def adapters(self) -> tuple[AdapterEntry, ...]:
        """The adapters whose experts go with the base's."""
        return self._adapters

    def set_adapters(self, adapters: tuple[AdapterEntry, ...]) -> None:
        """From now on these; their pages are mapped and loaded by the engines' ranks."""
        self._adapters = adapters

    def drop_partial_adapters(self, placement: Placement) -> None:
        """A rank was lost: adapters that are whole stay, and the pages of others are taken back.

        No rank may be attached. Raises MemoryWorkerError.
        """
        self._adapters = partial_adapters.drop_partial_adapters(
            self.shape(), placement, self._adapters, self.client
        )

    def device_ids(self) -> tuple[int, ...]:
        """Devices that have a worker, ascending; dead ones too, until they are removed."""
        return tuple(sorted(self._workers))

    def reserve_for_adapters(self, num_bytes: int) -> None:
        """KV is to leave so much of each device to adapters, those that are there included.

        Otherwise it would take all that is left, and no adapter could be loaded later.
        """
        self._reserve_pages = -(-num_bytes // self._page_bytes)

    def headroom_pages(self) -> int:
        """What KV leaves of a device now: the reserve, less what the present adapters take."""
        return max(0, self._reserve_pages - self._adapter_pages())

    def budget_pages(self, device_id: int) -> int:
        """The most pages of a device, added or not. Raises MemoryWorkerError for an unknown one."""
        if device_id not in self._budget_bytes:
            raise MemoryWorkerError(
                f"device {device_id} has no memory budget; there are {sorted(self._budget_bytes)}"
            )
        return self._budget_bytes[device_id] // self._page_bytes

    def _adapter_pages(self) -> int:
        """The most that the present adapters take on any device."""
        if self._shape is None:
            return 0
        everything = range(self._shape.num_experts)
        return sum(
            sum(count for _, count in pages_under(runs, region.slot_bytes, self._page_bytes))
            for adapter in self._adapters
            for name, runs in adapter_slots(self._shape, adapter, everything).items()
            for region in self._shape.regions
            if region.name == name
        )

    def socket_path(self, device_id: int, seen_from: int | None = None) -> Path:
        """Where the device's worker listens, on the node of another device, or (None) here."""
        return self._launcher.socket_path(device_id, seen_from)

    def node_name(self, device_id: int) -> str:
        """Where a device is; "" on one machine."""
        return self._launcher.node_name(device_id)

    def are_apart(self, one: int, other: int) -> bool:
        """Whether two devices are on different nodes: bytes go between them, pages do not."""
        return self._launcher.are_apart(one, other)

    def client(self, device_id: int) -> DeviceClient:
        """The device's verbs. Raises MemoryWorkerError without a worker, or with a dead one."""
        worker = self._workers.get(device_id)
        if worker is None:
            raise MemoryWorkerError(f"device {device_id} has no memory worker: add the device")
        if worker.process.poll() is not None:
            raise MemoryWorkerError(
                f"the memory worker of device {device_id} ended with {worker.process.returncode}: "
                "its memory is lost; remove the device, and see the log for the reason"
            )
        return worker.client

    def usage(self) -> Mapping[int, Usage]:
        """Usage of every device whose worker answers; never waits for a copy of whole regions."""
        found: dict[int, Usage] = {}
        for device_id, worker in sorted(dict(self._workers).items()):
            try:
                found[device_id] = worker.watch.usage()
            except ElasticError as error:
                logger.warning("no usage of device %d: %s", device_id, error)
        return MappingProxyType(found)

    def dead_workers(self) -> tuple[int, ...]:
        """Devices whose worker has ended although nobody removed it."""
        workers = sorted(dict(self._workers).items())
        return tuple(d for d, worker in workers if worker.process.poll() is not None)

    def require(self, device_ids: Iterable[int]) -> None:
        """Workers that have died are forgotten, so that their devices may be added again.

        Not those of `device_ids`, whose pages are in use. Raises MemoryLostError for these.
        """
        dead = set(self.dead_workers())
        for device_id in dead - set(device_ids):
            self.remove_device(device_id)
        for device_id in set(self._pending_unmap) - dead:
            self._settle_if_possible(device_id)
        lost = sorted(dead & set(device_ids))
        if lost:
            raise MemoryLostError(
                f"the memory workers of devices {lost} have died: the engine goes on with the "
                "pages it has mapped, but nothing can be copied from there; restart the server"
            )

    def add_device(self, device_id: int) -> bool:
        """Start the device's worker; False if it has one. Raises MemoryWorkerError."""
        with self._workers_lock:
            if device_id in self._workers:
                self.client(device_id)
                return False
            self._workers[device_id] = processes.start(
                self._options,
                self._launcher,
                device_id,
                self.budget_pages(device_id) * self._page_bytes,
                self._shape,
            )
            return True

    def remove_device(self, device_id: int) -> None:
        """End the device's worker, dead or alive; harmless without one. Its memory is gone then."""
        with self._workers_lock:
            worker = self._workers.pop(device_id, None)
            if worker is not None:
                processes.end(worker)
            self._launcher.clean(device_id)
        self._changes = {s: c for s, c in self._changes.items() if s.device_id != device_id}
        self._pending_unmap.pop(device_id, None)

    def close(self) -> None:
        """End all workers."""
        for device_id in self.device_ids():
            self.remove_device(device_id)

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

    def execute(self, step: Step) -> None:
        """Do a step that is memory's; a second time does nothing. Raises StepFailedError's kin."""
        action = self._actions.get(step.kind)
        if action is None:
            raise MemoryWorkerError(f"{step.kind} is a step of the engine, not of memory")
        self._settle(step.device_id)
        try:
            changes = action(step)
        except ElasticError:
            self._owe_what_may_be_done(step)
            raise
        if step.kind in _AFTER_THE_SWITCH:
            return
        earlier = self._changes.get(step, {})
        self._changes[step] = {
            name: merge((*earlier.get(name, ()), *changes.get(name, ())))
            for name in {**earlier, **changes}
        }

    def undo(self, step: Step) -> None:
        """Take back what `execute` of this step changed; nothing if it was not executed.

        On a worker that has died there is nothing to take back. Steps that run after the switch
        have no undo: MemoryWorkerError.
        """
        if step.kind in _AFTER_THE_SWITCH:
            raise MemoryWorkerError(f"{step.kind} on device {step.device_id} cannot be undone")
        if step not in self._changes:
            return
        changes = self._changes[step]
        if step.kind is StepKind.ADD_DEVICE:
            if _STARTED in changes:
                self.remove_device(step.device_id)
        elif step.device_id not in self.dead_workers():
            self._undo_slots_or_end(step, changes)
        self._changes.pop(step, None)

    def commit(self) -> None:
        """What was executed stands: a later undo of the same steps takes nothing back."""
        self._changes.clear()

    def _add(self, step: Step) -> Changes:
        return {_STARTED: ()} if self.add_device(step.device_id) else {}

    def _remove(self, step: Step) -> Changes:
        self.remove_device(step.device_id)
        return {}

    def _map(self, step: Step, slots: Slots) -> Changes:
        return self.client(step.device_id).map_slots(slots, self._copy_timeout_s)

    def _copy(self, step: Step, slots: Slots) -> Changes:
        self.client(step.source_id)  # a dead source is named as such
        return self.client(step.device_id).copy_from(
            self.socket_path(step.source_id, step.device_id),
            slots,
            verify=self._verify_copies,
            by_bytes=self.are_apart(step.source_id, step.device_id),
            timeout_s=self._copy_timeout_s,
        )

    def _unmap_experts(self, step: Step) -> Changes:
        slots = self._experts(step)
        self.client(step.device_id).unmap_slots(slots, self._copy_timeout_s)
        self._forget(step.device_id, slots)
        return {}

    def _undo_slots_or_end(self, step: Step, changes: Changes) -> None:
        """Of a worker that this scale has started all is taken back by the undo of its start."""
        try:
            self._undo_slots(step, changes)
        except MemoryWorkerError as error:
            if _STARTED not in self._changes.get(Step(StepKind.ADD_DEVICE, step.device_id), {}):
                raise
            logger.warning("device %d ends with what it has: %s", step.device_id, error)

    def _undo_slots(self, step: Step, changes: Changes) -> None:
        client = self.client(step.device_id)
        if step.kind not in _MAPPING:
            client.mark_loaded(changes, is_loaded=False)
            return
        self._owe(step.device_id, changes)
        client.unmap_slots(changes, self._copy_timeout_s)
        self._forget(step.device_id, changes)

    def _owe_what_may_be_done(self, step: Step) -> None:
        """A failed step has changed nothing, unless its answer is what failed.

        Only experts can come to a device that stays; one that joins ends, with all its pages. KV
        is mapped again under the serving instance, whose pages these may be.
        """
        worker = self._workers.get(step.device_id)
        if step.kind is StepKind.MAP_EXPERTS and worker is not None and worker.client.is_in_doubt:
            self._owe(step.device_id, self._experts(step))
            self._settle_if_possible(step.device_id)

    def _owe(self, device_id: int, slots: Slots) -> None:
        """These slots must be unmapped before anything else happens on the device."""
        pending = self._pending_unmap.get(device_id, {})
        self._pending_unmap[device_id] = {
            name: merge((*pending.get(name, ()), *slots.get(name, ())))
            for name in {**pending, **slots}
        }

    def _settle(self, device_id: int) -> None:
        """Unmap what is pending. Raises MemoryWorkerError while that is impossible."""
        pending = self._pending_unmap.get(device_id)
        if pending:
            self.client(device_id).unmap_slots(pending, self._copy_timeout_s)
            self._forget(device_id, pending)

    def _settle_if_possible(self, device_id: int) -> None:
        try:
            self._settle(device_id)
        except ElasticError as error:
            logger.warning("device %d keeps pages that are not its own yet: %s", device_id, error)

    def _forget(self, device_id: int, slots: Slots) -> None:
        """Slots that are unmapped now are no longer what any earlier step changed."""
        for step, changes in self._changes.items():
            if step.device_id == device_id:
                self._changes[step] = _less(changes, slots)
        if device_id in self._pending_unmap:
            self._pending_unmap[device_id] = _less(self._pending_unmap[device_id], slots)

    def _experts(self, step: Step) -> dict[str, Runs]:
        return expert_slots(self.shape(), self._adapters, step.expert_ids)


_STARTED = "(worker)"  # in the changes of ADD_DEVICE: this step started it


def _less(changes: Changes, slots: Slots) -> Changes:
    started: Changes = {_STARTED: ()} if _STARTED in changes else {}
    return started | difference(changes, slots)
