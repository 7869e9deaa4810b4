"""Composing batches by adapter on real servers: adapters that run at once, the policy on over off.

    for each bound B: two servers of the demo, [--max-overtakes B] and [--max-overtakes 0], in turns
    -> clients that always have a request each -> when each answer ran -> distinct adapters, by time

What ran when is seen by the clients: an answer runs from its first token to its last. Clients
outnumber the requests that may run, so a queue is always there. B = 0 is a second server of the
same kind: what its ratios are off 1 is noise.
"""

from __future__ import annotations

import json
import random
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from bench.common.record import spread
from sgl_esft import zoo
from sgl_esft.zoo import serving

TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class Setting:
    """One load for both servers."""

    max_running: int = 8
    num_clients: int = 32
    num_requests: int = 192
    mean_tokens: int = 12  # geometric lengths, capped at four times it


@dataclass(frozen=True)
class Ask:
    """One request. Adapter None is the base."""

    adapter: str | None
    num_tokens: int


@dataclass(frozen=True)
class Answer:
    """When an answer was asked for, began and ended, in seconds of one clock."""

    adapter: str | None
    asked: float
    began: float
    ended: float


def make_asks(setting: Setting, adapters: Sequence[str], seed: int) -> list[Ask]:
    """Base and adapters alike."""
    rng = random.Random(seed)
    longest = 4 * setting.mean_tokens
    return [
        Ask(
            rng.choice([None, *adapters]),
            min(1 + int(rng.expovariate(1 / setting.mean_tokens)), longest),
        )
        for _ in range(setting.num_requests)
    ]


def ask(url: str, number: int, wanted: Ask) -> Answer:
    """Send one request and read its stream. Raises OSError or ValueError where it fails."""
    body = {
        "text": f"request {number}: ",
        "lora_path": wanted.adapter,
        "stream": True,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": wanted.num_tokens,
            "ignore_eos": True,
        },
    }
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    asked, times = time.monotonic(), []
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        for line in response:
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
                if b'"error"' in line:
                    raise ValueError(f"request {number}: {line[:300]!r}")
    if not times:
        raise ValueError(f"request {number}: no answer")
    return Answer(wanted.adapter, asked, times[0], times[-1])


def play(url: str, asks: Sequence[Ask], num_clients: int) -> list[Answer]:
    """All answers; each client sends the next request as soon as its last is answered."""
    todo, lock, answers = iter(enumerate(asks)), threading.Lock(), []

    def client() -> None:
        while True:
            with lock:
                number, wanted = next(todo, (-1, None))
            if wanted is None:
                return
            answers.append(ask(url, number, wanted))

    with ThreadPoolExecutor(num_clients) as pool:
        for done in [pool.submit(client) for _ in range(num_clients)]:
            done.result()
    return answers


def mean_adapters(answers: Sequence[Answer]) -> float:
    """Distinct adapters that ran at once, by time, while every client had a request.

    That is from the first end of an answer to the last time that one was asked for.
    """
    start = min(answer.ended for answer in answers)
    stop = max(answer.asked for answer in answers)
    times = np.linspace(start, stop, 2000)
    running = np.zeros((len(times), 0), dtype=np.bool_)
    for adapter in sorted({a.adapter for a in answers if a.adapter is not None}):
        own = [a for a in answers if a.adapter == adapter]
        runs = np.any([(a.began <= times) & (times <= a.ended) for a in own], axis=0)
        running = np.column_stack([running, runs])
    return float(running.sum(axis=1).mean())


def measure(setting: Setting, rounds: int, bounds: Sequence[int]) -> Iterator[dict[str, object]]:
    """A row a bound: ratios of the server with it to the one without, round by round."""
    with serving.server(arguments(setting, 0)) as off:
        for bound in bounds:
            with serving.server(arguments(setting, bound)) as on:
                yield {"max_overtakes": bound, **compare(setting, rounds, on, off)}


def arguments(setting: Setting, max_overtakes: int) -> list[str]:
    """The launcher's, for one of the two servers."""
    woven = serving.woven_arguments(zoo.base_path(), zoo.adapter_paths())
    running = ["--max-running-requests", str(setting.max_running), "--disable-radix-cache"]
    return [*woven, *running, "--max-overtakes", str(max_overtakes)]


def compare(setting: Setting, rounds: int, on: str, off: str) -> dict[str, object]:
    """The same requests to both, in turns; the order alternates."""
    adapters = sorted(zoo.adapter_paths())
    rows = []
    for number in range(rounds):
        asks = make_asks(setting, adapters, number)
        urls = {"on": on, "off": off}
        order = list(urls) if number % 2 else list(reversed(urls))
        taken = {name: play(urls[name], asks, setting.num_clients) for name in order}
        rows.append(_ratios(taken["on"], taken["off"]))
        print(rows[-1], flush=True)
    return {
        "adapters": len(adapters),
        "rounds": rounds,
        **{name: spread([row[name] for row in rows]) for name in rows[0]},
    }


def _ratios(on: Sequence[Answer], off: Sequence[Answer]) -> dict[str, float]:
    figures = [_figures(answers) for answers in (on, off)]
    ratios = {f"{name}_over_fcfs": figures[0][name] / figures[1][name] for name in figures[0]}
    return {"adapters_fcfs": figures[1]["adapters"], **ratios}


def _figures(answers: Sequence[Answer]) -> dict[str, float]:
    waits = [answer.began - answer.asked for answer in answers]
    return {
        "adapters": mean_adapters(answers),
        "ttft_mean": float(np.mean(waits)),
        "ttft_p99": float(np.percentile(waits, 99)),
        "duration": max(a.ended for a in answers) - min(a.asked for a in answers),
    }
