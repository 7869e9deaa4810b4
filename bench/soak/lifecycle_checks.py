"""What the load test must find: pure functions of what was recorded.

requests, history, texts -> [failures], [wrong_answers]
requests, loads, windows -> [gaps_during], [pace]       running streams, loads over none
requests                 -> [overtakes], [waits]        is any adapter starved?
samples of memory        -> [growth]                    does anything leak?
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bench.common.recorded_client import Request
from bench.soak.lifecycle_operator import LOADS, Done, History

# Error types that name a limit of the server, with 429 or 503: a client is to come again later.
LIMITS = ("KeyLimitError", "RetryLaterError", "NoFreeSlotError", "OutOfExpertMemoryError")
UNKNOWN = "UnknownAdapterError"  # right while the adapter is unloaded
WARM_UP = 0.3  # of a run: caches fill


@dataclass(frozen=True)
class Wrong:
    """An answer that is none of the models' that it may be of."""

    request: Request
    allowed: tuple[str, ...]
    of: tuple[str, ...]  # versions of any adapter whose answer it is


def failures(requests: Iterable[Request], history: History) -> list[Request]:
    """Requests without an answer, less those that a limit names or that asked for nothing."""
    return [r for r in requests if r.error and not _is_excused(r, history)]


def _is_excused(request: Request, history: History) -> bool:
    if any(limit in request.error for limit in LIMITS):
        return True
    name = request.adapter
    is_absent = name is not None and history.may_be_unknown(name, request.began_s, request.ended_s)
    return UNKNOWN in request.error and is_absent


def wrong_answers(
    requests: Iterable[Request], history: History, texts: Mapping[tuple[str, str], str]
) -> list[Wrong]:
    """texts: (folder, prompt) -> the merged model's greedy answer."""
    folders = sorted({folder for folder, _ in texts})
    found = []
    for request in requests:
        if request.error or request.adapter is None:
            continue
        allowed = history.allowed(request.adapter, request.began_s, request.token_s[0])
        if request.text not in {texts[folder, request.prompt] for folder in allowed}:
            of = tuple(f for f in folders if texts[f, request.prompt] == request.text)
            found.append(Wrong(request, tuple(sorted(allowed)), of))
    return found


@dataclass(frozen=True)
class Span:
    """From, to; seconds of the monotonic clock."""

    begin_s: float
    end_s: float

    def later(self, seconds: float) -> Span:
        return Span(self.begin_s + seconds, self.end_s + seconds)


Gap = tuple[float, float]  # when it began and ended


def gaps_of(requests: Iterable[Request]) -> list[Gap]:
    """Waits between two tokens of a stream, in order of their ends."""
    return sorted((pair for r in requests for pair in pairwise(r.token_s)), key=lambda gap: gap[1])


def gaps_during(gaps: Sequence[Gap], spans: Iterable[Span]) -> list[float]:
    """Seconds of the gaps that overlap a span, once for each span. `gaps` is in order of ends."""
    ends = [end for _, end in gaps]
    longest = max((end - begin for begin, end in gaps), default=0.0)
    found = []
    for span in spans:
        low = bisect_left(ends, span.begin_s)
        high = bisect_left(ends, span.end_s + longest)
        found += [end - begin for begin, end in gaps[low:high] if begin <= span.end_s]
    return found


def p99(values: Sequence[float]) -> float:
    """Raises ValueError for fewer than two."""
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def load_spans(done: Iterable[Done], kinds: Sequence[str] = LOADS) -> list[Span]:
    """When the operator loaded something."""
    return [Span(d.sent_s, d.returned_s) for d in done if d.operation.kind in kinds]


@dataclass(frozen=True)
class Pace:
    """99th percentile of the gaps between two tokens, in seconds."""

    during_loads_s: float
    without_s: float  # spans of the same lengths, a window without operations later
    busy_windows_s: tuple[float, ...]
    quiet_windows_s: tuple[float, ...]  # each the neighbour of a busy one

    @property
    def loads_over_none(self) -> float:
        """The check: at most 2."""
        return self.during_loads_s / self.without_s

    @property
    def busy_over_quiet(self) -> list[float]:
        pairs = zip(self.busy_windows_s, self.quiet_windows_s, strict=True)
        return [busy / quiet for busy, quiet in pairs]


