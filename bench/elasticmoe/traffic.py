"""Requests that arrive when they arrive, and how many were answered in time.

    rates --[arrivals]--> times --[play]--> Stream of each --[met]--> share in windows of time
    url, asks --[served]--> Served: tokens a second, processor time of each
    url --[calibrate]--> what an idle server takes, what a busy one serves --> rates and targets

Targets and rates are multiples of what the server itself shows at the start, so that they mean the
same on any machine.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from bench.common.process_watch import cpu_seconds
from bench.elasticmoe.load import TIMEOUT_SECONDS, Ask, Stream, ask_once, steady
from bench.elasticmoe.rounds import check_streams, median

TTFT_TIMES = 20.0  # targets, over an idle server's medians
TPOT_TIMES = 8.0
BUSY_STREAMS = 16
WARM_S = 8.0  # of a load, before its window begins


@dataclass(frozen=True)
class Targets:
    """A request is in time when it meets both."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True)
class Calibration:
    """What a server is like before it is scaled."""

    targets: Targets
    requests_per_s: float  # with many streams


@dataclass(frozen=True)
class Served:
    """What a server did in a window."""

    tokens_per_s: float
    cpu_s_per_token: float


@dataclass(frozen=True)
class Window:
    """Requests that were sent in a span of time."""

    at_s: float  # its middle, from the scale
    num_requests: int
    num_met: int

    @property
    def share(self) -> float:
        """Of requests in time; 0 without any."""
        return self.num_met / self.num_requests if self.num_requests else 0.0


def arrivals(spans: Sequence[tuple[float, float]], seed: int) -> list[float]:
    """Times of a Poisson process: spans of (seconds, requests a second), one after the other."""
    rng = random.Random(seed)
    times: list[float] = []
    begin = 0.0
    for seconds, rate in spans:
        at = begin
        while rate > 0 and (at := at + rng.expovariate(rate)) < begin + seconds:
            times.append(at)
        begin += seconds
    return times


async def play(url: str, asks: Sequence[Ask], times: Sequence[float]) -> list[Stream]:
    """Send an ask at each time, whatever has become of the others."""
    start = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def one(number: int, at: float) -> Stream:
            await asyncio.sleep(max(0.0, start + at - time.monotonic()))
            return await ask_once(session, url, asks[number % len(asks)])

        return await asyncio.gather(*(one(i, at) for i, at in enumerate(times)))


def ttft(stream: Stream) -> float:
    """Seconds until the first token; infinite without one."""
    return stream.token_s[0] - stream.sent_s if stream.token_s else float("inf")


def tpot(stream: Stream) -> float:
    """Mean seconds of each further token; infinite for a stream that failed."""
    if stream.error or len(stream.output_ids) < 2:
        return float("inf")
    return (stream.token_s[-1] - stream.token_s[0]) / (len(stream.output_ids) - 1)


def met(stream: Stream, targets: Targets) -> bool:
    """Whether the request was answered in full and in time."""
    return ttft(stream) <= targets.ttft_s and tpot(stream) <= targets.tpot_s


def share_met(streams: Sequence[Stream], targets: Targets) -> float:
    """Of all requests; 0 of none."""
    return sum(met(s, targets) for s in streams) / len(streams) if streams else 0.0


def windows(
    streams: Sequence[Stream], targets: Targets, zero_s: float, width_s: float
) -> list[Window]:
    """Requests by when they were sent, relative to `zero_s`; windows without any are left out."""
    found: dict[int, list[bool]] = {}
    for stream in streams:
        number = int((stream.sent_s - zero_s) // width_s)
        found.setdefault(number, []).append(met(stream, targets))
    return [
        Window((number + 0.5) * width_s, len(each), sum(each))
        for number, each in sorted(found.items())
    ]


def finished_per_s(streams: Sequence[Stream], begin_s: float, end_s: float) -> float:
    """Requests that were answered in full within a span, a second of it."""
    ends = [stream.token_s[-1] for stream in streams if not stream.error and stream.token_s]
    return sum(begin_s <= end < end_s for end in ends) / (end_s - begin_s)


def tokens_in(streams: Sequence[Stream], begin_s: float, end_s: float) -> int:
    """That came within a span of the monotonic clock."""
    return sum(begin_s <= at < end_s for stream in streams for at in stream.token_s)


async def served(
    url: str, asks: Sequence[Ask], num_streams: int, window_s: float, warm_s: float = WARM_S
) -> Served:
    """Keep it busy, and count for a while after a while. Raises ValueError when a stream failed."""
    stop = asyncio.Event()
    load = asyncio.create_task(steady(url, asks, num_streams, stop))
    await asyncio.sleep(warm_s)
    began_s, cpu_s = time.monotonic(), await asyncio.to_thread(cpu_seconds, url)
    await asyncio.sleep(window_s)
    ended_s, cpu_s = time.monotonic(), await asyncio.to_thread(cpu_seconds, url) - cpu_s
    stop.set()
    streams = await load
    check_streams(streams)
    tokens = tokens_in(streams, began_s, ended_s)
    return Served(tokens / (ended_s - began_s), cpu_s / max(1, tokens))


async def calibrate(url: str, asks: Sequence[Ask]) -> Calibration:
    """Ask a server that has nothing else to do. Raises ValueError when a stream failed."""
    await steady(url, asks[:8], 1)  # warm
    idle = await steady(url, asks[:16], 1)
    began = time.monotonic()
    busy = await steady(url, [*asks, *asks], BUSY_STREAMS)
    seconds = time.monotonic() - began
    check_streams([*idle, *busy])
    targets = Targets(
        TTFT_TIMES * median([ttft(each) for each in idle]),
        TPOT_TIMES * median([tpot(each) for each in idle]),
    )
    return Calibration(targets, len(busy) / seconds)
