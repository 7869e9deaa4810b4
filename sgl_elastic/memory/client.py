"""A memory worker, as whoever needs memory sees it: one method for each verb.

    control.py, mapping.py, worker.py (as a peer) --> [DeviceClient] --> Unix socket --> worker.py

Every method raises the error that the worker names, or MemoryWorkerError when it is gone, slow or
hangs, or answers what it would not. Verbs may be repeated, so a broken connection is made anew by
the next call; a worker that was started again has other pages, and is refused. Requests are
numbered, so that a late or doubled answer is never taken for that of another request, and so that
a worker does not do later what was given up here.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import sgl_vmm

from sgl_elastic import errors, wire
from sgl_elastic.errors import ElasticError, MemoryWorkerError, WireError
from sgl_elastic.memory import messages
from sgl_elastic.memory.messages import Answered, Message, Pages, Reply, Request, Usage
from sgl_elastic.memory.request_fence import LivenessProbe, is_readable
from sgl_elastic.memory.runs import Run, Runs, Slots
from sgl_elastic.types import MemoryShape

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", bound=Message)
ImportedSpans = list[tuple[int, list[sgl_vmm.Handle]]]  # (first page position, its handles)

# A worker that gives no sign of life for so long hangs. Shorter than any useful --hang-timeout: a
# rank that waits for a worker is silent itself, and must not be taken for the one that hangs.
HANG_S = 3.0
_LOOK_S = 0.25  # how often is looked for a sign of life while an answer is awaited


class DeviceClient:
    """One device's worker behind its socket. Safe for many threads; calls wait for each other.

    `timeout_s` bounds every call that is not given another limit; a worker that hangs fails every
    call after HANG_S, and at once from then on, until it goes on. Raises MemoryWorkerError if
    nobody answers.
    """

    def __init__(self, path: Path | str, timeout_s: float) -> None:
        self._path = Path(path)
        self._timeout_s = timeout_s
        self._backend: sgl_vmm.Backend | None = None  # all handles are of this one
        self._lock = threading.RLock()
        self._handles: dict[int, sgl_vmm.Handle] = {}  # by the worker's page id
        self._liveness_probe = LivenessProbe(self._path)
        self._name = uuid.uuid4().hex
        self._number = 0  # of the last request; a new connection goes on counting
        self._channel, self.info = self._connect()

    @property
    def is_in_doubt(self) -> bool:
        """After a call that failed: whether the worker may have done it all the same."""
        return self._channel.is_closed

    def close(self) -> None:
        """Close the connection; imported pages stay."""
        with self._lock:
            self._channel.close()
            self._liveness_probe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
    ) -> dict[str, Runs]:
        """Copy slots from the worker at `source`. Returns those that were not loaded before.

        They must have pages here, and valid content there. `by_bytes`: it is on another node.
        Raises PeerCopyError when bytes did not arrive; those slots then are not loaded.
        """
        request = messages.CopyFrom(str(source), _plain(slots), verify, by_bytes)
        return self._call(request, messages.Changed, timeout_s).slots

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
            channel = self._open_channel()
            self._send(channel, messages.AskBytes(_plain(slots), must_be_loaded), timeout_s)
            position, is_last = 0, False
            try:
                while not is_last:
                    answer, fds = self._receive(channel, timeout_s)
                    fds.close()
                    part = _expect(channel, answer, messages.Part)
                    if part.position != position:
                        raise WireError(f"the worker sent byte {part.position}, not {position}")
                    position, is_last = position + len(part.data), part.is_last
                    yield part
            finally:
                if not is_last:  # parts that nobody will read may follow
                    channel.close()

    def import_scratch(self, backend: sgl_vmm.Backend) -> sgl_vmm.Handle:
        """The worker's scratch page as a handle of this process's `backend`."""
        with self._lock:
            [run] = self._receive_pages(backend, messages.AskScratch(), None)
            return self._handle(run.page_ids[0])

    def forget_pages(self) -> None:
        """Destroy all imported handles, of which none may be mapped. Raises MemoryWorkerError."""
        with self._lock:
            handles, self._handles = self._handles, {}
            self._channel.close()  # a new connection is sent all pages again
            backend, self._backend = self._backend, None
            if backend is None:
                return
            for handle in handles.values():
                try:
                    backend.destroy(handle)
                except sgl_vmm.VmmError as error:
                    raise MemoryWorkerError(f"cannot forget a page: {error}") from error

    def _connect(self) -> tuple[wire.Channel[Answered], messages.Hello]:
        channel = wire.Channel(
            wire.connect(self._path, MemoryWorkerError, self._timeout_s),
            messages.REPLIES,
            peer=f"the memory worker at {self._path}",
            failure=MemoryWorkerError,
            timeout_s=self._timeout_s,
        )
        try:
            return channel, self._ask(channel, messages.AskHello(), messages.Hello, None)
        except ElasticError:
            channel.close()
            self._liveness_probe.close()
            raise

    def _open_channel(self) -> wire.Channel[Answered]:
        """The connection, made again if it broke. Raises MemoryWorkerError for another worker."""
        if self._liveness_probe.is_asked:  # it hung, and would do what it is asked who knows when
            self._check_pulse(self._channel, _LOOK_S)
        if not self._channel.is_closed and is_readable(self._channel.fileno()):
            self._channel.close()  # its end, or an answer that nobody awaits
        if not self._channel.is_closed:
            return self._channel
        channel, info = self._connect()
        if info.pid != self.info.pid:
            channel.close()
            raise MemoryWorkerError(
                f"the memory worker at {self._path} was process {self.info.pid} and is {info.pid} "
                "now: its memory is lost, start what used it again"
            )
        self._channel = channel
        return channel

    def _call(self, request: Request, kind: type[Answer], timeout_s: float | None = None) -> Answer:
        with self._lock:
            return self._ask(self._open_channel(), request, kind, timeout_s)

    def _ask(
        self,
        channel: wire.Channel[Answered],
        request: Request,
        kind: type[Answer],
        timeout_s: float | None,
    ) -> Answer:
        self._send(channel, request, timeout_s)
        answer, fds = self._receive(channel, timeout_s)
        fds.close()
        return _expect(channel, answer, kind)

    def _send(
        self, channel: wire.Channel[Answered], request: Request, timeout_s: float | None
    ) -> None:
        self._number += 1
        channel.send(messages.Asked(self._name, self._number, request), timeout_s=timeout_s)

    def _receive(
        self, channel: wire.Channel[Answered], timeout_s: float | None
    ) -> tuple[Reply, wire.ReceivedFds]:
        """The next answer to the last request.

        A worker that hangs is given up long before a copy's time is over.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while True:
            if is_readable(channel.fileno(), min(_LOOK_S, deadline - time.monotonic())):
                answer = self._take(channel)
                if answer is not None:
                    return answer
            if time.monotonic() >= deadline:
                channel.close()
                raise MemoryWorkerError(
                    f"the memory worker at {self._path} took longer than {limit_s:g} s to answer"
                )
            self._check_pulse(channel)

    def _take(self, channel: wire.Channel[Answered]) -> tuple[Reply, wire.ReceivedFds] | None:
        """What has come; None when it answers an earlier request. Raises MemoryWorkerError."""
        answered, fds = channel.receive(self._timeout_s)
        if answered.number == self._number:
            return answered.reply, fds
        fds.close()
        if answered.number > self._number:
            channel.close()
            raise MemoryWorkerError(
                f"the memory worker at {self._path} answered request {answered.number}; "
                f"{self._number} was the last"
            )
        logger.warning(
            "dropped a late or doubled answer to request %d of %d from the memory worker at %s: %s",
            answered.number,
            self._number,
            self._path,
            type(answered.reply).__name__,
        )
        return None

    def _check_pulse(self, channel: wire.Channel[Answered], wait_s: float = 0.0) -> None:
        """Raises MemoryWorkerError, with the channel closed, for a worker that hangs.

        One that goes on again has `wait_s` to show it.
        """
        if self._liveness_probe.silent_s(time.monotonic(), wait_s) >= HANG_S:
            channel.close()
            raise MemoryWorkerError(
                f"the memory worker at {self._path} hangs: no sign of life for {HANG_S:g} s"
            )

    def _receive_pages(
        self, backend: sgl_vmm.Backend, request: Request, timeout_s: float | None
    ) -> list[messages.PageRun]:
        """All parts of an answer; pages are imported as they come, so few descriptors are open."""
        if self._backend not in (None, backend):
            raise MemoryWorkerError("a client imports pages for one backend: make another client")
        self._backend = backend
        channel = self._open_channel()
        self._send(channel, request, timeout_s)
        runs: list[messages.PageRun] = []
        is_last = False
        while not is_last:
            answer, fds = self._receive(channel, timeout_s)
            with fds:
                pages = _expect(channel, answer, Pages)
                try:
                    for export in pages.exports:
                        self._import(backend, export, fds)
                except (ElasticError, sgl_vmm.VmmError, OSError) as error:
                    channel.close()  # parts that nobody will read may follow
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
            self._channel.close()
            raise WireError(f"the worker at {self._path} did not send page {page_id}")
        return self._handles[page_id]


def _expect(channel: wire.Channel[Answered], answer: Reply, kind: type[Answer]) -> Answer:
    if isinstance(answer, messages.Failure):
        raise _error_of(answer)
    if not isinstance(answer, kind):
        channel.close()  # who knows what the worker has done
        raise WireError(f"the worker answered {type(answer).__name__}, not {kind.__name__}")
    return answer


def _error_of(failure: messages.Failure) -> ElasticError:
    error_class = getattr(errors, failure.error, None)
    if isinstance(error_class, type) and issubclass(error_class, ElasticError):
        return error_class(failure.text)
    return MemoryWorkerError(f"{failure.error}: {failure.text}")


def _plain(slots: Mapping[str, Sequence[Run]]) -> dict[str, tuple[Run, ...]]:
    return {name: tuple(runs) for name, runs in slots.items()}
