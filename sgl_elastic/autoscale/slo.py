"""What share of requests met its targets lately (the paper's SLO-aware load estimator).

    front: arrived, first token, finished --> [SloWindow] --attainment(now)--> autoscale.py

A request meets its targets when its time to the first token (TTFT) and its mean time per output
token after that (TPOT) are within them. No clock in here: every call says what time it is, in
seconds of one monotonic clock. Not thread-safe: all calls come from the front's event loop.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from sgl_elastic.errors import ElasticConfigError


@dataclass(frozen=True)
class SloTargets:
    """What is promised, both in seconds."""

    ttft_s: float
    tpot_s: float

    def __post_init__(self) -> None:
        check_above_zero("ttft_s", self.ttft_s)
        check_above_zero("tpot_s", self.tpot_s)


def check_above_zero(name: str, value: float, most: float = math.inf) -> None:
    """Raise ElasticConfigError unless 0 < value <= most and value is finite."""
    if not (0 < value <= most and math.isfinite(value)):
        limit = "" if most == math.inf else f" and at most {most:g}"
        raise ElasticConfigError(f"{name} is {value!r}: give a finite number above 0{limit}.")


@dataclass(frozen=True)
class Attainment:
    """Shares in [0, 1] of requests within the targets; 1.0 where nothing was seen.

    `ttft` is over every request whose TTFT is decided: those finished in the window, those that
    have their first token, and those that wait longer than the target already. `tpot` is over
    those finished. `both` is over those finished and, as missed, those that wait too long.
    """

    ttft: float = 1.0
    tpot: float = 1.0
    both: float = 1.0
    num_finished: int = 0
    num_running: int = 0  # have their first token, have not finished
    num_overdue: int = 0  # wait for the first token longer than the target

    @property
    def worst(self) -> float:
        """The lowest of the three; `ttft` sees a jam before the late requests have finished."""
        return min(self.ttft, self.tpot, self.both)

    @property
    def num_seen(self) -> int:
        """How many requests say something; few of them prove nothing."""
        return self.num_finished + self.num_running + self.num_overdue


class SloWindow:
    """Sliding window over requests: O(1) a call, amortised; at most `max_requests` of each kind.

    A request is known by any hashable id from `arrived` to `finished` or `dropped`. Calls about an
    id that is not known are passed over: the window may have been opened in the middle of a life.
    """

    def __init__(
        self, targets: SloTargets, window_s: float = 30.0, max_requests: int = 65536
    ) -> None:
        """max_requests: the oldest are forgotten beyond it. Raises ElasticConfigError."""
        check_above_zero("window_s", window_s)
        check_above_zero("max_requests", max_requests)
        self.targets = targets
        self._window_s = window_s
        self._max_requests = max_requests
        self._totals = _Totals()
        self._finished: deque[_Finished] = deque()
        # Id -> arrival. OrderedDict: taking the oldest of a plain dict is not O(1).
        self._waiting: OrderedDict[object, float] = OrderedDict()
        self._overdue: OrderedDict[object, float] = OrderedDict()
        self._running: OrderedDict[object, _Running] = OrderedDict()
        self._num_running_late = 0

    def arrived(self, rid: object, now_s: float) -> None:
        """A request came in. An id that comes again is a new request."""
        self.dropped(rid)
        self._waiting[rid] = now_s
        if len(self._waiting) > self._max_requests:
            self._waiting.popitem(last=False)

    def first_token(self, rid: object, now_s: float) -> None:
        """Its first token went out; later calls for the same id change nothing."""
        arrived_s = self._waiting.pop(rid, None)
        if arrived_s is None:
            arrived_s = self._overdue.pop(rid, None)
        if arrived_s is None:
            return
        is_late = now_s - arrived_s > self.targets.ttft_s
        self._running[rid] = _Running(arrived_s, now_s, is_late)
        self._num_running_late += is_late
        if len(self._running) > self._max_requests:
            self._forget_running(next(iter(self._running)))

    def finished(self, rid: object, now_s: float, num_tokens: int) -> None:
        """Its last token went out, `num_tokens` in all; its times follow from the calls before."""
        self.first_token(rid, now_s)  # an answer may come in one piece
        if (running := self._forget_running(rid)) is not None:
            ttft_s = running.first_token_s - running.arrived_s
            tpot_s = (now_s - running.first_token_s) / max(1, num_tokens - 1)
            in_time = ttft_s <= self.targets.ttft_s, tpot_s <= self.targets.tpot_s
            self._finished.append(_Finished(now_s, *in_time))
            self._totals.count(self._finished[-1], 1)
            if len(self._finished) > self._max_requests:
                self._totals.count(self._finished.popleft(), -1)

    def dropped(self, rid: object) -> None:
        """The client left, or the request was refused: it counts for nothing from now on."""
        self._waiting.pop(rid, None)
        self._overdue.pop(rid, None)
        self._forget_running(rid)

    def forget_finished(self) -> None:
        """After a scale: what finished before it says nothing about the new configuration."""
        self._finished.clear()
        self._totals = _Totals()

    def attainment(self, now_s: float) -> Attainment:
        """As of now: what finished more than `window_s` ago has left the window."""
        self._advance(now_s)
        totals, overdue, running = self._totals, len(self._overdue), len(self._running)
        decided = totals.requests + running + overdue
        in_time = totals.ttft + running - self._num_running_late
        return Attainment(
            ttft=_share(in_time, decided),
            tpot=_share(totals.tpot, totals.requests),
            both=_share(totals.both, totals.requests + overdue),
            num_finished=totals.requests,
            num_running=running,
            num_overdue=overdue,
        )

    def _advance(self, now_s: float) -> None:
        while self._finished and self._finished[0].at_s < now_s - self._window_s:
            self._totals.count(self._finished.popleft(), -1)
        while self._waiting:
            rid, arrived_s = next(iter(self._waiting.items()))
            if now_s - arrived_s <= self.targets.ttft_s:
                break
            self._overdue[rid] = self._waiting.pop(rid)
        while len(self._overdue) > self._max_requests:
            self._overdue.popitem(last=False)

    def _forget_running(self, rid: object) -> _Running | None:
        running = self._running.pop(rid, None)
        if running is not None:
            self._num_running_late -= running.is_late
        return running


@dataclass(frozen=True)
class _Running:
    """A request between its first token and its last."""

    arrived_s: float
    first_token_s: float
    is_late: bool


@dataclass(frozen=True)
class _Finished:
    """One answer that is complete: when, and whether its times were within the targets."""

    at_s: float
    ttft_met: bool
    tpot_met: bool


@dataclass
class _Totals:
    """Sums over the finished requests of a window, kept as they come and go."""

    requests: int = 0
    ttft: int = 0  # within the target
    tpot: int = 0
    both: int = 0

    def count(self, request: _Finished, sign: int) -> None:
        self.requests += sign
        self.ttft += sign * request.ttft_met
        self.tpot += sign * request.tpot_met
        self.both += sign * (request.ttft_met and request.tpot_met)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0
