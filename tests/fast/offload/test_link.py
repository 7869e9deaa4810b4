"""How many experts are read at a time: as few as read about as fast as more."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from sgl_esft.errors import ExpertReadError, InvariantError
from sgl_esft.offload.link import ENOUGH, THREAD_COUNTS, Link, chosen, make_loader, measured_link
from sgl_esft.offload.loader import LoadJob
from sgl_esft.offload.reader import ExpertReader
from sgl_esft.offload.source import ByteRange, ExpertPlace, FileId, OpenFile

_RANGE = ByteRange(OpenFile("weights", -1, FileId(0, 0, 0, 0), False), 0, 0, (0, 0))
PLACES = [ExpertPlace(None, 0, expert, "bfloat16", _RANGE, _RANGE, _RANGE) for expert in range(3)]


@pytest.mark.parametrize(
    ("load_s", "num_threads"),
    [
        ({1: 9.3, 2: 15.9, 4: 9.9}, 1),  # milliseconds of a disk that one large read keeps busy
        ({1: 9.9, 2: 9.4, 4: 9.3}, 1),  # hardly slower, and each lands four times as soon
        ({1: 20.0, 2: 11.0, 4: 10.2}, 2),
        ({1: 20.0, 2: 12.0, 4: 6.0}, 4),
        ({4: 16.0, 2: 16.1, 1: 18.0}, 2),  # in whatever order they were measured
        ({4: 5.0}, 4),
        ({1: 1.7, 2: 1.7, 4: 1.7}, 2),  # a thread's turns take some of it
        ({1: 0.3, 2: 0.3, 4: 0.3}, 4),
    ],
)
def test_as_few_as_read_about_as_fast(load_s: dict[int, float], num_threads: int) -> None:
    seconds = {count: each * 1e-3 for count, each in load_s.items()}
    assert chosen(seconds) == Link(num_threads, seconds[num_threads])


def test_about_as_fast_is_within_a_tenth_of_the_bandwidth() -> None:
    assert chosen({1: 1e6 / ENOUGH - 1, 4: 1e6}).num_threads == 1
    assert chosen({1: 1e6 / ENOUGH + 1, 4: 1e6}).num_threads == 4


class Storage:
    """Reads that take so long each, `width` at a time, by a clock of its own.

    What one reads, the others that read at a time wait for: time passes by what is asked together,
    not by when a busy machine gives a thread its turn. counts: of threads, eight reads each.
    """

    def __init__(self, read_s: float, width: int, counts: Sequence[int] = THREAD_COUNTS) -> None:
        self._read_s = read_s
        self._width = width
        self._turns = {n: threading.Barrier(n, action=partial(self._pass, n)) for n in counts}
        self._order = iter([n for n in counts for _ in range(8)])
        self._now_s = 0.0
        self.rows: list[int] = []
        self.experts: list[int] = []

    def now(self) -> float:
        return self._now_s

    def _pass(self, num_threads: int) -> None:
        self._now_s += self._read_s * math.ceil(num_threads / self._width)

    def __call__(self, job: LoadJob) -> None:
        self._turns[next(self._order)].wait(timeout=60)
        self.rows.append(job.row)
        self.experts.append(job.place.expert_id)


def test_storage_that_serves_one_at_a_time_is_read_by_one() -> None:
    storage = Storage(1 / 128, width=1)
    assert measured_link(storage, PLACES, num_rows=4, clock=storage.now) == Link(1, 1 / 128)
    assert set(storage.rows) == {0, 1, 2, 3}
    assert set(storage.experts) == {0, 1, 2}, "each of them"
    assert len(storage.rows) == 8 * len(THREAD_COUNTS)


def test_storage_that_is_far_away_is_read_by_more() -> None:
    storage = Storage(1 / 256, width=4)
    assert measured_link(storage, PLACES, num_rows=4, clock=storage.now) == Link(4, 1 / 1024)


def test_what_the_user_says_is_only_timed() -> None:
    storage = Storage(1 / 512, width=4, counts=(2,))
    link = measured_link(storage, PLACES, 2, counts=(2,), clock=storage.now)
    assert link == Link(2, 1 / 1024)


def test_seconds_are_those_that_pass_for_who_waits() -> None:
    link = measured_link(lambda _: time.sleep(2e-3), PLACES, 1, counts=(1,))
    assert link.load_s is not None
    assert link.load_s >= 2e-3


def test_it_is_measured_for_as_long_as_is_said() -> None:
    reads: list[LoadJob] = []
    link = measured_link(reads.append, PLACES, 1, (1,), 3.0, clock=lambda: float(len(reads)) / 8)
    assert len(reads) == 3 * 8
    assert link == Link(1, 1 / 8)


def test_what_cannot_be_read_is_said() -> None:
    def fails(job: LoadJob) -> None:
        raise ExpertReadError("weights cannot be read at byte 7: Input/output error.")

    with pytest.raises(ExpertReadError, match="byte 7"):
        measured_link(fails, PLACES, 1)


def test_what_a_loader_prefetches_gives_way() -> None:
    reader = ExpertReader(range(4), False, torch.bfloat16)
    with make_loader(reader, 2, lambda _: None) as loader:
        assert reader.before_piece == loader.give_way


def test_a_link_of_nothing() -> None:
    with pytest.raises(InvariantError, match="0 experts"):
        measured_link(lambda _: None, [], 1)
