"""The threads that read experts, and in which order: what a layer waits for goes first.

    tier.py --submit, promote--> [Loader] --LoadJob--> reader.py, in one of a few threads
            <--LoadTicket, Arrivals--'

While anything that is waited for is queued or being read, no prefetch begins, and one that is being
read stops at its next piece (`give_way`): the link is one, and a prefetch would take its share.
Reads into one row happen one after the other as they were submitted, so what a row holds in the end
is what was asked for last.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from enum import Enum
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from sgl_esft.errors import InvariantError
from sgl_esft.offload.source import ExpertPlace


class LoadPriority(Enum):
    """Whether a layer waits for it now."""

    ON_DEMAND = "on demand"
    PREFETCH = "prefetch"


def num_readers(num_threads: int) -> int:
    """Threads of a loader of `num_threads`: as many for each priority."""
    return num_threads * len(LoadPriority)


@dataclass(frozen=True)
class LoadJob:
    """Read the expert at `place` into row `row` of layer `layer`, where it is virtual slot `slot`.

    Layers as MoE layers, from 0.
    """

    layer: int
    slot: int
    row: int
    priority: LoadPriority
    place: ExpertPlace


class LoadTicket:
    """What became of one job: waiting (queued or being read), done, failed or cancelled."""

    def __init__(self, job: LoadJob) -> None:
        self.job = job
        self._future: Future[None] = Future()
        # The loader's, under its lock. A promoted ticket is on demand whatever its job says.
        self._is_on_demand = False

    @property
    def is_finished(self) -> bool:
        """Done, failed or cancelled: nothing more will happen."""
        return self._future.done()

    @property
    def is_done(self) -> bool:
        """The row holds the expert."""
        return self.is_finished and not self.is_cancelled and self.error is None

    @property
    def is_cancelled(self) -> bool:
        """It was never begun, and will not be."""
        return self._future.cancelled()

    @property
    def error(self) -> BaseException | None:
        """What the reading raised; the row holds no expert then."""
        if not self.is_finished or self.is_cancelled:
            return None
        return self._future.exception()

    def when_finished(self, call: Callable[[], object]) -> None:
        """Call it when nothing more will happen, by the thread that ends it; now, if it has.

        What `call` holds should not be this ticket, which would be freed late.
        """
        self._future.add_done_callback(lambda _: call())

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the row holds the expert.

        Raises what the reading raised; InvariantError for a ticket that is cancelled, since its row
        holds anything; TimeoutError.
        """
        future, job = self._future, self.job
        del self  # the traceback of what is raised keeps this frame, which must not keep that
        try:
            future.result(timeout_s)
        except CancelledError:
            raise InvariantError(
                f"layer {job.layer}, row {job.row}: waited for a load that was cancelled"
            ) from None
        finally:
            del future


class Arrivals:
    """Iterates over tickets as they finish, however they do; those that have, come first.

    By one thread. Each ticket comes once.
    """

    def __init__(self, tickets: Iterable[LoadTicket]) -> None:
        # Futures and not tickets are told: a ticket that its own callback names is freed too late.
        self._tickets = {ticket._future: ticket for ticket in tickets}
        self._finished: SimpleQueue[Future[None]] = SimpleQueue()
        for future in self._tickets:
            future.add_done_callback(self._finished.put)

    def __iter__(self) -> Iterator[LoadTicket]:
        return self

    def __next__(self) -> LoadTicket:
        if not self._tickets:
            raise StopIteration
        return self._tickets.pop(self._finished.get())


_Ready = OrderedDict[LoadTicket, None]
_Row = tuple[int, int]  # layer, row


def _begun(ready: _Ready) -> LoadTicket:
    ticket, _ = ready.popitem(last=False)
    ticket._future.set_running_or_notify_cancel()
    return ticket


