"""SGLang's own communicators under the router's wire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from sglang.srt.managers import communicator

import sgl_esft  # noqa: F401  # comes before SGLang: it prepares for its imports
from sgl_elastic.front import sglang_wire

pytestmark = pytest.mark.anyio


@dataclass(frozen=True)
class Question:
    """Stands for any control message."""

    text: str


@dataclass(frozen=True)
class Other(Question):
    """One of another kind."""


@pytest.fixture
def wire() -> Iterator[sglang_wire.SglangWire]:
    made = sglang_wire.SglangWire()
    yield made
    made._context.term()


def asker_of(send: Callable[[Any], None], fan_out: int, mode: str = "queueing") -> Any:
    """SGLang's communicator, as the hook leaves it."""
    asker = communicator.FanOutCommunicator(send, fan_out, mode)
    sglang_wire.note_who_asks(None, asker, send, fan_out, mode)
    return asker


async def asking(asker: Any, question: object) -> asyncio.Task[Any]:
    """A question that has been sent."""
    task = asyncio.create_task(asker(question))
    await asyncio.sleep(0)
    return task


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("mode", ["queueing", "watching"])
async def test_what_is_held_waits_for_the_ranks_that_get_it(
    wire: sglang_wire.SglangWire, before: int, after: int, mode: str
) -> None:
    """With SGLang's own count it ends too early, its last answer the next one's; or never."""
    held: list[Any] = []
    asker = asker_of(held.append, before, mode)
    answers = await asking(asker, Question("one"))
    asker.set_fan_out(after)  # the switch
    wire.expect_answers(held[0])
    for number in range(after):
        assert not answers.done()
        asker.handle_recv(number)
        await asyncio.sleep(0)
    assert await asyncio.wait_for(answers, 1.0) == list(range(after))
    assert held == [Question("one")]


async def test_what_is_sent_at_once_is_left_to_sglang(wire: sglang_wire.SglangWire) -> None:
    asker = asker_of(wire.expect_answers, 2)
    answers = await asking(asker, Question("two"))
    asker.set_fan_out(3)  # it went to two ranks
    asker.handle_recv("a")
    asker.handle_recv("b")
    assert await asyncio.wait_for(answers, 1.0) == ["a", "b"]


async def test_answers_of_ranks_that_are_lost_do_not_count(wire: sglang_wire.SglangWire) -> None:
    """One of two ranks has answered, and then both are replaced, and asked again."""
    sent: list[Any] = []
    asker = asker_of(sent.append, 2)
    answers = await asking(asker, Question("three"))
    assert wire.is_waiting(sent[0])
    asker.handle_recv("lost")
    wire.expect_answers(sent[0])
    asker.handle_recv("a")
    await asyncio.sleep(0)
    assert not answers.done()
    asker.handle_recv("b")
    assert not wire.is_waiting(sent[0])
    assert await asyncio.wait_for(answers, 1.0) == ["a", "b"]
    assert not wire.is_waiting(sent[0])


async def test_a_question_waits_only_until_its_asker_asks_another(
    wire: sglang_wire.SglangWire,
) -> None:
    """Loads and unloads have one asker: it is the unload that waits."""
    sent: list[Any] = []
    asker = asker_of(sent.append, 1)
    first = await asking(asker, Question("load"))
    asker.handle_recv("loaded")
    await first
    second = await asking(asker, Other("unload"))
    assert [wire.is_waiting(each) for each in sent] == [False, True]
    asker.handle_recv("unloaded")
    await second
