"""Large prompts are tokenized in a thread, and not at all where they cannot fit."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_esft.errors import PromptTooLongError
from sgl_esft.http import tokenizing
from sgl_esft.plugin import text_hooks

pytestmark = pytest.mark.anyio

CONTEXT = 5000
LARGE = "ab" * tokenizing.SMALL_CHARS


class Tokenizer:
    """Makes a token of `step` characters; its longest has 4 bytes."""

    def __init__(self, step: int) -> None:
        self._step = step

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "abcd": 1}

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [0] * (len(text) // self._step)}


def _manager(step: int = 1, **more: Any) -> Any:
    values = {"allow_auto_truncate": False, "async_dynamic_batch_tokenizer": None, **more}
    return SimpleNamespace(tokenizer=Tokenizer(step), context_len=CONTEXT, **values)


async def _thread(manager: Any, texts: Any, is_cross_encoder: bool = False) -> bool:
    """In SGLang's place: whether it was called in the main thread."""
    return threading.current_thread() is threading.main_thread()


async def test_large_texts_are_tokenized_in_a_thread() -> None:
    assert await text_hooks.tokenize(_thread, _manager(context=10**9), "ab")
    manager = _manager()
    manager.context_len = 10**6
    for texts in (LARGE, [LARGE], [[LARGE, "b"]], ["a" * 100] * 1000):
        assert not await text_hooks.tokenize(_thread, manager, texts)


@pytest.mark.parametrize("texts", [LARGE, ["a", LARGE]])
async def test_a_text_that_cannot_fit_is_refused(texts: Any) -> None:
    with pytest.raises(PromptTooLongError, match="has 32768 bytes"):
        await text_hooks.tokenize(_thread, _manager(), texts)
    assert not await text_hooks.tokenize(_thread, _manager(allow_auto_truncate=True), texts)


async def test_a_tokenizer_that_shortens_text_refuses_none() -> None:
    """One token for any unknown word, or for any number of spaces."""
    assert tokenizing.longest_token(Tokenizer(1)) == 4
    assert tokenizing.longest_token(Tokenizer(4096)) is None
    assert not await text_hooks.tokenize(_thread, _manager(step=4096), LARGE)


async def test_what_tokenizing_raises_is_raised() -> None:
    async def fails(*_: Any) -> None:
        raise ValueError("no")

    manager = _manager(allow_auto_truncate=True)
    with pytest.raises(ValueError, match="no"):
        await text_hooks.tokenize(fails, manager, LARGE)


@pytest.mark.parametrize("error", [None, KeyError("x")])
async def test_a_messages_request_is_converted_once_in_a_thread(error: Any) -> None:
    threads: list[bool] = []

    def convert(request: Any, raw: Any) -> str:
        threads.append(threading.current_thread() is threading.main_thread())
        if error is not None:
            raise error
        return f"{request} {raw}"

    chat = SimpleNamespace(_convert_to_internal_request=convert)
    serving = SimpleNamespace(openai_serving_chat=chat)

    async def handle(serving: Any, chat_request: Any, asked: Any, raw: Any) -> Any:
        return text_hooks.convert(lambda *_: "twice", chat, chat_request, raw)

    call = text_hooks.convert_aside(handle, serving, "a", "b", "c")
    if error is None:
        assert await call == "a c"
    else:
        with pytest.raises(KeyError):
            await call
    assert threads == [False]
    assert text_hooks.convert(lambda *_: "own", chat, "a") == "own"
