"""SGLang's own communicators under the switchboard's wire."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from sglang.srt.managers import communicator

import sgl_esft  # noqa: F401  # comes before SGLang: it prepares for its imports
from sgl_elastic.coordinator import sglang_wire


@dataclass(frozen=True)
class Question:
    """Stands for any control message."""

    text: str


@pytest.fixture
def wire() -> Iterator[sglang_wire.SglangWire]:
    made = sglang_wire.SglangWire()
    yield made
    made._context.term()


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("mode", ["queueing", "watching"])
def test_what_is_held_waits_for_the_ranks_that_get_it(
    wire: sglang_wire.SglangWire, before: int, after: int, mode: str
) -> None:
    """With SGLang's own count it ends too early, its last answer the next one's; or never."""
    held: list[Any] = []
    asker = communicator.FanOutCommunicator(held.append, before, mode)
    sglang_wire.note_who_asks(None, asker, held.append, before, mode)

    async def ask() -> Any:
        asking = asyncio.create_task(asker(Question("one")))
        await asyncio.sleep(0)
        asker.set_fan_out(after)  # the switch
        wire.expect_answers(held[0])
        for number in range(after):
            assert not asking.done()
            asker.handle_recv(number)
            await asyncio.sleep(0)
        return await asyncio.wait_for(asking, 1.0)

    assert asyncio.run(ask()) == list(range(after))
    assert held == [Question("one")]


def test_what_is_sent_at_once_is_left_to_sglang(wire: sglang_wire.SglangWire) -> None:
    asker = communicator.FanOutCommunicator(wire.expect_answers, 2)
    sglang_wire.note_who_asks(None, asker, wire.expect_answers, 2)

    async def ask() -> Any:
        asking = asyncio.create_task(asker(Question("two")))
        await asyncio.sleep(0)
        asker.set_fan_out(3)  # it went to two ranks
        asker.handle_recv("a")
        asker.handle_recv("b")
        return await asyncio.wait_for(asking, 1.0)

    assert asyncio.run(ask()) == ["a", "b"]
