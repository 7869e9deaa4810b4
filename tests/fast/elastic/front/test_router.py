"""The router over a wire that only records: order, ranks, switches, what waits for what."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from sgl_elastic.autoscale.slo import SloTargets, SloWindow
from sgl_elastic.errors import (
    BusyError,
    EngineFailedError,
    IllegalTransitionError,
    PlanError,
)
from sgl_elastic.front import router as module
from sgl_elastic.front.dispatcher import FrontListener
from sgl_elastic.front.rank_choice import RankPolicy, RankStrategy
from sgl_elastic.front.router import RequestRouter
from sgl_elastic.instance.handover import HandedOver
from sgl_elastic.types import Placement

ONE = Placement((0,), (0, 0), (100,))
TWO = Placement((0, 1), (0, 1), (100, 100))
THREE = Placement((0, 1, 2), (0, 1), (100, 100, 100))
NOTHING = HandedOver({}, {0: 0, 1: 1})


@dataclass
class Request:
    rid: str
    lora_id: str | None = None
    input_ids: tuple[int, ...] | None = (1, 2, 3)
    routed_dp_rank: int | None = None


@dataclass
class Batch:
    requests: list[Request]


@dataclass
class Control:
    """An abort, a flush, a pause of a client's: anything that is no request."""

    name: str
    is_adapter_change: bool = False


@dataclass
class FakeWire:
    """Sockets are their addresses; `sent` is every message, in order, with its socket."""

    sent: list[tuple[str, Any]] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    failed: list[tuple[str, Exception]] = field(default_factory=list)
    is_changing: bool = False
    waiting: tuple[str, ...] = ()  # names of control messages whose answers have not come
    on_expect: Callable[[Any], None] = lambda message: None
    on_send: Callable[[Any], None] = lambda message: None

    def open(self, address):
        return address

    def close(self, socket):
        self.closed.append(socket)

    def send(self, socket, message):
        self.sent.append((socket, message))
        self.on_send(message)

    def is_changing_adapters(self):
        return self.is_changing

    def expect_answers(self, message):
        self.on_expect(message)

    def is_waiting(self, message):
        return message.name in self.waiting

    def is_request(self, message):
        return isinstance(message, Request | Batch)

    def is_adapter_change(self, message):
        return isinstance(message, Control) and message.is_adapter_change

    def singles(self, message):
        return message.requests if isinstance(message, Batch) else [message]

    def with_rank(self, request, rank):
        return replace(request, routed_dp_rank=rank)

    def pause(self):
        return Control("pause")

    def answer_at(self, address):
        pass

    def fail(self, rid, error):
        self.failed.append((rid, error))

    def warm_up(self, rid, rank):
        return Request(f"warm-{rid}", routed_dp_rank=rank)


class Bench:
    """A router with two instances connected; the first serves on `placement`."""

    def __init__(self, placement: Placement = TWO, **more: Any) -> None:
        self.wire = FakeWire()
        self.sizes: list[int] = []
        self.held_s: list[float] = []
        self.woken: list[str] = []
        policy = RankPolicy(strategy=RankStrategy.ROUND_ROBIN)
        more.setdefault("window", SloWindow(SloTargets(1.0, 0.1)))
        self.router = RequestRouter(self.wire, policy=policy, **more)
        self.num_given_up = 0
        self.router.listen(FrontListener(self.sizes.append, self.held_s.append, self._count))
        for name in ("i1", "i2"):
            self.connect(name)
        self.router.begin("i1", placement)

    def _count(self) -> None:
        self.num_given_up += 1

    def connect(self, name: str) -> None:
        self.router.connect(name, f"{name}.in", lambda: self.woken.append(name))

    def sent_to(self, instance: str) -> list[str]:
        """Names of what went there: of a request, with its rank."""
        messages = [m for socket, m in self.wire.sent if socket == f"{instance}.in"]
        return [
            f"{m.rid}@{m.routed_dp_rank}" if isinstance(m, Request) else m.name for m in messages
        ]

    def dispatch(self, *names: str) -> None:
        for name in names:
            self.router.dispatch(Request(name))

    def output(self, rid: str, num_tokens: int, *, is_finished: bool = False) -> None:
        self.router.on_output([rid], ["stop" if is_finished else None], [num_tokens])

    def load(self, adapter: str) -> None:
        self.router.dispatch(Control(f"load {adapter}", is_adapter_change=True))

    def switch(
        self, placement: Placement = THREE, handed: HandedOver = NOTHING, name: str = "i2"
    ) -> None:
        self.router.hold()
        self.router.switch(name, placement, handed)

    def scale(
        self, placement: Placement = THREE, handed: HandedOver = NOTHING, name: str = "i2"
    ) -> None:
        self.switch(placement, handed, name)
        self.router.release()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_requests_are_dealt_to_ranks_and_the_rest_goes_as_it_is(bench: Bench) -> None:
    bench.dispatch("a", "b", "c")
    bench.router.dispatch(Control("flush"))
    bench.router.dispatch(Request("kept", routed_dp_rank=0))
    bench.router.dispatch(Request("no such rank", routed_dp_rank=2))
    assert bench.sent_to("i1") == ["a@0", "b@1", "c@0", "flush", "kept@0", "no such rank@0"]
    assert bench.sent_to("i2") == []
    assert bench.sizes == [], "nobody needs to be told of the first"


