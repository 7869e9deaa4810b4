"""A memory worker, as whoever needs memory sees it: one method for each verb.

    control.py, mapping.py, worker.py (as a peer) --> [DeviceClient] --> WorkerConnection --> worker
                                                            '--> pages, as handles of this process

Every method raises the error that the worker names, or MemoryWorkerError when it is gone, slow or
hangs, or answers what it would not. Verbs may be repeated, so a broken connection is made anew by
the next call; a worker that was started again has other pages, and is refused. Requests are
numbered, so that a late or doubled answer is never taken for that of another request, and so that
a worker does not do later what was given up here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import sgl_vmm

from sgl_elastic import wire
from sgl_elastic.errors import ElasticError, MemoryWorkerError, WireError
from sgl_elastic.memory import messages
from sgl_elastic.memory.connection import Answer, WorkerConnection
from sgl_elastic.memory.messages import Pages, Request, Usage
from sgl_elastic.memory.runs import Run, Runs, Slots
from sgl_elastic.types import MemoryShape

ImportedSpans = list[tuple[int, list[sgl_vmm.Handle]]]  # (first page position, its handles)


class DeviceClient:
    """One device's worker behind its socket. Safe for many threads; calls wait for each other.

    `timeout_s` bounds every call that is not given another limit; a worker that hangs fails every
    call after HANG_S, and at once from then on, until it goes on. Raises MemoryWorkerError if
    nobody answers.
    """

    def __init__(self, path: Path | str, timeout_s: float) -> None:
        self._connection = WorkerConnection(Path(path), timeout_s)
        self._lock = threading.RLock()
        self._backend: sgl_vmm.Backend | None = None  # all handles are of this one
        self._handles: dict[int, sgl_vmm.Handle] = {}  # by the worker's page id
        self.info = self._connection.info

    @property
    def is_in_doubt(self) -> bool:
        """After a call that failed: whether the worker may have done it all the same."""
        return self._connection.is_closed

    def close(self) -> None:
        """Close the connection; imported pages stay."""
        with self._lock:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hello(self) -> messages.Hello:
        """Who answers: device, process, backend, page size, budget."""
        return self._call(messages.AskHello(), messages.Hello)

    def define(self, shape: MemoryShape) -> None:
        """Tell the worker its regions; the same shape again is fine."""
        self._call(messages.Define(shape), messages.Done)

    def map_slots(self, slots: Slots, timeout_s: float | None = None) -> dict[str, Runs]:
        """Pages behind slots, all or nothing. Returns the slots that had none before."""
        answer = self._call(messages.MapSlots(_plain(slots)), messages.Changed, timeout_s)
        return answer.slots

    def unmap_slots(self, slots: Slots, timeout_s: float | None = None) -> dict[str, Runs]:
        """Take pages back. Returns the slots that had some. Nobody may use them any more."""
        answer = self._call(messages.UnmapSlots(_plain(slots)), messages.Changed, timeout_s)
        return answer.slots

    def mark_loaded(self, slots: Slots, *, is_loaded: bool = True) -> None:
        """The content of mapped slots is valid, or no longer."""
        self._call(messages.MarkLoaded(_plain(slots), is_loaded), messages.Done)

    def copy_from(
        self,
        source: Path | str,
        slots: Slots,
        *,
        verify: bool = False,
        by_bytes: bool = False,
        timeout_s: float | None = None,
    ) -> messages.Copied:
        """Copy slots from the worker at `source`. Returns those that were not loaded before.

        They must have pages here, and valid content there. `by_bytes`: it is on another node.
        Raises PeerCopyError when bytes did not arrive; those slots then are not loaded.
        """
        request = messages.CopyFrom(str(source), _plain(slots), verify, by_bytes)
        return self._call(request, messages.Copied, timeout_s)

    def usage(self) -> Usage:
        """What takes how much."""
        return self._call(messages.AskUsage(), Usage)

    def digest(self, region: str, slot: int) -> str:
        """xxh3 of a slot's bytes, in hexadecimal."""
        return self._call(messages.AskDigest(region, slot), messages.Digest).digest

    def expert_slots(self) -> messages.ExpertSlots:
        """Which slots of EXPERT regions have pages, and valid content."""
        return self._call(messages.AskExperts(), messages.ExpertSlots)

    def stop(self) -> None:
        """Ask the worker to end; it has not ended yet when this returns."""
        self._call(messages.Stop(), messages.Done)

    def import_pages(
        self,
        backend: sgl_vmm.Backend,
        slots: Slots,
        *,
        must_be_loaded: bool = False,
        timeout_s: float | None = None,
    ) -> dict[str, ImportedSpans]:
        """The pages under slots, by region, as handles of this process's `backend`.

        It is of the worker's kind and page size, and the same in every call. Handles stay imported,
        one a page, until `forget_pages`. Raises MemoryWorkerError for slots without pages,
        PeerCopyError for slots whose content is not valid (`must_be_loaded`).
        """
        request = messages.AskPages(_plain(slots), must_be_loaded)
        spans: dict[str, ImportedSpans] = {name: [] for name in slots}
        with self._lock:
            for run in self._receive_pages(backend, request, timeout_s):
                handles = [self._handle(page_id) for page_id in run.page_ids]
                spans.setdefault(run.region, []).append((run.first, handles))
        return spans

    def read(
        self, slots: Slots, *, must_be_loaded: bool = False, timeout_s: float | None = None
    ) -> Iterator[messages.Part]:
        """The bytes of slots, part by part, in the order in which the slots are named.

        Raises as `import_pages` does. Other calls wait until the last part has been taken.
        """
        with self._lock:
            self._connection.send(messages.AskBytes(_plain(slots), must_be_loaded), timeout_s)
            position, is_last = 0, False
            try:
                while not is_last:
                    part, fds = self._connection.receive(messages.Part, timeout_s)
                    fds.close()
                    if part.position != position:
                        raise WireError(f"the worker sent byte {part.position}, not {position}")
                    position, is_last = position + len(part.data), part.is_last
                    yield part
            finally:
                if not is_last:  # parts that nobody will read may follow
                    self._connection.drop()

    def import_scratch(self, backend: sgl_vmm.Backend) -> sgl_vmm.Handle:
        """The worker's scratch page as a handle of this process's `backend`."""
        with self._lock:
            [run] = self._receive_pages(backend, messages.AskScratch(), None)
            return self._handle(run.page_ids[0])

    def forget_pages(self) -> None:
        """Destroy all imported handles, of which none may be mapped. Raises MemoryWorkerError."""
        with self._lock:
            handles, self._handles = self._handles, {}
            self._connection.drop()  # a new one is sent all pages again
            backend, self._backend = self._backend, None
            if backend is None:
                return
            for handle in handles.values():
                try:
                    backend.destroy(handle)
                except sgl_vmm.VmmError as error:
                    raise MemoryWorkerError(f"cannot forget a page: {error}") from error

    def _call(self, request: Request, kind: type[Answer], timeout_s: float | None = None) -> Answer:
        with self._lock:
            return self._connection.ask(request, kind, timeout_s)

    def _receive_pages(
        self, backend: sgl_vmm.Backend, request: Request, timeout_s: float | None
    ) -> list[messages.PageRun]:
        """All parts of an answer; pages are imported as they come, so few descriptors are open."""
        if self._backend not in (None, backend):
            raise MemoryWorkerError("a client imports pages for one backend: make another client")
        self._backend = backend
        self._connection.send(request, timeout_s)
        runs: list[messages.PageRun] = []
        is_last = False
        while not is_last:
            pages, fds = self._connection.receive(Pages, timeout_s)
            with fds:
                try:
                    for export in pages.exports:
                        self._import(backend, export, fds)
                except (ElasticError, sgl_vmm.VmmError, OSError) as error:
                    self._connection.drop()  # parts that nobody will read may follow
                    raise MemoryWorkerError(f"cannot import a page: {error}") from error
            runs.extend(pages.runs)
            is_last = pages.is_last
        return runs

    def _import(
        self, backend: sgl_vmm.Backend, export: messages.PageExport, fds: wire.ReceivedFds
    ) -> None:
        if export.page_id in self._handles:  # from an earlier connection; pages never change
            return
        fd = -1 if export.fd_index < 0 else fds.copy(export.fd_index)
        exported = sgl_vmm.Exported(fd, export.key, export.num_bytes)
        try:
            self._handles[export.page_id] = backend.import_handle(exported)
        except sgl_vmm.VmmError:
            wire.ReceivedFds([fd]).close()
            raise

    def _handle(self, page_id: int) -> sgl_vmm.Handle:
        if page_id not in self._handles:
            self._connection.drop()
            raise WireError(f"the worker at {self._connection.path} did not send page {page_id}")
        return self._handles[page_id]


def _plain(slots: Mapping[str, Sequence[Run]]) -> dict[str, tuple[Run, ...]]:
    return {name: tuple(runs) for name, runs in slots.items()}
