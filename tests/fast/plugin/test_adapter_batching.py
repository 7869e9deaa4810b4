"""The order of admission: its preference, and its bound against first come, first served."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.mem_cache.radix_cache import RadixCache

from sgl_esft import config, env
from sgl_esft.plugin.adapter_batching import AdapterId, ArrivalBook, Waiting, plan_order
from sgl_esft.plugin.schedule_hooks import Composer, max_overtakes_for

WEAVING = {"max_adapters": 1, "max_experts_per_adapter": 1}

Plan = Callable[[Sequence[Waiting], Mapping[AdapterId, int], int], list[int]]


@dataclass(frozen=True)
class Request:
    """What a client sends, by number in order of arrival."""

    arrives_at_step: int
    adapter: AdapterId
    num_steps: int  # it runs for so long


@dataclass(frozen=True)
class Trace:
    """Requests by arrival, and how many may start in each step; the last number goes on."""

    requests: tuple[Request, ...]
    room: tuple[int, ...]


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    requests = draw(
        st.lists(
            st.builds(
                Request,
                st.integers(0, 12),
                st.sampled_from([None, "a", "b", "c", "d"]),
                st.integers(1, 6),
            ),
            min_size=1,
            max_size=40,
        )
    )
    room = draw(st.lists(st.integers(0, 4), max_size=20))
    return Trace(tuple(sorted(requests, key=lambda r: r.arrives_at_step)), (*room, 1))


def admissions(trace: Trace, max_overtakes: int, plan: Plan = plan_order) -> list[list[int]]:
    """The requests that each admitting step starts, in order."""
    book, queue, running, steps = ArrivalBook(), [], {}, []
    num_arrived = step = 0
    while num_arrived < len(trace.requests) or queue:
        for number, request in enumerate(trace.requests[num_arrived:], num_arrived):
            if request.arrives_at_step <= step:
                queue.append(number)
                num_arrived = number + 1
        running = {n: left - 1 for n, left in running.items() if left > 1}
        book.observe(queue)
        by_arrival = book.by_arrival()
        waiting = [Waiting(trace.requests[n].adapter, count) for n, count in by_arrival]
        order = plan(waiting, Counter(trace.requests[n].adapter for n in running), max_overtakes)
        queue = [by_arrival[index][0] for index in order]
        room = trace.room[min(step, len(trace.room) - 1)]
        admitted, queue = queue[:room], queue[room:]
        running |= {n: trace.requests[n].num_steps for n in admitted}
        steps += [admitted] if admitted else []
        step += 1
    return steps


def overtakes_of(steps: list[list[int]], number: int) -> int:
    """Later requests that started in a step before the request's own."""
    own = next(i for i, step in enumerate(steps) if number in step)
    return sum(other > number for step in steps[:own] for other in step)


def most_overtakes(steps: list[list[int]]) -> int:
    return max(overtakes_of(steps, n) for step in steps for n in step)


def flat(steps: list[list[int]]) -> list[int]:
    return [number for step in steps for number in step]


def step_of(steps: list[list[int]]) -> dict[int, int]:
    return {number: i for i, step in enumerate(steps) for number in step}


def greedy(
    waiting: Sequence[Waiting], num_running: Mapping[AdapterId, int], max_overtakes: int
) -> list[int]:
    """The same preference without the bound."""
    return plan_order([dataclasses.replace(w, num_overtakes=0) for w in waiting], num_running, 999)


# One request of `b` behind enough of `a` that one of `a` always runs and always waits.
STARVING = Trace(
    (Request(0, "a", 3), Request(0, "b", 1), *(Request(t, "a", 3) for t in range(30))), (1,)
)


@given(traces(), st.integers(0, 8))
@example(STARVING, 3)
def test_nobody_is_overtaken_or_starts_later_than_the_bound_allows(
    trace: Trace, max_overtakes: int
) -> None:
    """By place in the line, and by admitting steps of the same room."""
    steps, plain = admissions(trace, max_overtakes), admissions(trace, 0)
    assert most_overtakes(steps) <= max_overtakes
    assert [len(step) for step in steps] == [len(step) for step in plain], "no room is wasted"
    place = {number: i for i, number in enumerate(flat(steps))}
    assert all(place[n] <= i + max_overtakes for i, n in enumerate(flat(plain)))
    late, early = step_of(steps), step_of(plain)
    assert all(late[n] <= early[n] + max_overtakes for n in early)


def test_without_the_bound_a_request_starves() -> None:
    """So the properties above can fail."""
    assert most_overtakes(admissions(STARVING, 3, greedy)) > 20
    assert most_overtakes(admissions(STARVING, 3)) == 3


counted = st.lists(
    st.tuples(st.sampled_from([None, "a", "b", "c"]), st.integers(0, 6)), max_size=25
).map(lambda rows: [Waiting(a, n) for a, n in sorted(rows, key=lambda row: -row[1])])
counts = st.dictionaries(st.sampled_from([None, "a", "b", "c"]), st.integers(0, 3))


