"""Memory without an IPC-safe allocator: what a device gets lands in a staging buffer first.

    source worker --copy--> [staging worker of the device] --copy--> the device's worker

The paper's ablation of its IpcSafeAllocator: tensors from an ordinary allocator cannot be opened by
another process, so what is exchanged is copied to memory that can, and from there to its place. The
buffer takes as many bytes as the copy and is given back after it. It is counted by `resident`
figures, but not by plans: it comes on top of --device-memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sgl_elastic.memory.control import Changes, Hmm
from sgl_elastic.memory.runs import Slots
from sgl_elastic.types import Step


class StagedMemory(Hmm):
    """An Hmm of twice as many workers: that of device d + `num_devices` stages for device d."""

    def __init__(
        self, directory: Path, budget_bytes: dict[int, int], num_devices: int, **options: Any
    ) -> None:
        staging = {d + num_devices: num_bytes for d, num_bytes in budget_bytes.items()}
        super().__init__(directory, {**budget_bytes, **staging}, **options)
        self._num_devices = num_devices

    def add_staging(self) -> None:
        """Start the staging workers, which hold nothing between copies, so that no scale waits."""
        for device_id in range(self._num_devices):
            self.add_device(device_id + self._num_devices)

    def _copy(self, step: Step, slots: Slots) -> Changes:
        self.client(step.source_id)  # a dead source is named as such
        staging_id = step.device_id + self._num_devices
        self.add_device(staging_id)
        staging, timeout_s = self.client(staging_id), self._copy_timeout_s
        staging.map_slots(slots, timeout_s)
        try:
            staging.copy_from(self.socket_path(step.source_id), slots, timeout_s=timeout_s)
            return self.client(step.device_id).copy_from(
                self.socket_path(staging_id),
                slots,
                verify=self._verify_copies,
                timeout_s=timeout_s,
            )
        finally:
            staging.unmap_slots(slots, timeout_s)
