"""Pages of copies of experts on all devices: mapped, filled from the experts' homes, taken back.

coordinator/expert_copies.py --> [CopiedExperts] --DeviceClient--> workers

Nobody reads a copy before the ranks are told of it, nor after they are told that it goes; so these
changes need no undo. What is there is asked of the workers, never remembered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sgl_elastic.memory.control import Hmm
from sgl_elastic.memory.runs import Slots, difference, union
from sgl_elastic.memory.slots import copy_slots, expert_slots
from sgl_elastic.plan.pages import device_pages
from sgl_elastic.plan.redundancy import copies_by_layer, most_copy_pages
from sgl_elastic.types import AdapterEntry, ExpertCopy, MemoryShape, Placement


class CopiedExperts:
    """The HMM, as copies of experts need it. For the thread that carries operations out."""

    def __init__(
        self, hmm: Hmm, most_per_device: int, *, verify: bool, timeout_s: float = 600.0
    ) -> None:
        """most_per_device: of a layer, for which KV leaves room on every device."""
        self._hmm = hmm
        self._most = most_per_device
        self._verify = verify
        self._timeout_s = timeout_s

    def shape(self) -> MemoryShape:
        """What the model's memory looks like on any device."""
        return self._hmm.shape()

    def adapters(self) -> tuple[AdapterEntry, ...]:
        """The adapters whose experts go with the base's."""
        return self._hmm.adapters()

    def free_pages(self, placement: Placement) -> dict[int, int]:
        """Device -> pages that are left for copies; what adapters may need later is not."""
        shape, adapters = self.shape(), self.adapters()
        kept = self._hmm.headroom_pages() - most_copy_pages(shape, self._most, adapters)
        return {
            device_id: self._hmm.budget_pages(device_id)
            - kept
            - device_pages(
                shape, placement.experts_of(device_id), adapters, placement.kv_tokens_of(device_id)
            )
            for device_id in placement.device_ids
        }

    def place(self, placement: Placement, copies: Sequence[ExpertCopy]) -> int:
        """Pages and content for the copies that are not there yet.

        Returns the bytes copied. Raises StepFailedError's kin; some copies may be there then.
        """
        self._hmm.require(placement.device_ids)
        num_bytes = 0
        for device_id in placement.device_ids:
            client = self._hmm.client(device_id)
            slots = self._slots(copies, device_id)
            client.map_slots(slots, self._timeout_s)
            for source_id, wanted in self._sources(placement, copies, device_id):
                num_bytes += client.copy_from(
                    self._hmm.socket_path(source_id, device_id),
                    wanted,
                    verify=self._verify,
                    timeout_s=self._timeout_s,
                ).num_bytes
        return num_bytes

    def drop(self, placement: Placement, kept: Sequence[ExpertCopy] = ()) -> None:
        """Pages of experts go back where neither the placement nor `kept` has them.

        No rank may have them mapped. Harmless to repeat. Raises MemoryWorkerError.
        """
        for device_id in placement.device_ids:
            client = self._hmm.client(device_id)
            home = expert_slots(self.shape(), self.adapters(), placement.experts_of(device_id))
            wanted = union(home, self._slots(kept, device_id))
            surplus = difference(client.expert_slots().mapped, wanted)
            if surplus:
                client.unmap_slots(surplus, self._timeout_s)

    def _slots(self, copies: Sequence[ExpertCopy], device_id: int) -> Slots:
        return copy_slots(self.shape(), self.adapters(), copies_by_layer(copies, device_id))

    def _sources(
        self, placement: Placement, copies: Sequence[ExpertCopy], device_id: int
    ) -> Iterator[tuple[int, Slots]]:
        """Each device that is the home of some of the device's copies, with their slots."""
        for source_id in placement.device_ids:
            theirs = [copy for copy in copies if placement.homes[copy.expert_id] == source_id]
            slots = self._slots(theirs, device_id)
            if slots:
                yield source_id, slots