def reference(
    waiting: Sequence[Waiting], running: Mapping[AdapterId, int], max_overtakes: int
) -> list[int]:
    """The definition, a step at a time."""
    left, order, tokens = list(range(len(waiting))), [], Counter(running)
    overtakes = [w.num_overtakes for w in waiting]
    while left:
        if overtakes[left[0]] >= max_overtakes:
            chosen = left[0]
        else:
            chosen = max(left, key=lambda i: (tokens[waiting[i].adapter_id], -i))
        for index in left:
            overtakes[index] += index < chosen
        left.remove(chosen)
        order.append(chosen)
        tokens[waiting[chosen].adapter_id] += 1
    return order


@given(counted, counts, st.integers(0, 6))
def test_the_order_is_the_definitions(
    waiting: list[Waiting], running: dict[AdapterId, int], max_overtakes: int
) -> None:
    expected = reference(waiting, running, max_overtakes)
    assert plan_order(waiting, running, max_overtakes) == expected
    shuffled = dict(reversed(running.items()))
    assert plan_order(waiting, shuffled, max_overtakes) == expected, "no order of a dict's keys"


def test_the_book_counts_who_went_ahead() -> None:
    book = ArrivalBook()
    book.observe("abcd")
    book.observe("ac")
    assert book.by_arrival() == [("a", 2), ("c", 1)]
    assert book.num_admissions_that_overtook == 2
    book.observe("ca")
    assert book.by_arrival() == [("a", 2), ("c", 1)], "by arrival, whatever the queue's order"
    book.observe("cb")
    assert book.by_arrival() == [("c", 1), ("b", 0)], "who comes back comes last"
    assert book.num_admissions_that_overtook == 2
    book.observe("")
    assert book.by_arrival() == []


@dataclass(eq=False)
class Req:
    """The part of SGLang's Req that the order is made of."""

    rid: str
    lora_id: AdapterId
    retraction_count: int = 0
    is_finished: bool = False

    def finished(self) -> bool:
        return self.is_finished


def test_the_queue_is_put_in_order_in_place() -> None:
    queue = [Req("0", "b"), Req("1", "a"), Req("2", "b"), Req("3", "a")]
    before = list(queue)
    running = [Req("x", "a"), Req("y", "b", is_finished=True), Req("z", "b", is_finished=True)]
    Composer(8, None).reorder(queue, running)
    assert [req.rid for req in queue] == ["1", "3", "0", "2"]
    assert {id(req) for req in queue} == {id(req) for req in before}


def test_a_composer_that_is_off_touches_nothing() -> None:
    queue = [Req("0", "b"), Req("1", "a")]
    Composer(0, None).reorder(queue, [Req("x", "a")])
    assert [req.rid for req in queue] == ["0", "1"]


def test_overtakes_are_remembered_between_steps() -> None:
    """Steps of one admission; `b` is overtaken twice, then it is its turn."""
    composer, running = Composer(2, None), [Req("x", "a")]
    queue = [Req("b", "b"), *(Req(f"a{i}", "a") for i in range(4))]
    started = []
    while queue:
        composer.reorder(queue, running)
        running.append(queue.pop(0))
        started.append(running[-1].rid)
    assert started == ["a0", "a1", "b", "a2", "a3"]


def test_a_retracted_request_arrives_anew() -> None:
    """SGLang appends it, and it counts as one that went ahead of those that still wait."""
    composer = Composer(1, None)
    queue = [Req("old", "b"), Req("back", "a")]
    composer.reorder(queue, [Req("x", "a")])
    assert [req.rid for req in queue] == ["back", "old"]
    returned = queue.pop(0)
    returned.retraction_count += 1
    queue.append(returned)
    composer.reorder(queue, [Req("x", "a")])
    assert [req.rid for req in queue] == ["old", "back"]


def test_who_waits_for_a_slot_is_overtaken_more_often() -> None:
    """Each turn on a slot costs copies of an adapter: not for two requests."""
    composer, running = Composer(1, None, 3), [Req("x", "a")]
    oldest = Req("0", "b")
    for number in range(3):
        composer.reorder([oldest, Req(str(number + 1), "a")], running)
        assert composer.next_adapter is None, number
    composer.reorder([oldest], running)
    assert composer.next_adapter == "b"


def test_two_requests_with_one_id_are_both_kept() -> None:
    first, second = Req("0", "b"), Req("0", "a")
    queue = [first, second]
    Composer(1, None).reorder(queue, [Req("x", "a")])
    assert queue == [second, first]


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that weaves, with a bound of 5."""
    config.current_config.cache_clear()
    monkeypatch.setenv(env.CONFIG, json.dumps({**WEAVING, "max_overtakes": 5}))
    yield
    config.current_config.cache_clear()


@pytest.mark.parametrize(
    ("name", "has_priorities", "expected", "said"),
    [
        ("fcfs", False, 5, ""),
        ("lof", False, 0, "this server orders by lof."),
        ("lpm", False, 0, "this server orders by lpm."),
        ("fcfs", True, 0, "this server orders by fcfs and priority."),
    ],
)
@pytest.mark.usefixtures("configured")
def test_another_order_stands_and_the_log_says_so(
    name: str, has_priorities: bool, expected: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = SchedulePolicy(name, RadixCache.create_simulated(), False, has_priorities, False)
    with caplog.at_level(logging.INFO, "sgl_esft"):
        assert max_overtakes_for(policy) == expected
    assert said in caplog.text
    assert bool(caplog.text) == bool(said)
