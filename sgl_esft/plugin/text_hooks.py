"""Hook functions around SGLang's work on texts in the process that serves HTTP: time limits.

    chat request -> [check: its tools' schemas] -> [render: its chat template] -> engine
    prompt -> [tokenize] -> a thread, where it is large
    client <- [parse: reasoning, tool calls] <- the model's answer

A parser that fails at an answer ends that request with an error that names it. What it finds is put
so that it can be sent, and it is given the tools of any route as those of chat requests are.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

import msgspec

from sgl_esft.errors import EsftError, InvariantError, PromptTooLongError, TextParserError
from sgl_esft.http import time_limit, tokenizing

_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_converted: ContextVar[Future[Any] | None] = ContextVar("sgl_esft_converted", default=None)


def check(original: Callable[..., Any], serving: Any, request: Any) -> Any:
    """SGLang's checks of a chat request. Raises TextTimeoutError."""
    return time_limit.run("checking the request's tools", original, serving, request)


def render(original: Callable[..., Any], serving: Any, *args: Any, **kwargs: Any) -> Any:
    """A chat template of the model's. Raises TextTimeoutError."""
    return time_limit.run("rendering the chat template", original, serving, *args, **kwargs)


def give_tools(
    parser: Any, tools: Any, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before a parser of tool calls is made: /parse_function_call's tools lack what some read."""
    if not any(isinstance(tool, msgspec.Struct) for tool in tools or ()):
        return None
    from sgl_esft import sglang_api  # late: this is imported before SGLang

    return (parser, [sglang_api.chat_tool(tool) for tool in tools], *args), kwargs


def parse(original: Callable[..., Any], parser: Any, *args: Any, **kwargs: Any) -> Any:
    """One call of a parser of answers. Raises TextParserError, TextTimeoutError."""
    return _sendable(_parsed(original, parser, *args, **kwargs))


def _sendable(found: Any) -> Any:
    """With half pairs of UTF-16 in calls' JSON escaped: as characters no answer can hold them."""
    calls = found[1] if isinstance(found, tuple) else getattr(found, "calls", None)
    for call in calls if isinstance(calls, list) else ():
        if _SURROGATE.search(call.parameters or ""):
            call.parameters = _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", call.parameters)
    return found


def _parsed(original: Callable[..., Any], parser: Any, *args: Any, **kwargs: Any) -> Any:
    name = _name(parser)
    try:
        return time_limit.run_for(parser, f"the parser {name!r}", original, parser, *args, **kwargs)
    except EsftError:
        raise
    except Exception as error:
        raise time_limit.note(_failed(name, error)) from error


def _failed(name: str, error: Exception) -> TextParserError:
    return TextParserError(
        f"the parser {name!r} cannot read this text ({type(error).__name__}): the model's answer "
        "is not of its form; ask again, without tools or with another prompt"
    )


def _name(parser: Any) -> str:
    """What the command line calls it."""
    detector = getattr(parser, "detector", parser)
    known = getattr(parser, "ToolCallParserEnum", None) or getattr(parser, "DetectorMap", {})
    names = (name for name, kind in known.items() if kind is type(detector))
    return next(names, type(detector).__name__)


async def tokenize(
    original: Callable[..., Coroutine[Any, Any, Any]],
    manager: Any,
    texts: Any,
    is_cross_encoder: bool = False,
) -> Any:
    """SGLang's tokenizing of prompts, with large ones in a thread. Raises PromptTooLongError."""
    work = partial(original, manager, texts, is_cross_encoder)
    is_small = tokenizing.num_chars(texts) <= tokenizing.SMALL_CHARS
    if is_small or manager.tokenizer is None or manager.async_dynamic_batch_tokenizer is not None:
        return await work()
    try:
        return await asyncio.wrap_future(tokenizing.pool.submit(_tokenized, manager, texts, work))
    except PromptTooLongError as error:
        raise time_limit.note(error) from None


def _tokenized(manager: Any, texts: Any, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """In a thread: a coroutine that waits for nothing."""
    if not manager.allow_auto_truncate:
        tokenizing.check_fits(manager.tokenizer, manager.context_len, texts)
    try:
        work().send(None)
    except StopIteration as end:
        return end.value
    raise InvariantError("SGLang's tokenizing waits for something; it cannot run in a thread")


async def convert_aside(
    original: Callable[..., Coroutine[Any, Any, Any]],
    serving: Any,
    chat_request: Any,
    anthropic_request: Any,
    raw_request: Any,
) -> Any:
    """A Messages request is converted in a thread, as SGLang does it for chat requests."""
    chat = serving.openai_serving_chat
    future = tokenizing.pool.submit(chat._convert_to_internal_request, chat_request, raw_request)
    await asyncio.gather(asyncio.wrap_future(future), return_exceptions=True)
    token = _converted.set(future)
    try:
        return await original(serving, chat_request, anthropic_request, raw_request)
    finally:
        _converted.reset(token)


def convert(
    original: Callable[..., Any], serving: Any, request: Any, raw_request: Any = None
) -> Any:
    """What `convert_aside` has made already, or SGLang's own."""
    future = _converted.get()
    return original(serving, request, raw_request) if future is None else future.result()
