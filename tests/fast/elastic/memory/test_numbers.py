"""Requests and answers that come twice, late or with a number of their own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import sgl_vmm

from sgl_elastic import wire
from sgl_elastic.errors import ElasticError, MemoryWorkerError, WireError
from sgl_elastic.memory import messages as m
from sgl_elastic.memory.client import DeviceClient
from sgl_elastic.memory.control import Hmm
from sgl_elastic.memory.request_fence import RequestFence
from tests.fast.elastic.memory_proxy import PAGES, Proxy, channel_of
from tests.fast.elastic.memory_workers import (
    PAGE,
    comes_to,
    count_fds,
    hmm_of,
    settle,
    shape_of_one_region,
)
from tests.support.waiting import wait_until

W13 = "experts.0.w13"
FOUR: dict[str, tuple[tuple[int, int], ...]] = {W13: ((0, 4),)}
Answers = wire.Channel[m.Answered]
Say = Callable[[int, m.Request], Iterable[m.Answered]]  # what a worker answers to (number, request)


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Hmm]:
    with hmm_of(tmp_path, num_devices=1) as found:
        yield found


@pytest.fixture
def channel(one: Hmm) -> Iterator[Answers]:
    """A connection to the worker, for requests that a client would not send."""
    sock = wire.connect(one.socket_path(0), MemoryWorkerError, 5.0)
    with closing(channel_of(sock, m.REPLIES)) as found:
        yield found


def test_a_request_that_comes_twice_is_done_once(one: Hmm, channel: Answers) -> None:
    answers = [ask(channel, 5, m.MapSlots(FOUR)) for _ in range(3)]
    assert answers == [m.Answered(5, m.Changed(FOUR))] * 3
    one.client(0).unmap_slots(FOUR)
    assert ask(channel, 5, m.MapSlots(FOUR)) == answers[0]
    assert one.usage()[0].used_pages == 0, "it was not done again"
    assert ask(channel, 6, m.MapSlots(FOUR)) == m.Answered(6, m.Changed(FOUR))


def test_a_failure_that_comes_twice_is_the_same(channel: Answers) -> None:
    first = ask(channel, 1, m.AskDigest(W13, 0))
    assert isinstance(first.reply, m.Failure)
    with second(channel) as other:
        ask(other, 1, m.MapSlots(FOUR), "other")
    assert ask(channel, 1, m.AskDigest(W13, 0)) == first
    assert isinstance(ask(channel, 2, m.AskDigest(W13, 0)).reply, m.Digest)


def ask(channel: Answers, number: int, request: m.Request, client: str = "test") -> m.Answered:
    channel.send(m.Asked(client, number, request))
    answer, fds = channel.receive()
    fds.close()
    return answer


@contextmanager
def second(channel: Answers) -> Iterator[Answers]:
    """Another connection to the same worker."""
    path = Path(channel._socket.getpeername())
    with closing(channel_of(wire.connect(path, MemoryWorkerError, 5.0), m.REPLIES)) as other:
        yield other


def test_a_request_that_was_given_up_is_refused_in_its_old_connection(
    one: Hmm, channel: Answers
) -> None:
    """Its client has asked for more by another one; other clients count for themselves."""
    ask(channel, 1, m.AskHello())
    with second(channel) as other:
        ask(other, 3, m.AskHello(), "other")
        assert ask(other, 3, m.AskHello(), "other").number == 3
    with second(channel) as newer:
        ask(newer, 3, m.AskHello())
        answer = ask(channel, 2, m.MapSlots(FOUR))
        assert answer.number == 2
        assert isinstance(answer.reply, m.Failure)
        assert "request 2 comes after request 3" in answer.reply.text
        assert one.usage()[0].used_pages == 0
        assert ask(newer, 4, m.MapSlots(FOUR)).reply == m.Changed(FOUR)
    assert isinstance(ask(channel, 3, m.UnmapSlots(FOUR)).reply, m.Failure)
    assert one.usage()[0].used_pages == 6, "four slots of one and a half pages"


def test_what_a_client_that_has_left_asked_for_is_not_done(one: Hmm) -> None:
    """It died, or gave up, and the worker reads that only later."""
    pid = one.client(0).info.pid
    before = settle(lambda: count_fds(pid))
    os.kill(pid, signal.SIGSTOP)
    for _ in range(20):
        sock = wire.connect(one.socket_path(0), MemoryWorkerError, 5.0)
        leaving = channel_of(sock, m.REPLIES)
        leaving.send(m.Asked("test", 1, m.MapSlots(FOUR)))
        leaving.close()
    os.kill(pid, signal.SIGCONT)
    with DeviceClient(one.socket_path(0), 5.0):
        pass  # it has accepted all that came before
    assert comes_to(lambda: count_fds(pid), before) == before, "all of them have been read"
    assert one.usage()[0].peak_pages == 0


def test_a_client_without_connections_is_forgotten(channel: Answers) -> None:
    with second(channel) as other:
        ask(other, 9, m.AskHello(), "other")

    def is_forgotten() -> bool:
        with second(channel) as again:
            return isinstance(ask(again, 1, m.AskHello(), "other").reply, m.Hello)

    wait_until(is_forgotten)


def test_two_clients_in_one_connection_end_it(one: Hmm, channel: Answers) -> None:
    ask(channel, 1, m.AskHello())
    with pytest.raises(MemoryWorkerError, match=r"closed|lost"):
        ask(channel, 2, m.AskHello(), "other")
    assert one.client(0).hello().device_id == 0


def test_what_waits_for_the_lock_is_given_up_too() -> None:
    """Not only what was unread when the client asked for more."""
    fence, order = RequestFence(), list[str]()
    fence.join("a")
    early = fence.next("a", 1, lambda: False)

    def wait() -> None:
        with pytest.raises(MemoryWorkerError, match="request 1 comes after request 2"), early:
            order.append("early")

    with fence.memory_lock:
        thread = threading.Thread(target=wait)
        thread.start()
        late = fence.next("a", 2, lambda: False)
    thread.join(5)
    assert not thread.is_alive()
    with late:
        order.append("late")
    with late:  # as often as it takes
        order.append("late")
    assert order == ["late", "late"]
    assert not fence.memory_lock.locked()


@contextmanager
def worker_that_says(directory: Path, say: Say) -> Iterator[DeviceClient]:
    """A client of a worker that answers as `say` does, but for AskHello."""
    directory.chmod(0o700)
    listener = wire.listen(directory / "w.sock")

    def accept() -> None:
        with suppress(OSError):
            while True:
                sock, _ = listener.accept()
                threading.Thread(target=answer, args=(sock,), daemon=True).start()

    def answer(sock: Any) -> None:
        channel = channel_of(sock, m.REQUESTS)
        with suppress(ElasticError, ValueError):
            while True:
                channel.wait()
                asked, _ = channel.receive()
                if isinstance(asked.request, m.AskHello):
                    channel.send(m.Answered(asked.number, m.Hello(0, 1, "host", PAGE, 1)))
                    continue
                for each in say(asked.number, asked.request):
                    channel.send(each)
        channel.close()

    threading.Thread(target=accept, daemon=True).start()
    try:
        with DeviceClient(directory / "w.sock", 0.5) as client:
            yield client
    finally:
        listener.shutdown(2)
        listener.close()


def test_answers_to_earlier_requests_are_dropped(tmp_path: Path) -> None:
    def late_first(number: int, _: m.Request) -> list[m.Answered]:
        late = [m.Answered(old, m.Digest("late")) for old in range(1, number)]
        return [*late, m.Answered(number, m.Digest(f"{number}"))]

    with worker_that_says(tmp_path, late_first) as client:
        assert [client.digest(W13, 0) for _ in range(3)] == ["2", "3", "4"]
        assert not client.is_in_doubt


def test_late_answers_without_end_meet_the_deadline(tmp_path: Path) -> None:
    def only_late(number: int, _: m.Request) -> Iterator[m.Answered]:
        while True:  # until the client has left
            time.sleep(0.01)
            yield m.Answered(1, m.Done())

    with worker_that_says(tmp_path, only_late) as client:
        began = time.monotonic()
        with pytest.raises(MemoryWorkerError, match=r"longer than 0\.5 s"):
            client.digest(W13, 0)
        assert time.monotonic() - began < 1.5
        assert client.is_in_doubt


@pytest.mark.parametrize(
    ("ahead", "reply", "error", "reason"),
    [
        (1, m.Digest("0"), MemoryWorkerError, "answered request 3; 2 was the last"),
        (1000, m.Digest("0"), MemoryWorkerError, "answered request 1002; 2 was the last"),
        (0, m.Changed({}), WireError, "answered Changed, not Digest"),
    ],
    ids=["never sent", "never sent, by far", "another kind"],
)
def test_an_answer_to_nothing_that_was_asked_leaves_the_caller_in_doubt(
    tmp_path: Path, ahead: int, reply: Any, error: type[Exception], reason: str
) -> None:
    with worker_that_says(
        tmp_path, lambda number, _: [m.Answered(number + ahead, reply)]
    ) as client:
        with pytest.raises(error, match=reason):
            client.digest(W13, 0)
        assert client.is_in_doubt


@pytest.mark.parametrize("how", ["doubled answer", "doubled answer, late", "doubled request, late"])
def test_pages_in_several_parts_come_twice(tmp_path: Path, how: str) -> None:
    num_pages = wire.MAX_FDS * 2 + 20
    backend = sgl_vmm.open_backend("host", page_bytes=PAGE, capacity_bytes=PAGE)
    with hmm_of(tmp_path, 1, budget_bytes=num_pages * PAGE, add=False) as hmm:
        hmm.define(shape_of_one_region(num_pages))
        hmm.add_device(0)
        hmm.client(0).map_slots({"trunk": [(0, 1)]})
        proxy = Proxy(hmm.socket_path(0), tmp_path / "sockets" / "p.sock", how, PAGES)
        with DeviceClient(proxy.path, 5.0) as client:
            before = settle(count_fds)
            for _ in range(2):
                [(_, handles)] = client.import_pages(backend, {"trunk": [(0, 1)]})["trunk"]
                assert len({handle.value for handle in handles}) == num_pages
            assert client.hello() == client.info
            client.forget_pages()
            assert comes_to(lambda: count_fds() <= before, True)
        assert proxy.is_done
        proxy.close()