class LastTickets:
    """The last load into each row, until it is seen to be done. By one thread.

    A ticket holds its place, and that keeps an adapter's files open: so what slots that are gone
    left behind is found by slot, without a look at all others.
    """

    def __init__(self) -> None:
        self._by_row: dict[_Row, LoadTicket] = {}
        self._rows_of: dict[tuple[int, int], set[int]] = {}  # (layer, slot) -> rows

    def put(self, ticket: LoadTicket) -> None:
        """It is the last one into its row now."""
        job = ticket.job
        self._drop(job.layer, job.row)
        self._by_row[job.layer, job.row] = ticket
        self._rows_of.setdefault((job.layer, job.slot), set()).add(job.row)

    def unfinished(self, layer: int, row: int) -> LoadTicket | None:
        """The last load into a row, which may have failed; None when the row holds its expert."""
        ticket = self._by_row.get((layer, row))
        if ticket is not None and ticket.is_done:
            self._drop(layer, row)
            return None
        return ticket

    def forget(self, layer: int, slot: int) -> None:
        """Drop what has finished, however it did, of loads of this slot."""
        for row in tuple(self._rows_of.get((layer, slot), ())):
            if self._by_row[layer, row].is_finished:
                self._drop(layer, row)

    def _drop(self, layer: int, row: int) -> None:
        ticket = self._by_row.pop((layer, row), None)
        if ticket is not None:
            key = layer, ticket.job.slot
            self._rows_of[key].discard(row)
            if not self._rows_of[key]:
                del self._rows_of[key]


