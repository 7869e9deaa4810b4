"""SGLang's frontend language with adapters: `from sgl_esft import lang as sgl`.

    program (program.py) -> SGLang's interpreter -> RuntimeEndpoint (endpoint.py) -> /generate

    @sgl.function
    def ask(s, question):
        s += question + sgl.gen("topic", adapter="intent")
        forks = s.fork(2)
        forks[0] += sgl.gen("short", adapter="law")
        forks[1] += sgl.gen("long", adapter=None)      # None is the base model
        s += sgl.gen("answer")                         # what run() or the backend names

    sgl.set_default_backend(sgl.RuntimeEndpoint("http://127.0.0.1:30000"))
    ask.run(question="...", adapter="math")

The first that names an adapter decides: the call, `run` or `run_batch`, the backend. What this
package does not define is SGLang's own, and nothing in SGLang is changed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import sglang

from sgl_esft.lang.endpoint import UNSET, AdapterChoice, RuntimeEndpoint, name_adapter
from sgl_esft.lang.program import ProgramState, SglFunction, function

__all__ = [  # noqa: PLE0604  # and SGLang's
    *sglang.__all__,
    "ProgramState",
    "RuntimeEndpoint",
    "SglFunction",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "select",
]


def __getattr__(name: str) -> Any:
    return getattr(sglang, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _takes_adapter(call: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's function that makes a model call, with one more keyword: `adapter`."""

    @functools.wraps(call)
    def with_adapter(*args: Any, adapter: AdapterChoice = UNSET, **kwargs: Any) -> Any:
        return name_adapter(call(*args, **kwargs), adapter)

    signature = inspect.signature(call)
    keyword = inspect.Parameter("adapter", inspect.Parameter.KEYWORD_ONLY, default=UNSET)
    parameters = [*signature.parameters.values(), keyword]
    with_adapter.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=parameters
    )
    return with_adapter


gen = _takes_adapter(sglang.gen)
gen_int = _takes_adapter(sglang.gen_int)
gen_string = _takes_adapter(sglang.gen_string)
select = _takes_adapter(sglang.select)
