"""A rank that is told things twice, at the wrong time, or only asked whether it is there."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sgl_elastic import wire
from sgl_elastic.engine import kv_handover, sglang_api
from sgl_elastic.engine.rank import _DECODER, EngineRank
from sgl_elastic.errors import EngineFailedError
from sgl_elastic.instance import rank_messages as m

FROM_RANK: msgspec.msgpack.Decoder[m.FromRank] = msgspec.msgpack.Decoder(m.FromRank)


def channel(sock: socket.socket, decoder: Any) -> wire.Channel[Any]:
    return wire.Channel(sock, decoder, peer="it", failure=EngineFailedError, timeout_s=2.0)


class Bench:
    """An EngineRank without an engine, and the manager's end of its channel."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.manager = channel(ours, FROM_RANK)
        self.rank = object.__new__(EngineRank)
        self.rank._channel = channel(theirs, _DECODER)
        self.rank._num_received = 0
        self.rank._sleeper = None
        self.rank._resumed = {}
        self.rank.rank = 0
        self.rank.config = SimpleNamespace(instance="i1", num_sources=1)  # type: ignore[assignment]
        self.num_said = 0
        self.carried_out: list[m.ToRank] = []
        self.rank._carry_out = self.carry_out  # type: ignore[method-assign]
        self.rank._grow_kv = lambda scheduler, num_tokens: m.RankDone(num_copied_slots=5)  # type: ignore[method-assign]

    def carry_out(self, scheduler: object, instruction: m.ToRank) -> m.RankDone:
        self.carried_out.append(instruction)
        return m.RankDone()

    def says(self, *messages: m.ToRank) -> None:
        for message in messages:
            self.num_said += 1
            self.manager.send(m.Told(self.num_said, message))

    def says_again(self, message: m.ToRank) -> None:
        self.manager.send(m.Told(self.num_said, message))

    def polls(self, times: int) -> None:
        for _ in range(times):
            self.rank.poll(None)

    def hears(self) -> m.FromRank:
        message, fds = self.manager.receive()
        fds.close()
        return message

    def hears_done(self) -> m.RankDone:
        done = self.hears()
        assert isinstance(done, m.RankDone)
        return done


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(kv_handover, "sequences_of", lambda scheduler: ())
    monkeypatch.setattr(kv_handover, "num_slots", lambda scheduler: 0)
    monkeypatch.setattr(sglang_api, "waiting_requests", lambda scheduler: [])
    monkeypatch.setattr(sglang_api, "resume_paused", lambda scheduler: None)
    bench = Bench()
    yield bench
    bench.manager.close()
    bench.rank._channel.close()


def test_a_serving_rank_is_there(bench: Bench) -> None:
    bench.rank.poll(None)  # nobody has asked
    bench.says(m.Wake(), m.Ping())
    bench.polls(2)
    assert bench.hears() == m.Pong()


def test_a_second_run_is_done_already(bench: Bench) -> None:
    bench.says(m.Wake(), m.Run())
    bench.polls(2)
    assert bench.hears_done().number == 2


def test_a_serving_rank_refuses_what_only_a_parked_one_does(bench: Bench) -> None:
    """It does not end for it: its requests go on."""
    bench.says(m.Detach(), m.ResizeKv(7))
    bench.polls(2)
    assert bench.hears() == m.Failed("EngineFailedError", "Detach while serving", 1)
    done = bench.hears_done()
    assert (done.num_copied_slots, done.number) == (5, 2)


def test_a_parked_rank_answers_each_instruction_by_its_number(bench: Bench) -> None:
    bench.says(m.Ping(), m.Detach(), m.Detach(), m.Wake(), m.Run())
    bench.rank.park(None)
    assert bench.hears() == m.Frozen((), ())
    assert bench.hears() == m.Pong()
    assert [bench.hears_done().number for _ in range(3)] == [2, 3, 5]
    assert bench.carried_out == [m.Detach(), m.Detach()]


def test_a_request_that_has_not_come_yet_is_published(bench: Bench) -> None:
    """It waits for its trial; whoever takes over must know its tokens as this rank did."""
    state = m.RequestState("a", b"12345678", 1, {}, {})
    bench.rank._resumed = {"a": state}
    bench.says(m.Run())
    bench.rank.park(None)
    assert bench.hears() == m.Frozen((), (state,))


@pytest.mark.parametrize("loop", ["poll", "park"])
def test_a_rank_whose_front_has_ended_ends_without_a_word(
    bench: Bench, loop: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """While it serves, and in the parking place. Its status is no failure's."""
    pid = os.fork()
    if pid == 0:
        try:
            bench.manager.close()  # this process's copy
            while True:
                getattr(bench.rank, loop)(None)
        finally:
            os._exit(7)
    if loop == "park":
        assert bench.hears() == m.Frozen((), ())
    bench.manager.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert "Traceback" not in capfd.readouterr().err


def test_an_instruction_that_comes_twice_is_carried_out_once(bench: Bench) -> None:
    bench.says(m.ResizeKv(7))
    bench.says_again(m.ResizeKv(7))
    bench.says(m.ResizeKv(8))
    bench.polls(3)
    assert [bench.hears_done().number for _ in range(2)] == [1, 2]
    bench.says_again(m.ResizeKv(8))
    bench.says(m.Ping())
    bench.polls(2)
    assert bench.hears() == m.Pong(), "nothing was said in between"