class Loader:
    """Runs jobs by `read`, `num_threads` at a time, until `close`. Its methods are for any thread.

    `read` fills the job's row; what it raises is in the ticket, and ends no thread. Of one
    priority, the first that waits for nothing but a thread is the first to begin. Prefetches have
    threads of their own, so that what is on demand need not wait until one of them has ended.
    """

    def __init__(self, num_threads: int, read: Callable[[LoadJob], None]) -> None:
        if num_threads < 1:
            raise InvariantError(f"a loader of {num_threads} threads")
        self._read = read
        lock = threading.RLock()
        self._may_demand = threading.Condition(lock)  # something on demand is ready
        self._may_prefetch = threading.Condition(lock)  # nothing is on demand, or one was promoted
        self._lock = lock
        self._mine = threading.local()  # .ticket: what this thread is reading
        # Tickets that wait for nothing but a thread, in order.
        self._on_demand: _Ready = OrderedDict()
        self._prefetches: _Ready = OrderedDict()
        # Unfinished tickets of each row; the first is ready or being read. On demand ones come
        # before all others: whoever waits for one waits for those before it.
        self._lines: dict[_Row, deque[LoadTicket]] = {}
        self._num_on_demand = 0  # unfinished ones
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, args=(take,), name=f"{name}-{n}", daemon=True)
            for take, name in ((self._demanded, "expert-read"), (self._prefetch, "expert-prefetch"))
            for n in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def submit(self, job: LoadJob) -> LoadTicket:
        """Queue a job. One on demand makes the unfinished ones of its row that, too."""
        ticket = LoadTicket(job)
        with self._lock:
            if self._is_closed:
                raise InvariantError("a load was submitted to a loader that is closed")
            line = self._lines.setdefault((job.layer, job.row), deque())
            line.append(ticket)
            if job.priority is LoadPriority.ON_DEMAND:
                self._promote(line, ticket)
            if len(line) == 1:
                self._make_ready(ticket)
        return ticket

    def promote(self, ticket: LoadTicket) -> bool:
        """Make it on demand, if it is not yet; False: it was cancelled, so submit another.

        Of one that is being read already, that keeps prefetches from beginning beside it.
        """
        with self._lock:
            if not ticket.is_finished:
                self._promote(self._lines[ticket.job.layer, ticket.job.row], ticket)
            return not ticket.is_cancelled

    def cancel_prefetches(self) -> int:
        """Drop the prefetches that have not begun; how many. Their tickets are cancelled."""
        with self._lock:
            return self._drop(each for each in self._queued() if not each._is_on_demand)

    def close(self) -> None:
        """Drop what has not begun, wait for what has, end the threads. May be called again."""
        with self._lock:
            self._is_closed = True
            self._drop(self._queued())
            self._may_demand.notify_all()
            self._may_prefetch.notify_all()
        for thread in self._threads:
            thread.join()

    def give_way(self) -> None:
        """For `read`, between two pieces of an expert: wait while others are waited for.

        Returns at once to whoever reads what is on demand itself, or reads for no loader.
        """
        ticket: LoadTicket | None = getattr(self._mine, "ticket", None)
        if ticket is None or not self._num_on_demand:
            return
        with self._lock:
            while self._num_on_demand and not ticket._is_on_demand and not self._is_closed:
                self._may_prefetch.wait()

    def _work(self, take: Callable[[], LoadTicket | None]) -> None:
        while self._run_next(take):
            pass

    def _run_next(self, take: Callable[[], LoadTicket | None]) -> bool:
        """Wait for a job and do it; False: there will be none. Keeps nothing of it."""
        ticket = take()
        if ticket is None:
            return False
        self._mine.ticket = ticket
        try:
            self._read(ticket.job)
        except BaseException as error:  # noqa: BLE001 - whoever waits for the ticket gets it
            self._finish(ticket, error)
        else:
            self._finish(ticket, None)
        self._mine.ticket = None
        del ticket  # the traceback of an error names this frame
        return True

    def _demanded(self) -> LoadTicket | None:
        """The next one that is waited for, being read from now on; None: the loader is closed."""
        with self._lock:
            while not self._is_closed:
                if self._on_demand:
                    return _begun(self._on_demand)
                self._may_demand.wait()
        return None

    def _prefetch(self) -> LoadTicket | None:
        """The next one that is not."""
        with self._lock:
            while not self._is_closed:
                if self._prefetches and not self._num_on_demand:
                    return _begun(self._prefetches)
                self._may_prefetch.wait()
        return None

    def _finish(self, ticket: LoadTicket, error: BaseException | None) -> None:
        with self._lock:
            row = (ticket.job.layer, ticket.job.row)
            line = self._lines[row]
            line.popleft()
            if line:
                self._make_ready(line[0])
            else:
                del self._lines[row]
            self._forget_demand(ticket)
            if error is None:
                ticket._future.set_result(None)
            else:
                ticket._future.set_exception(error)

    def _make_ready(self, ticket: LoadTicket) -> None:
        if ticket._is_on_demand:
            self._on_demand[ticket] = None
            self._may_demand.notify()
        else:
            self._prefetches[ticket] = None
            self._may_prefetch.notify()

    def _promote(self, line: deque[LoadTicket], ticket: LoadTicket) -> None:
        """The ticket, and those before it in its line."""
        for each in line:
            if not each._is_on_demand:
                each._is_on_demand = True
                self._num_on_demand += 1
                if each in self._prefetches:
                    del self._prefetches[each]
                    self._make_ready(each)
                elif each._future.running():  # it gives way to nobody from now on
                    self._may_prefetch.notify_all()
            if each is ticket:
                return

    def _forget_demand(self, ticket: LoadTicket) -> None:
        if ticket._is_on_demand:
            self._num_on_demand -= 1
            if not self._num_on_demand:
                self._may_prefetch.notify_all()  # those that begin, and those that gave way

    def _queued(self) -> Iterator[LoadTicket]:
        """Those that have not begun."""
        for line in self._lines.values():
            yield from (each for each in line if not each._future.running())

    def _drop(self, tickets: Iterable[LoadTicket]) -> int:
        """Cancel these, each with all that are queued after it in its line; how many."""
        dropped = list(tickets)
        for ticket in reversed(dropped):
            row = (ticket.job.layer, ticket.job.row)
            self._lines[row].pop()
            if not self._lines[row]:
                del self._lines[row]
            self._on_demand.pop(ticket, None)
            self._prefetches.pop(ticket, None)
            self._forget_demand(ticket)
            ticket._future.cancel()
        return len(dropped)
