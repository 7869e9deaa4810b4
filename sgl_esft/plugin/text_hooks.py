"""Hook functions around SGLang's work on texts in the process that serves HTTP: time limits.

    chat request -> [check: its tools' schemas] -> [render: its chat template] -> engine
    client <- [parse: reasoning, tool calls] <- the model's answer

A parser that fails at an answer ends that request with an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_esft.errors import EsftError, TextParserError
from sgl_esft.http import time_limit


def check(original: Callable[..., Any], serving: Any, request: Any) -> Any:
    """SGLang's checks of a chat request. Raises TextTimeoutError."""
    return time_limit.run("checking the request's tools", original, serving, request)


def render(original: Callable[..., Any], serving: Any, *args: Any, **kwargs: Any) -> Any:
    """A chat template of the model's. Raises TextTimeoutError."""
    return time_limit.run("rendering the chat template", original, serving, *args, **kwargs)


def parse(original: Callable[..., Any], parser: Any, *args: Any, **kwargs: Any) -> Any:
    """One call of a parser of answers. Raises TextParserError, TextTimeoutError."""
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
