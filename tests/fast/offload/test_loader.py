"""Who is read first, who waits, and that nobody is forgotten: neither a ticket nor a thread."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue

import pytest

from sgl_esft.errors import ExpertReadError, InvariantError
from sgl_esft.offload.loader import (
    Arrivals,
    LastTickets,
    Loader,
    LoadJob,
    LoadPriority,
    LoadTicket,
)
from sgl_esft.offload.source import ByteRange, ExpertPlace, FileId, OpenFile

NOW, LATER = LoadPriority.ON_DEMAND, LoadPriority.PREFETCH
WORST = [KeyboardInterrupt(), SystemExit(1), MemoryError(), StopIteration()]
SOON_S = 10.0  # far longer than anything here takes
FILE = OpenFile("weights", -1, FileId(0, 0, 0, 0), False)
RANGE = ByteRange(FILE, 0, 0, (0, 0))


def job(row: int, priority: LoadPriority = NOW, layer: int = 0, slot: int = 0) -> LoadJob:
    place = ExpertPlace(None, layer, slot, "bfloat16", RANGE, RANGE, RANGE)
    return LoadJob(layer, slot, row, priority, place)


class Reads:
    """A `read` that a test holds: it says what has begun, and lets each end."""

    def __init__(self) -> None:
        self.begun: SimpleQueue[LoadJob] = SimpleQueue()
        self._may_end: dict[LoadJob, SimpleQueue[BaseException | None]] = {}
        self._lock = threading.Lock()

    def __call__(self, job: LoadJob) -> None:
        self.begun.put(job)
        error = self._door(job).get(timeout=2 * SOON_S)  # after the test has given up
        if error:
            raise error

    def _door(self, job: LoadJob) -> SimpleQueue[BaseException | None]:
        with self._lock:
            return self._may_end.setdefault(job, SimpleQueue())

    def next(self) -> LoadJob:
        """What begins next, or began and was not asked for yet."""
        return self.begun.get(timeout=SOON_S)

    def end(self, job: LoadJob, error: BaseException | None = None) -> None:
        self._door(job).put(error)

    def end_next(self) -> LoadJob:
        began = self.next()
        self.end(began)
        return began


@pytest.fixture
def reads() -> Reads:
    return Reads()


@pytest.fixture
def one(reads: Reads) -> Iterator[Loader]:
    """A loader of one thread."""
    with Loader(1, reads) as loader:
        yield loader


@pytest.fixture
def two(reads: Reads) -> Iterator[Loader]:
    with Loader(2, reads) as loader:
        yield loader


def occupy(loader: Loader, reads: Reads, priority: LoadPriority = LATER) -> LoadJob:
    """Keep one of its threads busy with a job that has begun."""
    busy = job(99, priority, layer=99)
    loader.submit(busy)
    assert reads.next() == busy
    return busy


def is_quiet(loader: Loader, reads: Reads) -> bool:
    """Whether nothing begins though a thread is idle. A moment is all that can be waited for."""
    time.sleep(0.02)
    return reads.begun.empty()


def test_on_demand_goes_before_every_prefetch(one: Loader, reads: Reads) -> None:
    busy = occupy(one, reads, NOW)
    jobs = [job(1, LATER), job(2, NOW), job(3, LATER), job(4, NOW)]
    tickets = [one.submit(each) for each in jobs]
    reads.end(busy)
    assert [reads.end_next().row for _ in jobs] == [2, 4, 1, 3]
    for ticket in tickets:
        ticket.wait(SOON_S)
        assert ticket.is_done
        assert ticket.error is None


def test_no_prefetch_begins_beside_what_is_waited_for(two: Loader, reads: Reads) -> None:
    urgent = occupy(two, reads, NOW)
    prefetch = two.submit(job(1, LATER))
    assert is_quiet(two, reads), "the other thread is idle, and stays so"
    second = two.submit(job(2, NOW))
    assert reads.next().row == 2, "but not for another one on demand"
    reads.end(urgent)
    assert is_quiet(two, reads)
    reads.end(second.job)
    assert reads.end_next().row == 1
    prefetch.wait(SOON_S)


def test_what_is_on_demand_waits_for_no_prefetch(one: Loader, reads: Reads) -> None:
    """Not even one by the only thread of prefetches."""
    prefetch = occupy(one, reads, LATER)
    urgent = one.submit(job(1, NOW))
    assert reads.end_next().row == 1
    urgent.wait(SOON_S)
    reads.end(prefetch)


class Pieces:
    """A `read` of two pieces, which gives way before the second."""

    def __init__(self) -> None:
        self.loader: Loader | None = None
        self.begun: SimpleQueue[tuple[int, int]] = SimpleQueue()  # row, piece
        self.goes_on = threading.Event()  # a prefetch has its first piece

    def __call__(self, job: LoadJob) -> None:
        assert self.loader is not None
        self.begun.put((job.row, 0))
        if job.priority is LATER:
            assert self.goes_on.wait(SOON_S)
        self.loader.give_way()
        self.begun.put((job.row, 1))

    def next(self) -> tuple[int, int]:
        return self.begun.get(timeout=SOON_S)


@pytest.fixture
def pieces() -> Pieces:
    return Pieces()


@pytest.fixture
def of_pieces(pieces: Pieces, reads: Reads) -> Iterator[Loader]:
    """A loader of one thread, whose prefetches are in pieces."""
    read = {True: pieces, False: reads}
    with Loader(1, lambda job: read[job.priority is LATER](job)) as loader:
        pieces.loader = loader
        yield loader


def held_up(loader: Loader, pieces: Pieces, reads: Reads) -> tuple[LoadTicket, LoadTicket]:
    """A prefetch that gave way in its middle, and for what. A moment is all it can be given."""
    prefetch = loader.submit(job(1, LATER))
    assert pieces.next() == (1, 0)
    urgent = loader.submit(job(2, NOW))
    assert reads.next().row == 2
    pieces.goes_on.set()
    time.sleep(0.02)
    assert pieces.begun.empty(), "it is in the middle, and waits"
    return prefetch, urgent


def test_a_prefetch_gives_way_between_its_pieces(
    of_pieces: Loader, pieces: Pieces, reads: Reads
) -> None:
    prefetch, urgent = held_up(of_pieces, pieces, reads)
    reads.end(urgent.job)
    assert pieces.next() == (1, 1)
    prefetch.wait(SOON_S)


def test_what_gave_way_goes_on_once_it_is_waited_for(
    of_pieces: Loader, pieces: Pieces, reads: Reads
) -> None:
    prefetch, urgent = held_up(of_pieces, pieces, reads)
    assert of_pieces.promote(prefetch)
    assert pieces.next() == (1, 1), "beside what is on demand, as it is itself"
    prefetch.wait(SOON_S)
    assert not urgent.is_finished
    reads.end(urgent.job)


def test_what_gave_way_goes_on_where_the_loader_closes(
    of_pieces: Loader, pieces: Pieces, reads: Reads
) -> None:
    prefetch, urgent = held_up(of_pieces, pieces, reads)
    closing = threading.Thread(target=of_pieces.close)
    closing.start()
    prefetch.wait(SOON_S)
    reads.end(urgent.job)
    closing.join(SOON_S)
    assert not closing.is_alive()


def test_who_reads_for_no_loader_gives_way_to_nobody(one: Loader, reads: Reads) -> None:
    urgent = occupy(one, reads, NOW)
    one.give_way()
    reads.end(urgent)


def test_prefetches_go_on_after_it_in_all_threads(reads: Reads) -> None:
    with Loader(4, reads) as loader:
        urgent = occupy(loader, reads, NOW)
        for row in range(4):
            loader.submit(job(row, LATER))
        reads.end(urgent)
        begun = [reads.next() for _ in range(4)]
        assert sorted(each.row for each in begun) == [0, 1, 2, 3], "side by side"
        for each in begun:
            reads.end(each)


def test_prefetches_go_on_after_one_that_failed(one: Loader, reads: Reads) -> None:
    urgent = occupy(one, reads, NOW)
    one.submit(job(1, LATER))
    reads.end(urgent, ExpertReadError("x"))
    assert reads.end_next().row == 1


def test_a_queued_prefetch_is_promoted(one: Loader, reads: Reads) -> None:
    busy = occupy(one, reads, NOW)
    tickets = [one.submit(job(row, LATER)) for row in (1, 2, 3)]
    assert one.promote(tickets[2])
    assert one.promote(tickets[2]), "twice is once"
    reads.end(busy)
    assert [reads.end_next().row for _ in tickets] == [3, 1, 2]


def test_one_that_is_being_read_is_promoted(two: Loader, reads: Reads) -> None:
    """Somebody waits for it now, so no other prefetch may slow it."""
    running = two.submit(job(1, LATER))
    assert reads.next().row == 1
    assert two.promote(running)
    later = two.submit(job(2, LATER))
    assert is_quiet(two, reads)
    reads.end(running.job)
    assert reads.end_next().row == 2
    later.wait(SOON_S)


def test_one_that_is_over_is_not_promoted(one: Loader, reads: Reads) -> None:
    done = one.submit(job(1, LATER))
    reads.end_next()
    done.wait(SOON_S)
    assert one.promote(done), "its row holds the expert"
    busy = occupy(one, reads)
    dropped = one.submit(job(2, LATER))
    assert one.cancel_prefetches() == 1
    assert not one.promote(dropped), "so another has to be submitted"
    reads.end(busy)
    last = one.submit(job(3, LATER))
    assert reads.end_next().row == 3, "nothing on demand is left over"
    last.wait(SOON_S)


def test_a_row_is_filled_by_one_at_a_time_in_order(two: Loader, reads: Reads) -> None:
    jobs = [job(5, NOW, slot=slot) for slot in range(3)]
    other = job(5, NOW, layer=1)
    tickets = [two.submit(each) for each in jobs]
    assert reads.next() == jobs[0]
    two.submit(other)
    assert reads.next() == other, "the row of another layer is another row"
    reads.end(other)
    assert is_quiet(two, reads), "though a thread is idle"
    for before, after in pairwise(jobs):
        reads.end(before)
        assert reads.next() == after
    reads.end(jobs[-1])
    for ticket in tickets:
        ticket.wait(SOON_S)


def test_what_is_before_it_in_its_row_is_waited_for_too(one: Loader, reads: Reads) -> None:
    """A prefetch into the row comes first, and so before what was submitted on demand."""
    busy = occupy(one, reads, NOW)
    jobs = [job(1, LATER), job(5, LATER, slot=1), job(5, LATER, slot=2), job(5, NOW, slot=3)]
    for each in jobs:
        one.submit(each)
    one.submit(job(6, NOW))
    reads.end(busy)
    order = [reads.end_next() for _ in range(5)]
    assert [each for each in order if each.row == 5] == jobs[1:]
    assert order[-1] == jobs[0], "the prefetch that nobody waits for"


def test_promoting_takes_along_what_is_before_it(one: Loader, reads: Reads) -> None:
    busy = occupy(one, reads, NOW)
    tickets = [one.submit(job(5, LATER, slot=slot)) for slot in range(3)]
    other = one.submit(job(6, LATER))
    one.promote(tickets[1])
    assert one.cancel_prefetches() == 2
    assert [t.is_cancelled for t in (*tickets, other)] == [False, False, True, True]
    reads.end(busy)
    assert [reads.end_next().slot for _ in range(2)] == [0, 1]


def test_a_failure_is_the_tickets_and_ends_no_thread(one: Loader, reads: Reads) -> None:
    failed, behind, other = (
        one.submit(job(row, slot=slot)) for row, slot in [(1, 0), (1, 1), (2, 0)]
    )
    error = ExpertReadError("weights cannot be read at byte 7: Input/output error.")
    reads.end(reads.next(), error)
    with pytest.raises(ExpertReadError, match="byte 7") as caught:
        failed.wait(SOON_S)
    assert caught.value is error
    assert failed.error is error
    assert (failed.is_finished, failed.is_done, failed.is_cancelled) == (True, False, False)
    assert [reads.end_next() for _ in range(2)] == [other.job, behind.job]
    for ticket in (behind, other):
        ticket.wait(SOON_S)


@pytest.mark.parametrize("error", WORST)
def test_whatever_is_raised_is_the_tickets(one: Loader, reads: Reads, error: BaseException) -> None:
    failed = one.submit(job(1))
    reads.end(reads.next(), error)
    with pytest.raises(type(error)):
        failed.wait(SOON_S)
    after = one.submit(job(2))
    reads.end_next()
    after.wait(SOON_S)


def test_waiting_has_an_end(one: Loader, reads: Reads) -> None:
    ticket = one.submit(job(1))
    with pytest.raises(TimeoutError):
        ticket.wait(0.01)
    assert (ticket.is_finished, ticket.is_done, ticket.error) == (False, False, None)
    reads.end_next()
    ticket.wait(SOON_S)


def test_arrivals_come_in_the_order_they_finish(reads: Reads) -> None:
    with Loader(4, reads) as loader:
        tickets = [loader.submit(job(row)) for row in range(4)]
        jobs = sorted((reads.next() for _ in tickets), key=lambda each: each.row)
        reads.end(jobs[3])
        tickets[3].wait(SOON_S)
        arrivals = Arrivals(tickets)
        assert next(arrivals) is tickets[3], "it was there already"
        for row, error in ((1, None), (0, ExpertReadError("x")), (2, None)):
            reads.end(jobs[row], error)
            assert next(arrivals) is tickets[row]
            assert tickets[row].is_finished
            assert tickets[row].error is error
        assert list(arrivals) == []
        assert list(Arrivals([])) == []
        assert list(Arrivals([tickets[1], tickets[1]])) == [tickets[1]]


def test_arrivals_of_what_is_cancelled(one: Loader, reads: Reads) -> None:
    busy = occupy(one, reads)
    arrivals = Arrivals([one.submit(job(row, LATER)) for row in range(3)])
    one.cancel_prefetches()
    assert [ticket.is_cancelled for ticket in arrivals] == [True] * 3
    reads.end(busy)


def test_only_prefetches_that_have_not_begun_are_cancelled(two: Loader, reads: Reads) -> None:
    running = two.submit(job(1, LATER))
    behind = two.submit(job(1, LATER, slot=1))
    assert reads.next().row == 1
    urgent = two.submit(job(2, NOW))
    assert reads.next().row == 2
    queued, wanted = two.submit(job(3, LATER)), two.submit(job(4, NOW))
    promoted = two.submit(job(5, LATER))
    two.promote(promoted)
    assert two.cancel_prefetches() == 2
    assert two.cancel_prefetches() == 0
    for ticket in (behind, queued):
        assert ticket.is_cancelled
        assert not ticket.is_done
        with pytest.raises(InvariantError, match="waited for a load that was cancelled"):
            ticket.wait(SOON_S)
    again = two.submit(job(3, LATER, slot=7))
    for each in (running.job, urgent.job):
        reads.end(each)
    assert sorted(reads.end_next().row for _ in range(3)) == [3, 4, 5]
    for ticket in (running, urgent, wanted, promoted, again):
        ticket.wait(SOON_S)


def test_closing_waits_for_what_has_begun_and_drops_the_rest(reads: Reads) -> None:
    loader = Loader(1, reads)
    threads = set(loader._threads)
    running, queued, prefetch = (
        loader.submit(job(row, priority)) for row, priority in [(1, NOW), (2, NOW), (3, LATER)]
    )
    assert reads.next().row == 1
    closing = threading.Thread(target=loader.close)
    closing.start()
    assert [ticket.is_cancelled for ticket in Arrivals([queued, prefetch])] == [True, True]
    assert not running.is_finished
    assert closing.is_alive()
    reads.end(running.job)
    closing.join(SOON_S)
    assert running.is_done
    assert not any(thread.is_alive() for thread in threads)
    loader.close()
    with pytest.raises(InvariantError, match="closed"):
        loader.submit(job(4))


def test_a_loader_without_threads() -> None:
    with pytest.raises(InvariantError, match="0 threads"):
        Loader(0, lambda job: None)


def fails(job: LoadJob) -> None:
    if job.row == 1:
        raise ExpertReadError("x")


@pytest.mark.parametrize("row", [1, 2])
def test_a_ticket_goes_when_it_is_let_go(row: int) -> None:
    """Not at some garbage collection: what it holds keeps a file open."""
    gc.disable()
    try:
        with Loader(1, fails) as loader:
            seen = weakref.ref(loader.submit(job(row)))
            ticket: LoadTicket | None = next(Arrivals([seen() or loader.submit(job(row))]))
            assert ticket is not None
            try:
                ticket.wait(SOON_S)
            except ExpertReadError:
                assert row == 1
            watched = weakref.ref(ticket)
            del ticket
            loader.submit(job(3)).wait(SOON_S)
            assert watched() is None
    finally:
        gc.enable()


def test_an_idle_loader_takes_no_time(reads: Reads) -> None:
    """Nobody polls: neither the threads without a job nor those who wait."""
    with Loader(4, reads) as loader:
        urgent = occupy(loader, reads, NOW)
        waiting = Arrivals([loader.submit(job(1, LATER))])
        waiter = threading.Thread(target=lambda: next(waiting).wait(SOON_S))
        waiter.start()
        idle = [*loader._threads, waiter]
        before = switches(idle)
        time.sleep(0.2)
        assert switches(idle) - before < 10
        reads.end(urgent)
        reads.end_next()
        waiter.join(SOON_S)
        assert not waiter.is_alive()


def switches(threads: list[threading.Thread]) -> int:
    """How often they went to sleep of their own."""
    texts = [Path(f"/proc/self/task/{each.native_id}/status").read_text() for each in threads]
    return sum(int(text.split("voluntary_ctxt_switches:")[1].split()[0]) for text in texts)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_jobs(loader: Loader, num_jobs: int) -> int:
    """Jobs of every kind in steps of 50; how many ended in some way."""
    num_ended = 0
    for step in range(num_jobs // 50):
        prefetches = [loader.submit(job(row, LATER, layer=step % 7)) for row in range(30)]
        wanted = [loader.submit(job(row, NOW, layer=step % 5)) for row in range(20, 40)]
        for ticket in prefetches[::7]:
            loader.promote(ticket)
        for ticket in Arrivals(wanted):
            assert ticket.is_done == (ticket.job.row != 1)
            num_ended += 1
        if step % 3 == 0:
            loader.cancel_prefetches()
        num_ended += sum(1 for _ in Arrivals(prefetches))
    return num_ended


def test_nothing_is_left_of_very_many_jobs() -> None:
    num_jobs = 100_000
    gc.collect()  # files of other tests
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with Loader(4, fails) as loader:
        run_jobs(loader, 1000)
        before = resident_bytes()
        assert run_jobs(loader, num_jobs) == num_jobs
        assert resident_bytes() - before < 4 << 20
        assert not loader._lines
        assert not loader._prefetches
        assert not loader._on_demand
        assert loader._num_on_demand == 0
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208


class Looked(LoadTicket):
    """Counts who asks whether it has finished."""

    num_looks = 0

    @property
    def is_finished(self) -> bool:
        type(self).num_looks += 1
        return super().is_finished


def test_tickets_of_slots_that_are_gone_are_found_without_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Looked, "num_looks", 0)
    last, slots = LastTickets(), 1000
    tickets = [Looked(job(row, slot=row % slots)) for row in range(slots + 1)]  # slot 0 twice
    for ticket in tickets:
        ticket._future.set_result(None)
        last.put(ticket)
    last.put(under_way := Looked(job(7, slot=3)))  # slot 7's row is slot 3's now
    freed = [weakref.ref(tickets[row]) for row in (0, 3, 7, slots)]
    kept = weakref.ref(tickets[8])
    del ticket, tickets
    for slot in (0, 3, 7):
        last.forget(0, slot)
        last.forget(1, slot)  # another layer's
    assert Looked.num_looks == 4, "slot 0's two, slot 3's two, slot 7's none"
    gc.collect()
    assert [each() for each in freed] == [None] * 4
    assert kept() is not None
    assert last.unfinished(0, 7) is under_way, "what is on its way lands, whoever is gone"
    assert last.unfinished(0, 0) is None
    assert last.unfinished(0, 8) is None, "done"