def test_a_batch_is_split(bench: Bench) -> None:
    bench.router.dispatch(Batch([Request("a"), Request("b"), Request("c", input_ids=None)]))
    assert bench.sent_to("i1") == ["a@0", "b@1", "c@0"]
    assert bench.router.num_running() == 3
    assert bench.router.num_tokens() == 6, "one of them has embeddings, no token ids"


def test_the_callers_message_stays_his(bench: Bench) -> None:
    """SGLang keeps using what it has sent, and a second send chooses a rank anew."""
    request = Request("a")
    bench.router.dispatch(request)
    assert request.routed_dp_rank is None
    bench.router.hold()
    bench.router.dispatch(request)
    request.rid = "changed"
    bench.router.release()
    assert bench.sent_to("i1") == ["a@0", "a@1"]


def test_held_messages_are_released_in_their_order(bench: Bench) -> None:
    bench.router.hold()
    bench.dispatch("a")
    bench.router.dispatch(Control("abort a"))
    bench.dispatch("b")
    assert bench.sent_to("i1") == []
    assert bench.router.num_running() == 0
    bench.router.release()
    assert bench.sent_to("i1") == ["a@0", "abort a", "b@1"]
    bench.dispatch("c")
    assert bench.sent_to("i1")[-1] == "c@0"


def test_what_waits_goes_to_the_new_instance_after_what_ran(bench: Bench) -> None:
    """A rolled-back hold sends it to the old one: the test above."""
    bench.dispatch("a", "b")
    bench.router.hold()
    bench.dispatch("c")
    bench.router.dispatch(Control("abort a"))
    bench.scale()
    assert bench.sent_to("i1") == ["a@0", "b@1"]
    assert bench.sent_to("i2") == ["a@0", "b@1", "c@2", "abort a"]
    assert bench.sizes == [3]


def test_a_switch_sends_each_request_once_to_where_its_kv_went(bench: Bench) -> None:
    bench.dispatch("a", "b", "c", "done")
    bench.output("a", 4)
    bench.output("done", 2, is_finished=True)
    handed = HandedOver(ranks={"a": 2}, rank_of_old={0: 1, 1: 0})
    bench.switch(THREE, handed)
    assert bench.sent_to("i2") == ["a@2", "b@0", "c@1"], "a by its KV, the others by their rank"
    bench.router.switch("i2", THREE, handed)  # retried
    assert len(bench.sent_to("i2")) == 3
    bench.router.release()
    bench.output("a", 9, is_finished=True)
    assert bench.router.num_running() == 2


def test_a_second_switch_starts_from_the_ranks_of_the_first(bench: Bench) -> None:
    bench.dispatch("a", "b")
    bench.scale(THREE, HandedOver({}, {0: 2, 1: 0}))
    bench.connect("i3")
    bench.switch(TWO, HandedOver({}, {0: 0, 1: 0, 2: 1}), "i3")
    assert bench.sent_to("i3") == ["a@1", "b@0"]


