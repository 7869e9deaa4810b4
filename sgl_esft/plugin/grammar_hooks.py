"""A grammar whose tokens take a rank too long ends its own request, before others wait for it.

    SGLang: the next token is accepted, a mask is filled -> [timed] -> seconds of this step
    next loop of the rank that decides -> [end_slow] -> SGLang's abort, broadcast to its group
                                                    '-> every rank: [blame_grammar] -> 400

xgrammar compiles in threads, without Python's lock. But it goes on with a grammar token by token in
the scheduler's own thread, by Earley's algorithm: where a text can be read in many ways, as by
`root ::= root root | "a"`, token n costs the cube of n, and all requests of the rank wait for it.

Clocks of ranks differ, so one rank of a group decides and all of them hear of it in one loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from sgl_esft.errors import GrammarTooSlowError

MAX_STEP_S: Final = 0.25  # of one step, for the grammars of all its requests
# Of one call, which is innocent below that: with a large vocabulary a mask takes milliseconds.
LEAST_S: Final = 0.01
_MAX_NOTED: Final = 4096  # on ranks that do not decide nobody asks
_TOO_SLOW: Final = (
    f"{GrammarTooSlowError.__name__}: the request's grammar can read this text in so many ways "
    "that a token takes too long; write it so that each text can be read in one way, such as "
    "`root ::= item root | item` for `root ::= root root | item`"
)


@dataclass
class _Step:
    """What grammars have taken since the rank looked last."""

    total_s: float = 0.0
    slow: list[Any] = field(default_factory=list)

    def add(self, grammar: Any, seconds: float) -> None:
        self.total_s += seconds
        if seconds >= LEAST_S and len(self.slow) < _MAX_NOTED:
            self.slow.append(grammar)


_step = _Step()


def timed(original: Callable[..., Any], grammar: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of SGLang's to a grammar, in the scheduler's thread: processor time counts."""
    started = time.thread_time()
    try:
        return original(grammar, *args, **kwargs)
    finally:
        _step.add(grammar, time.thread_time() - started)


def end_slow(aborts: list[Any], scheduler: Any) -> list[Any]:
    """SGLang's own aborts of this loop, and those of grammars that took the last step's time."""
    global _step
    step, _step = _step, _Step()
    if step.total_s < MAX_STEP_S:
        return aborts
    from sgl_esft import sglang_api

    slow = set(map(id, step.slow))
    running = sglang_api.running_requests(scheduler)
    rids = [
        req.rid for req in running if req.to_finish is None and not slow.isdisjoint(_grammars(req))
    ]
    return [*aborts, *(sglang_api.make_abort(rid, _TOO_SLOW) for rid in rids)]


def _grammars(req: Any) -> set[int]:
    """A request's grammar, and the one inside where it may reason first."""
    return {id(req.grammar), id(getattr(req.grammar, "grammar", None))}


def blame_grammar(result: object, scheduler: Any, recv_req: Any) -> None:
    """After SGLang's abort, which says 503: this request is not to be tried again as it is."""
    if recv_req.abort_message != _TOO_SLOW:
        return
    from sgl_esft import sglang_api

    for req in sglang_api.running_requests(scheduler):
        if req.rid == recv_req.rid:
            sglang_api.end_request(req, _TOO_SLOW, GrammarTooSlowError.http_status)
