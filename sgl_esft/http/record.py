"""What is known of one HTTP request, gathered while it runs.

    middleware.py --begins--> [RequestRecord] <-- gate.py: key    <-- engine_hooks.py: sequences
                  <--reads when it ends-----

The record of the request at hand is a context variable: tasks that a request starts inherit it.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any, Final

from sgl_esft.http.answers import Headers, header_values

BASE: Final = "base"  # of the label `adapter`
NO_ADAPTER: Final = "(none)"  # of a request that ended before it had one; no adapter has this name
OTHERS: Final = "(others)"  # of adapters that are told apart no more; nor this one
REQUEST_ID_HEADER: Final = b"x-request-id"
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass
class RequestRecord:
    """One request; times in seconds of `time.perf_counter`, as SGLang's own are."""

    request_id: str
    started_s: float
    key_name: str | None = None  # of the API key, never the key; None where there are none
    prompt_tokens: int = 0
    sequences: list[Any] = field(default_factory=list)  # SGLang's ReqState of each

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of all that its sequences use, BASE among them; empty before there are any."""
        return tuple(sorted({adapter_of(state) for state in self.sequences}))

    @property
    def generated_tokens(self) -> int:
        """Tokens so far, over all sequences."""
        return sum(len(state.output_ids) for state in self.sequences)

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token; None before that, and for an answer that is no stream."""
        streams = [s for s in self.sequences if getattr(s.obj, "stream", False)]
        first = [s.time_stats.first_token_time for s in streams if s.output_ids]
        return min(first) - self.started_s if first else None


def adapter_of(state: Any) -> str:
    """The label of one sequence."""
    return state.obj.lora_path or BASE


_current: ContextVar[RequestRecord | None] = ContextVar("sgl_esft_request", default=None)


def current() -> RequestRecord | None:
    """The request that this code runs for; None outside of one."""
    return _current.get()


def begin(record: RequestRecord) -> None:
    """From here on this task, and those that it starts, run for the request."""
    _current.set(record)


def run_for_nobody(function: Callable[[], None]) -> None:
    """Call it outside of the request at hand: tasks that it starts belong to none."""
    context = copy_context()
    context.run(_current.set, None)
    context.run(function)


def request_id_of(headers: Headers) -> str:
    """The client's `x-request-id`, if there is one and it is sane; else a new one."""
    given = header_values(headers, REQUEST_ID_HEADER)
    if len(given) == 1 and _SANE_ID.fullmatch(given[0]):
        return given[0]
    return uuid.uuid4().hex