def pace(requests: Iterable[Request], done: Sequence[Done], busy: Sequence[Span]) -> Pace:
    """`busy` windows have operations and are each followed by one as long without.

    A gap that overlaps a given moment is longer than others. So what overlaps a load is compared
    with what overlaps the same span moved into the quiet window.
    """
    gaps = gaps_of(requests)
    loads, moved = [], []
    for span in load_spans(done):
        window = next((w for w in busy if w.begin_s <= span.begin_s < w.end_s), None)
        if window is not None:
            loads.append(span)
            moved.append(span.later(window.end_s - window.begin_s))
    quiet = [window.later(window.end_s - window.begin_s) for window in busy]
    return Pace(
        p99(gaps_during(gaps, loads)),
        p99(gaps_during(gaps, moved)),
        tuple(p99(gaps_during(gaps, [window])) for window in busy),
        tuple(p99(gaps_during(gaps, [window])) for window in quiet),
    )


def turn_ratios(requests: Sequence[Request], span_s: float, margin_s: float) -> list[float]:
    """Tokens a second of each whole span over those of the next one, `margin_s` into it left out.

    Spans are counted from the first request, as the client's --fold counts them.
    """
    start_s = min(request.began_s for request in requests)
    times = np.sort([at for request in requests for at in request.token_s])
    num_spans = int((float(times[-1]) - start_s) / span_s)
    counts = []
    for span in range(num_spans):
        begin_s = start_s + span * span_s
        low, high = np.searchsorted(times, [begin_s + margin_s, begin_s + span_s])
        counts.append(int(high - low))
    return [first / second for first, second in zip(counts[::2], counts[1::2], strict=False)]


def overtakes(requests: Iterable[Request]) -> list[int]:
    """For each answered request: how many that were sent later had their first token earlier."""
    answered = sorted((r for r in requests if not r.error), key=lambda r: r.began_s)
    began = [r.began_s for r in answered]
    found = []
    for place, request in enumerate(answered):
        last = bisect_left(began, request.token_s[0])
        later = answered[place + 1 : last]
        found.append(sum(other.token_s[0] < request.token_s[0] for other in later))
    return found


def waits(requests: Iterable[Request]) -> dict[str, list[float]]:
    """Adapter -> seconds until the first token."""
    found: dict[str, list[float]] = {}
    for request in requests:
        if not request.error:
            found.setdefault(request.adapter or "", []).append(request.wait_s)
    return found


@dataclass(frozen=True)
class Growth:
    """A quantity at the start and at the end of a run, medians over a fifth of it each."""

    early: float
    late: float

    @property
    def share(self) -> float:
        """How much it grew, of what it was."""
        return self.late / self.early - 1 if self.early else float(self.late > 0)


def growth(
    values: Sequence[float], num_processes: Sequence[int], warm_up: float = WARM_UP
) -> Growth:
    """Of evenly spaced samples, the first share `warm_up` of them left out: caches fill then.

    Compared are samples with as many processes as most have: a server that ends as two ranks holds
    more than it did as one, and that is no leak. A process too many is `process_growth`'s to find.
    """
    counts = num_processes[int(warm_up * len(num_processes)) :]
    usual = statistics.mode(counts)
    kept = zip(values[int(warm_up * len(values)) :], counts, strict=True)
    steady = np.asarray([value for value, count in kept if count == usual], dtype=float)
    part = max(1, len(steady) // 5)
    return Growth(float(np.median(steady[:part])), float(np.median(steady[-part:])))


def process_growth(num_processes: Sequence[int], warm_up: float = WARM_UP) -> Growth:
    """The fewest processes of either half: what a scale leaves behind raises the second one's."""
    steady = num_processes[int(warm_up * len(num_processes)) :]
    half = len(steady) // 2
    return Growth(float(min(steady[:half])), float(min(steady[half:])))
