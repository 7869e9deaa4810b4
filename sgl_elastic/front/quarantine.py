"""Requests whose instance has died, tried again one by one: one of them may be what ended it.

    router.py --sent, output--> [Quarantine] --on_trial--> the request to send alone
    router.py --died----------------'      '--> requests that are not to be tried again

All that ran on an instance that dies are suspects. Each is sent to the replacement by itself, while
what is new waits. A suspect is cleared when it has ended, or has got more tokens than can have been
lost on their way; it goes on then, beside the suspects that are tried after it. If the instance
dies during a trial, the one on trial is what ends it: it is given up, and all others that ran are
suspects again. So what ends engines ends two, however many requests run beside it.

Pure: no clock, no socket, no message. The router's lock guards it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

# The front hears of tokens in each step of a stream, and of other requests' in every 50th: the
# first that it hears of after so many are new ones, past whatever ended the instance.
CLEARING_TOKENS: Final = 8
# One that ends engines now and then is cleared at each trial. Nobody's trial explains those deaths.
MOST_UNEXPLAINED: Final = 3


@dataclass
class Quarantine:
    """Who runs, who waits for a trial, who is on trial; by request id."""

    _running: dict[str, None] = field(default_factory=dict)  # on the instance that serves
    _suspects: dict[str, None] = field(default_factory=dict)  # in the order of their trials
    _deaths: dict[str, int] = field(default_factory=dict)  # it ran at, but for others' trials
    _on_trial: str = ""
    _cleared_at: int = field(default=0, compare=False)  # tokens of the one on trial

    @property
    def is_over(self) -> bool:
        """Whether nobody is on trial or waits for one: all may run together."""
        return not self._on_trial and not self._suspects

    @property
    def running(self) -> frozenset[str]:
        """What the instance that serves has been sent."""
        return frozenset(self._running)

    def sent(self, rid: str) -> None:
        """The instance that serves has this request."""
        self._running[rid] = None

    def handed_over(self) -> None:
        """Another instance serves, and has been sent nothing yet."""
        self._running.clear()

    def next(self) -> str:
        """Who is to be sent alone now; "" while one is on trial, and when there is nobody left."""
        if self._on_trial or not self._suspects:
            return ""
        return next(iter(self._suspects))

    def begin(self, rid: str, num_tokens: int) -> None:
        """This suspect has been sent alone; it has so many tokens."""
        del self._suspects[rid]
        self._on_trial = rid
        self._cleared_at = num_tokens + CLEARING_TOKENS
        self.sent(rid)

    def output(self, rid: str, num_tokens: int, *, is_finished: bool) -> bool:
        """A request has so many tokens by now. Returns whether a trial has ended by that."""
        if is_finished:
            self._forget(rid)
        if rid != self._on_trial or not (is_finished or num_tokens >= self._cleared_at):
            return False
        self._on_trial = ""
        return True

    def died(self) -> Mapping[str, int]:
        """The instance that served is gone: all that ran there are suspects, or given up.

        Returns those that are given up, with the number of instances that ended while they ran.
        """
        ran, blamed = tuple(self._running), self._on_trial
        self._on_trial = ""
        self._running.clear()
        for rid in (blamed,) if blamed else ran:
            self._deaths[rid] = self._deaths.get(rid, 0) + 1
        given_up = {
            rid: self._deaths[rid]
            for rid in ran
            if rid == blamed or self._deaths.get(rid, 0) >= MOST_UNEXPLAINED
        }
        # What was cleared is tried last.
        self._suspects |= dict.fromkeys(rid for rid in ran if rid not in given_up)
        for rid in given_up:
            self._forget(rid)
        return given_up

    def _forget(self, rid: str) -> None:
        self._running.pop(rid, None)
        self._suspects.pop(rid, None)
        self._deaths.pop(rid, None)
