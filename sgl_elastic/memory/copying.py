"""Copies from another worker: by its pages where they can be mapped, else by its bytes.

    worker.py --CopyFrom--> [Copier] --> DeviceClient --> peer worker
                                        '--> DeviceMemory, under the worker's lock

Which of the two the request says, because only who placed the devices knows what is on one node.
The lock is never held while the peer is waited for: two workers may copy crosswise. Nor is anything
received straight into a slot: should the HMM give up meanwhile and unmap it, nobody may be writing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from sgl_elastic.errors import MemoryWorkerError, PeerCopyError
from sgl_elastic.memory import messages
from sgl_elastic.memory.client import DeviceClient
from sgl_elastic.memory.device import DeviceMemory
from sgl_elastic.memory.runs import Run, Runs, Slots


@dataclass(frozen=True)
class Copier:
    """Copies into one device's memory; `lock` is the one around it, for the request at hand."""

    memory: DeviceMemory
    lock: AbstractContextManager[object]

    def copy_from(self, request: messages.CopyFrom) -> messages.Copied:
        """Copy what is not loaded here."""
        num_bytes = 0
        with self.lock:
            missing = self.memory.not_loaded(request.slots)
        with peer_at(request.socket_path) as peer:
            for region, runs in missing.items():
                copy = self._read if request.by_bytes else self._map
                num_bytes += copy(peer, region, runs)
                if request.verify:
                    self._compare(peer, region, runs)
        return messages.Copied(missing, num_bytes)

    def _map(self, peer: DeviceClient, region: str, runs: Runs) -> int:
        backend = self.memory.backend
        spans = peer.import_pages(backend, {region: runs}, must_be_loaded=True)[region]
        with self.lock:
            return self.memory.copy_in(region, runs, spans)

    def _read(self, peer: DeviceClient, region: str, runs: Runs) -> int:
        slots = {region: runs}
        num_bytes = self._receive(peer.read(slots, must_be_loaded=True), slots)
        with self.lock:
            self.memory.mark_loaded(slots)
        return num_bytes

    def _receive(self, parts: Iterable[messages.Part], slots: Slots) -> int:
        """All bytes of these slots, in their order. Raises PeerCopyError for fewer or more."""
        num_bytes = 0
        for part in parts:
            with self.lock:
                self.memory.write(slots, part.position, part.data)
            num_bytes += len(part.data)
        with self.lock:
            wanted = self.memory.readable(slots)
        if num_bytes != wanted:
            raise PeerCopyError(f"a peer sent {num_bytes} bytes of {wanted}: versions differ")
        return num_bytes

    def _compare(self, peer: DeviceClient, region: str, runs: Sequence[Run]) -> None:
        for slot in (slot for first, count in runs for slot in range(first, first + count)):
            with self.lock:
                ours = self.memory.digest(region, slot)
            theirs = peer.digest(region, slot)
            if ours != theirs:
                with self.lock:
                    self.memory.mark_loaded({region: runs}, is_loaded=False)
                raise PeerCopyError(
                    f"{region} slot {slot} is {ours} here and {theirs} at its source: check the "
                    "link between the devices"
                )


# Another device's worker, as a copy needs it: its pages are imported for a moment only.

PEER_TIMEOUT_S = 30.0  # for each of its answers


@contextmanager
def peer_at(socket_path: str) -> Iterator[DeviceClient]:
    """The worker behind this socket. Raises PeerCopyError if it is gone, slow or refuses."""
    try:
        peer = DeviceClient(socket_path, PEER_TIMEOUT_S)
        try:
            yield peer
        finally:
            peer.forget_pages()
            peer.close()
    except MemoryWorkerError as error:
        raise PeerCopyError(f"a copy from {socket_path} failed: {error}") from error
