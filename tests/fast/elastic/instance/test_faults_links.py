"""Signs of life and late answers, over real Unix sockets."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from sgl_elastic.errors import EngineFailedError
from sgl_elastic.instance import rank_messages as m
from sgl_elastic.instance.links import expect_all
from tests.fast.elastic.instance.test_links import Bench, soon, wait_until


@pytest.fixture
def bench(tmp_path: Path):
    bench = Bench(tmp_path)
    yield bench
    for rank in bench.ranks:
        rank.channel.close()
    bench.server.close()


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


def test_a_pong_is_no_answer(bench: Bench) -> None:
    [link], [rank] = bench.start(1)
    link.ping(1.0)
    rank.channel.send(m.Pong())
    rank.channel.send(m.RankDone(seconds=3.0))
    assert link.expect(m.RankDone, soon()).seconds == 3.0


def test_answers_of_earlier_instructions_are_dropped(bench: Bench) -> None:
    [link], [rank] = bench.start(1)
    link.send(m.Detach())  # the first message
    link.send(m.Wake())
    link.send(m.Run())  # the third
    link.ping(1.0)  # the fourth, which is not answered in the inbox
    rank.channel.send(m.RankDone(seconds=1.0, number=1))
    rank.channel.send(m.Failed("EngineFailedError", "late", 2))
    rank.channel.send(m.RankDone(seconds=3.0, number=3))
    assert link.expect(m.RankDone, soon()).seconds == 3.0


def test_answers_without_a_number_always_count(bench: Bench) -> None:
    [link], [rank] = bench.start(1)
    link.send(m.Detach())
    link.send(m.Run())
    rank.channel.send(m.Frozen((), ()))
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


def test_the_end_of_a_connection_is_a_loss(bench: Bench) -> None:
    [link], [rank] = bench.start(1)
    assert link.lost == ""
    rank.channel.close()
    wait_until(lambda: link.lost != "")
    link.ping(1.0)
    assert link.silent_s(100.0) == 0.0, "nobody is asked"


def test_all_ranks_count_as_awaited_while_the_first_one_is(bench: Bench) -> None:
    links, ranks = bench.start(2)
    threading.Timer(0.05, ranks[0].channel.send, (m.RankDone(),)).start()
    threading.Timer(0.1, ranks[1].channel.send, (m.RankDone(),)).start()
    seen: list[bool] = []
    threading.Timer(0.02, lambda: seen.append(links[1].is_awaited)).start()
    expect_all(links, m.RankDone, 5.0)
    assert seen == [True]
    assert not any(link.is_awaited for link in links)
    with pytest.raises(EngineFailedError):
        expect_all(links, m.RankDone, 0.01)
    assert not any(link.is_awaited for link in links)