def test_tokens_that_are_on_their_way_are_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.dispatch("a", "b")
    bench.output("a", 3)
    thread = threading.Thread(target=bench.router.wait_for_outputs, args=({"a": 5, "gone": 9},))
    thread.start()
    try:
        thread.join(0.05)
        assert thread.is_alive(), "two tokens of a have not come by"
    finally:
        bench.output("a", 5)
        thread.join(5)
    assert not thread.is_alive()
    monkeypatch.setattr(module, "_OUTPUT_TIMEOUT_S", 0.02)
    with pytest.raises(EngineFailedError, match="outputs of 1 requests"):
        bench.router.wait_for_outputs({"a": 6})


def test_an_idle_instance_is_woken_by_its_first_request(bench: Bench) -> None:
    bench.dispatch("a", "b")
    assert bench.woken == ["i1"]
    bench.output("a", 1, is_finished=True)
    bench.output("b", 1, is_finished=True)
    bench.switch()
    bench.dispatch("c")
    assert bench.woken == ["i1"], "it waits"
    bench.router.release()
    assert bench.woken == ["i1", "i2"]


def test_a_hand_over_that_leaves_a_rank_out_changes_nothing(bench: Bench) -> None:
    bench.dispatch("a", "b")
    with pytest.raises(PlanError):
        bench.switch(ONE, HandedOver({}, {0: 0}))
    assert bench.router.table == ("i1", TWO)
    assert bench.sent_to("i2") == []


def test_a_change_on_its_way_ends_before_changes_are_deferred(bench: Bench) -> None:
    assert not bench.router.defer_adapter_changes(1.0), "none lately"
    bench.router.scaling(False)
    bench.load("x")
    bench.wire.is_changing = True
    ending = threading.Timer(0.05, setattr, (bench.wire, "is_changing", False))
    ending.start()
    assert bench.router.defer_adapter_changes(10.0)
    assert not bench.wire.is_changing
    ending.join()
    bench.load("y")
    bench.wire.is_changing = True  # but it waits here
    assert bench.router.defer_adapter_changes(10.0)
    assert bench.sent_to("i1") == ["load x"]


def test_a_change_that_does_not_end_keeps_no_other_waiting() -> None:
    bench = Bench(clock=itertools.count().__next__)
    bench.wire.is_changing = True
    with pytest.raises(BusyError, match="has not ended within 3 s"):
        bench.router.defer_adapter_changes(3.0)
    bench.load("x")
    assert bench.sent_to("i1") == ["load x"]


def test_what_was_held_is_answered_by_the_ranks_of_the_new_instance(bench: Bench) -> None:
    """Those of the old one may have been more or fewer when it was asked."""
    expected: list[tuple[str, int]] = []
    bench.wire.on_expect = lambda message: expected.append((message.name, len(bench.sizes)))
    bench.router.scaling(True)
    bench.load("x")
    bench.router.hold()
    bench.router.dispatch(Control("flush"))
    assert expected == []
    bench.scale()
    assert expected == [("flush", 1)]
    bench.router.hold()
    bench.router.scaling(False)
    assert bench.sent_to("i2") == ["flush"], "a change that has waited still waits for a hold"
    bench.router.release()
    assert bench.sizes == [3]
    assert expected == [("flush", 1), ("load x", 1)]
    assert bench.sent_to("i2") == ["flush", "load x"]


def test_adapter_changes_wait_for_the_end_of_a_scale(bench: Bench) -> None:
    bench.router.scaling(True)
    bench.load("x")
    bench.router.dispatch(Control("unload y", is_adapter_change=True))
    bench.dispatch("a")
    bench.scale()
    assert bench.sent_to("i1") == ["a@0"]
    bench.router.scaling(False)
    assert bench.sent_to("i2") == ["a@0", "load x", "unload y"]
    bench.load("z")
    assert bench.sent_to("i2")[-1] == "load z"


