"""Messages to the ranks: what they raise is raised here, silence ends, answers are not mixed up."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from sgl_esft import errors, sglang_api
from sgl_esft.lifecycle import ranks
from sgl_esft.lifecycle.commands import RankCommand, error_of, reply_table
from sgl_esft.lifecycle.ranks import Ranks

REF = sglang_api.make_adapter_ref("math", "/folder", False)


class Manager:
    """Answers every message with the same."""

    def __init__(self, *answers: Any, delay_s: float = 0.0) -> None:
        self._answers = list(answers)
        self._delay_s = delay_s

    def auto_create_handle_loop(self) -> None: ...

    async def update_lora_adapter_communicator(self, message: Any) -> list[Any]:
        await asyncio.sleep(self._delay_s)
        return self._answers


def answer(message: str = "", table: dict[str, str] | None = None) -> Any:
    return sglang_api.make_lora_result(not message, message, table or {})


LOST = answer("RequestTimeoutError: no answer")
GONE = answer("UnknownAdapterError: not loaded")


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("NoFreeSlotError: none is free", errors.NoFreeSlotError, "none is free"),
        ("AdapterPathError: a: b", errors.AdapterPathError, "a: b"),
        ("ValueError: x", errors.InvariantError, "a rank failed: ValueError: x"),
        ("annotations: x", errors.InvariantError, "a rank failed: annotations: x"),
        ("", errors.InvariantError, "a rank failed: "),
    ],
)
def test_a_ranks_error_keeps_its_name(text: str, kind: type[Exception], message: str) -> None:
    error = error_of(text)
    assert type(error) is kind
    assert str(error) == message


def test_one_rank_that_fails_is_enough() -> None:
    sent = Ranks(Manager(answer(), answer("NoFreeSlotError: none"))).admit(REF)
    with pytest.raises(errors.NoFreeSlotError, match="none"):
        asyncio.run(sent)


def test_silence_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "COMMAND_TIMEOUT_S", 0.01)
    monkeypatch.setattr(ranks, "CHANGE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(ranks, "UNLOAD_PAUSE_S", 0.0)
    silent = Ranks(Manager(answer(), delay_s=60))
    for sent in (silent.report(), silent.unload(REF), silent.admit(REF), silent.poll("id")):
        with pytest.raises(errors.RequestTimeoutError, match="have not answered within 0 s"):
            asyncio.run(sent)


def test_an_answer_to_a_command_is_no_answer_to_a_load() -> None:
    late = Ranks(Manager(answer(table=reply_table(RankCommand("poll"), {}))))
    with pytest.raises(errors.RequestTimeoutError, match="late"):
        asyncio.run(late.admit(REF))
    with pytest.raises(errors.RequestTimeoutError, match="answered an earlier command late"):
        asyncio.run(late.report())
    with pytest.raises(errors.InvariantError, match="answered a command with"):
        asyncio.run(Ranks(Manager(answer(table={"math": "/folder"}))).report())


@pytest.mark.parametrize(
    ("answers", "failure"),
    [
        ([LOST, answer()], None),
        ([LOST, LOST, GONE], None),
        ([LOST, LOST, LOST, answer()], errors.RequestTimeoutError),
        ([GONE, answer()], errors.UnknownAdapterError),
    ],
)
def test_an_unload_is_asked_for_again(
    answers: list[Any], failure: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "UNLOAD_PAUSE_S", 0.0)
    manager = Manager()

    async def next_one(message: Any) -> list[Any]:
        return [answers.pop(0)]

    manager.update_lora_adapter_communicator = next_one  # type: ignore[method-assign]
    with pytest.raises(failure) if failure else contextlib.nullcontext():
        asyncio.run(Ranks(manager).unload(REF))
    assert len(answers) == (failure is not None)
