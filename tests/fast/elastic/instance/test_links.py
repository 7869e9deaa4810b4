"""Ranks over real Unix sockets: answers in time, late, wrong, or never because the rank died."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest

from sgl_elastic import wire
from sgl_elastic.errors import ElasticError, EngineFailedError, MemoryWorkerError
from sgl_elastic.instance import rank_messages as m
from sgl_elastic.instance.links import RankServer, expect_all, send_all
from sgl_elastic.types import AdapterEntry
from tests.support.waiting import wait_until

TO_RANK: msgspec.msgpack.Decoder[m.Told] = msgspec.msgpack.Decoder(m.Told)
ADAPTER = AdapterEntry("id", "math", "/adapters/math", 0, False, {1: (2, 5)})


def rank_channel(path: Path, instance: str, rank: int, pid: int) -> wire.Channel[m.Told]:
    """A rank's end of its connection, on which it has said who it is."""
    sock = wire.connect(path, EngineFailedError, 2.0)
    channel = wire.Channel(
        sock, TO_RANK, peer="the manager", failure=EngineFailedError, timeout_s=5.0
    )
    channel.send(m.RankHello(instance, rank, pid))
    return channel


class FakeRank:
    """The other end of a link, in this process."""

    def __init__(self, path: Path, instance: str = "i1", rank: int = 0) -> None:
        self.channel = rank_channel(path, instance, rank, 77)

    def hears(self) -> m.ToRank:
        told, fds = self.channel.receive()
        fds.close()
        return told.message