def test_what_is_aborted_in_its_ranks_queue_has_ended(bench: Bench) -> None:
    """No output says so. It neither runs, nor is it handed over."""
    bench.dispatch("a", "b")
    bench.router.on_abort("a")
    bench.router.on_abort("a")
    bench.router.on_abort("nobody's")
    assert (bench.router.num_running(), bench.router.num_tokens()) == (1, 3)
    bench.scale()
    assert bench.sent_to("i2") == ["b@1"]


def test_a_router_without_an_instance_says_so() -> None:
    router = RequestRouter(FakeWire(), SloWindow(SloTargets(1.0, 0.1)))
    with pytest.raises(IllegalTransitionError, match="no instance serves yet"):
        router.dispatch(Request("a"))


def test_warm_up_asks_all_ranks_at_once(bench: Bench) -> None:
    """They compute each step together: one after the other would take as many times as long."""
    asked: list[Any] = []

    def answer(message: Any) -> None:
        asked.append(message.rid)
        if len(asked) == 3:
            bench.router.on_output(asked, [None] * 3, [1] * 3)

    with pytest.raises(EngineFailedError, match="rank 0 of i2 did not warm up"):
        bench.router.warm_up("i2", 2, timeout_s=0.01)
    bench.wire.sent.clear()
    bench.wire.on_send = answer
    bench.router.warm_up("i2", 3, timeout_s=5.0)
    sent = [name.partition("@") for name in bench.sent_to("i2")]
    assert [rank for _, _, rank in sent] == ["0", "1", "2"]
    assert len({rid for rid, _, _ in sent}) == 3
    assert bench.router.num_running() == 0, "it is nobody's request"


def test_a_pause_goes_to_the_instance_that_is_meant_until_it_is_gone(bench: Bench) -> None:
    bench.router.pause("i2")
    assert (bench.sent_to("i1"), bench.sent_to("i2")) == ([], ["pause"])
    bench.router.disconnect("i2")
    bench.router.disconnect("i2")
    assert bench.wire.closed == ["i2.in"]
    with pytest.raises(EngineFailedError, match="no way to instance i2"):
        bench.router.pause("i2")


def test_the_window_hears_of_arrivals_first_tokens_and_ends() -> None:
    clock = iter([10.0, 10.5, 12.5])  # arrived, first token, finished
    window = SloWindow(SloTargets(ttft_s=1.0, tpot_s=0.1))
    bench = Bench(window=window, clock=lambda: next(clock))
    bench.dispatch("a")
    bench.output("a", 1)
    bench.output("a", 11, is_finished=True)
    found = bench.router.attainment(13.0)
    assert (found.ttft, found.tpot, found.num_finished) == (1.0, 0.0, 1)


@pytest.mark.parametrize(
    ("is_lost", "waiting", "asked"),
    [
        (True, ("load x",), ["load x"]),
        (True, (), []),  # it was answered
        (False, ("load x",), []),  # the old ranks will answer: they saw it before they froze
    ],
)
def test_the_ranks_that_replace_lost_ones_are_asked_what_those_did_not_answer(
    bench: Bench, is_lost: bool, waiting: tuple[str, ...], asked: list[str]
) -> None:
    """Otherwise whoever asked waits for its time-out: ten minutes for an adapter's load."""
    expected: list[str] = []
    bench.wire.on_expect = lambda message: expected.append(message.name)
    bench.wire.waiting = waiting
    bench.load("x")
    bench.dispatch("a")
    if is_lost:
        bench.router.lose("i1")
    bench.scale(TWO)
    assert bench.sent_to("i2") == ["a@0", *asked]
    assert expected == ["load x", *asked]


def test_what_came_meanwhile_is_asked_once(bench: Bench) -> None:
    """The question before it, of the same kind, was answered: it is the later one that waits."""
    bench.router.dispatch(Control("first"))
    bench.router.lose("i1")
    bench.wire.waiting = ("first", "second")  # the wire knows kinds, and not messages
    bench.router.dispatch(Control("second"))
    bench.scale(TWO)
    assert bench.sent_to("i2") == ["second"]