class Bench:
    """A server with ranks, and what it heard of adapters."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "sockets" / "ranks.sock"
        self.tables: list[tuple[str, int, tuple[AdapterEntry, ...]]] = []
        self.server = RankServer(self.path, self._note)
        self.ranks: list[FakeRank] = []

    def _note(self, link, adapters):
        self.tables.append((link.instance, link.rank, adapters))

    def start(self, num_ranks: int, instance: str = "i1"):
        """Links, and the ranks at their other ends; the last one says RankHello first."""
        ranks = [FakeRank(self.path, instance, rank) for rank in reversed(range(num_ranks))]
        self.ranks += ranks
        return self.links(num_ranks, instance), ranks[::-1]

    def links(self, num_ranks: int, instance: str = "i1"):
        deadline = time.monotonic() + 5
        return self.server.wait_for(instance, num_ranks, deadline, lambda: True)


@pytest.fixture
def bench(tmp_path: Path):
    bench = Bench(tmp_path)
    yield bench
    for rank in bench.ranks:
        rank.channel.close()
    bench.server.close()


def soon(timeout_s: float = 5.0) -> float:
    return time.monotonic() + timeout_s


def test_ranks_are_found_by_number_whatever_order_they_come_in(bench: Bench) -> None:
    links, ranks = bench.start(3)
    assert [(link.rank, link.pid, link.name) for link in links] == [
        (rank, 77, f"rank {rank} of instance i1") for rank in range(3)
    ]
    told = [m.ResizeKv(100), m.Run(), m.Detach()]
    send_all(links, told)
    assert [rank.hears() for rank in ranks] == told
    for number, rank in enumerate(ranks):
        rank.channel.send(m.RankDone(num_bytes=number))
    assert [done.num_bytes for done in expect_all(links, m.RankDone, 5.0)] == [0, 1, 2]
    with pytest.raises(ValueError, match="shorter"):
        send_all(links, [m.Run()])


def test_instances_do_not_mix_and_answers_come_in_their_order(bench: Bench) -> None:
    [first], [rank] = bench.start(1, "i1")
    [second], _ = bench.start(1, "i2")
    rank.channel.send(m.Loaded(5))
    rank.channel.send(m.Started())
    assert first.expect(m.Loaded, soon()) == m.Loaded(5)
    assert first.expect(m.Started, soon()) == m.Started()
    with pytest.raises(EngineFailedError, match="rank 0 of instance i2 gave no RankDone in time"):
        second.expect(m.RankDone, soon(0.01))


@pytest.mark.parametrize(
    ("named", "raised"),
    [
        ("MemoryWorkerError", MemoryWorkerError),  # no fault of the rank
        ("PeerCopyError", EngineFailedError),
        ("SystemExit", EngineFailedError),  # whatever it says
    ],
)
def test_a_rank_that_fails_says_why(bench: Bench, named: str, raised: type[Exception]) -> None:
    [link], [rank] = bench.start(1)
    rank.channel.send(m.Failed(named, "no pages left"))
    with pytest.raises(raised, match=f"i1: {named}: no pages left"):
        link.expect(m.RankDone, soon())
    rank.channel.send(m.RankDone())
    assert link.expect(m.RankDone, soon()) == m.RankDone(), "it is as it was before"


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        (m.Started(), "sent Started, not RankDone"),
        (m.Run(), "no known type"),  # what only the manager says
    ],
)
def test_a_rank_that_says_something_else(bench: Bench, said: m.Started, complaint: str) -> None:
    [link], [rank] = bench.start(1)
    rank.channel.send(said)
    with pytest.raises(EngineFailedError, match=complaint):
        link.expect(m.RankDone, soon())


def test_a_rank_that_died_fails_every_later_call(bench: Bench) -> None:
    [link], [rank] = bench.start(1)
    rank.channel.send(m.Started())
    rank.channel.close()
    assert link.expect(m.Started, soon()) == m.Started(), "what it said before still counts"
    for _ in range(2):
        with pytest.raises(EngineFailedError, match=r"rank 0 of instance i1: .*closed"):
            link.expect(m.RankDone, soon())
    link.forget_answers()
    with pytest.raises(EngineFailedError, match="closed"):
        link.expect(m.RankDone, soon())
    with pytest.raises(EngineFailedError):
        link.send(m.Run())


def test_late_answers_can_be_forgotten(bench: Bench) -> None:
    [link], [rank] = bench.start(1)
    rank.channel.send(m.RankDone(seconds=1.0))
    with contextlib.suppress(EngineFailedError):
        link.expect(m.Loaded, soon())  # it has arrived
    rank.channel.send(m.RankDone(seconds=2.0))
    wait_until(lambda: not link._inbox.empty())
    link.forget_answers()
    rank.channel.send(m.RankDone(seconds=3.0))
    assert link.expect(m.RankDone, soon()).seconds == 3.0


@pytest.mark.parametrize(
    ("timeout_s", "is_alive", "complaint"),
    [(5.0, False, "i1 ended while it started"), (-1.0, True, "i1 did not start in time")],
)
def test_an_instance_that_does_not_start(
    bench: Bench, timeout_s: float, is_alive: bool, complaint: str
) -> None:
    bench.start(1)
    with pytest.raises(EngineFailedError, match=complaint):
        bench.server.wait_for("i1", 2, soon(timeout_s), lambda: is_alive)


def test_who_does_not_begin_with_hello_is_refused(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(wire.connect(bench.path, EngineFailedError, 2.0)) as sock:
        stranger = wire.Channel(
            sock, TO_RANK, peer="the manager", failure=EngineFailedError, timeout_s=2.0
        )
        stranger.send(m.Started())
        with pytest.raises(EngineFailedError):
            stranger.receive()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(bench.path))
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 2)
        sock.settimeout(2.0)
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
    assert "a rank began with Started" in caplog.text
    wait_until(lambda: "a connection was refused" in caplog.text)
    bench.start(1)  # others are served


def test_forgotten_ranks_hear_the_end(bench: Bench) -> None:
    """A rank ends when its connection does; ranks of other instances stay until the server ends."""
    _, [rank] = bench.start(1, "i1")
    [link], [other] = bench.start(1, "i2")
    bench.server.forget("i1")
    with pytest.raises(EngineFailedError, match="closed"):
        rank.hears()
    link.send(m.Run())
    assert other.hears() == m.Run()
    bench.server.close()
    assert not bench.path.exists()
    with pytest.raises(ElasticError):
        FakeRank(bench.path)
    with pytest.raises(EngineFailedError, match="closed"):
        other.hears()


def test_all_that_a_rank_has_said_is_read(bench: Bench) -> None:
    """Also where a Ping is on its way already: its Pong may come before the rest."""
    (link,), (rank,) = bench.start(1)
    link.ping(time.monotonic())

    def answer() -> None:
        tables = iter([(), (ADAPTER,)])
        with contextlib.suppress(EngineFailedError):  # when it is over
            while rank.hears() == m.Ping():  # a third one, if the first's Pong came at once
                for table in itertools.islice(tables, 1):
                    rank.channel.send(m.AdapterTable(table))
                rank.channel.send(m.Pong())

    threading.Thread(target=answer, daemon=True).start()
    assert link.drain_messages(soon())
    assert bench.tables == [("i1", 0, ()), ("i1", 0, (ADAPTER,))]
    rank.channel.send(m.RankDone())
    assert link.expect(m.RankDone, soon()) == m.RankDone(), "tables go past the answers"


def test_a_rank_that_says_nothing_is_not_waited_for_longer(bench: Bench) -> None:
    (silent, gone), ranks = bench.start(2)
    assert not silent.drain_messages(time.monotonic() + 0.05)
    ranks[1].channel.close()
    assert not gone.drain_messages(soon())


def test_what_a_rank_said_before_it_ended_is_read(bench: Bench) -> None:
    (link,), (rank,) = bench.start(1)
    assert not link.read_to_the_end(time.monotonic() + 0.01)
    link.fail("lost")  # whoever waits for it hears that at once; what it has sent still counts
    rank.channel.send(m.AdapterTable((ADAPTER,)))
    rank.channel.close()
    assert link.read_to_the_end(soon())
    assert bench.tables == [("i1", 0, (ADAPTER,))]


def test_whether_a_rank_is_still_at_it(bench: Bench) -> None:
    (link,), (rank,) = bench.start(1)
    assert link.finish(soon()), "nothing was asked"
    link.send(m.Detach())
    link.send(m.Ping())
    assert not link.finish(time.monotonic() + 0.05)
    rank.channel.send(m.Failed("E", "no", 1))
    assert link.finish(soon()), "a Ping is no instruction"
    link.send(m.Detach())
    rank.channel.close()
    assert not link.finish(soon()), "nobody knows"


# ---- signs of life, and late answers ----


def test_a_pong_ends_the_silence(bench: Bench) -> None:
    [link], [rank] = bench.start(1)
    assert link.silent_s(100.0) == 0.0
    link.ping(100.0)
    link.ping(103.0)  # still unanswered: not asked again
    assert rank.hears() == m.Ping()
    assert link.silent_s(105.0) == 5.0
    rank.channel.send(m.Pong())
    wait_until(lambda: link.silent_s(110.0) == 0.0)
    link.ping(110.0)
    assert rank.hears() == m.Ping()
    rank.channel.send(m.Pong())
    wait_until(lambda: link.silent_s(120.0) == 0.0)
    assert link.lost == ""
    rank.channel.close()
    wait_until(lambda: link.lost != "")
    link.ping(1.0)
    assert link.silent_s(100.0) == 0.0, "nobody is asked"


def test_answers_of_earlier_instructions_are_dropped(bench: Bench) -> None:
    [link], [rank] = bench.start(1)
    for message in (m.Detach(), m.Wake(), m.Run()):
        link.send(message)
    link.ping(1.0)  # the fourth message, which is not answered in the inbox
    rank.channel.send(m.Pong())
    rank.channel.send(m.RankDone(seconds=1.0, number=1))
    rank.channel.send(m.Failed("EngineFailedError", "late", 2))
    rank.channel.send(m.RankDone(seconds=3.0, number=3))
    assert link.expect(m.RankDone, soon()).seconds == 3.0
    rank.channel.send(m.Frozen((), ()))  # without a number it always counts
    assert link.expect(m.Frozen, soon()) == m.Frozen((), ())


def test_whoever_waits_for_a_rank_that_is_given_up_hears_it_at_once(bench: Bench) -> None:
    [link], _ = bench.start(1)
    threading.Timer(0.05, link.fail, ("it hangs",)).start()
    started = time.monotonic()
    with pytest.raises(EngineFailedError, match="it hangs"):
        link.expect(m.RankDone, soon(20))
    assert time.monotonic() - started < 5
    link.fail("something else")
    assert link.lost == "it hangs"
    with pytest.raises(EngineFailedError, match="it hangs"):
        link.expect(m.RankDone, soon())


def test_all_ranks_count_as_awaited_while_the_first_one_is(bench: Bench) -> None:
    links, ranks = bench.start(2)
    threading.Timer(0.05, ranks[0].channel.send, (m.RankDone(),)).start()
    threading.Timer(0.1, ranks[1].channel.send, (m.RankDone(),)).start()
    seen: list[bool] = []
    threading.Timer(0.02, lambda: seen.append(links[1].is_awaited)).start()
    expect_all(links, m.RankDone, 5.0)
    assert seen == [True]
    assert not any(link.is_awaited for link in links)
    began = time.monotonic()
    with pytest.raises(EngineFailedError, match="in time"):
        expect_all(links, m.RankDone, 0.05)
    assert time.monotonic() - began < 2, "all share one deadline"
    assert not any(link.is_awaited for link in links)
