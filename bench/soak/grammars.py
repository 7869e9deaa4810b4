"""Grammars that grow, compiled by a live server's rank: what another client's stream waits for it.

    python -m bench.soak.grammars --url http://127.0.0.1:30000

    a stream of another client, /healthz every 20 ms --[beside]--> each grammar at n, 2n, 4n
        -> seconds until it is answered, worst gap of the stream, worst seconds of /healthz

Sizes end where the bounds of sgl_esft/fields do. `nothing` is the same without a grammar: what the
machine itself is late by.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import requests

from bench.common.record import RESULTS, write_result

SCALES = (1, 2, 4)
PROBE_S = 0.02
ANSWER_S = 300.0
Schema = dict[str, Any]
Grammar = dict[str, str]
STREAMED: Final[dict[str, Any]] = {
    "text": "coffee -> ",
    "stream": True,
    "sampling_params": {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True},
}


def properties(size: int) -> Schema:
    """An object of so many strings."""
    return {"properties": {f"p{number}": {"type": "string"} for number in range(size)}}


def nested(size: int) -> Schema:
    """Objects in each other."""
    schema: Schema = {"type": "string"}
    for _ in range(size):
        schema = {"type": "object", "properties": {"a": schema, "b": {"type": "integer"}}}
    return schema


def choices(size: int) -> Schema:
    """One of so many objects."""
    return {"anyOf": [{"type": "object", **properties(number % 7)} for number in range(size)]}


def lengths(size: int) -> Schema:
    """Strings with bounds of their own."""
    texts = {f"p{n}": {"type": "string", "maxLength": 100 + n} for n in range(size)}
    return {"type": "object", "properties": texts}


def _schema(make: Callable[[int], Schema]) -> Callable[[int], Grammar]:
    return lambda size: {"json_schema": json.dumps(make(size))}


GRAMMARS: Final[Mapping[str, tuple[int, Callable[[int], Grammar]]]] = {
    "nothing": (1, lambda size: {}),
    "json_schema: properties": (400, _schema(properties)),
    "json_schema: nested": (50, _schema(nested)),
    "json_schema: choices": (80, _schema(choices)),
    "json_schema: lengths": (16, _schema(lengths)),
    "regex: classes": (60, lambda size: {"regex": "[^a]*" * size}),
    "regex: repeats": (250, lambda size: {"regex": f"([a-z]{{1,{size}}} ){{1,{size}}}"}),
    "ebnf: optional parts": (800, lambda size: {"ebnf": "root ::=" + ' "a"?' * size}),
    "ebnf: rules": (
        150,
        lambda size: {
            "ebnf": "\n".join(
                ["root ::= r0", *(f'r{n} ::= "{n}" r{(n + 1) % size} | "x"' for n in range(size))]
            )
        },
    ),
}


def stream_gap(url: str, over: threading.Event) -> float:
    """The longest wait between two events of a stream, in seconds; streams follow each other."""
    worst = 0.0
    while not over.is_set():
        last = time.monotonic()
        with requests.post(f"{url}/generate", json=STREAMED, stream=True, timeout=ANSWER_S) as got:
            for _ in got.iter_content(None):
                now = time.monotonic()
                worst, last = max(worst, now - last), now
    return worst


def probe(url: str, over: threading.Event) -> float:
    """The slowest answer of /healthz, in seconds."""
    worst = 0.0
    while not over.wait(PROBE_S):
        started = time.monotonic()
        requests.get(f"{url}/healthz", timeout=ANSWER_S).raise_for_status()
        worst = max(worst, time.monotonic() - started)
    return worst


@contextmanager
def watched(url: str, found: dict[str, float]) -> Iterator[None]:
    """A stream and probes for as long as the context is open."""
    over = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        waits = {
            "gap_s": pool.submit(stream_gap, url, over),
            "healthz_s": pool.submit(probe, url, over),
        }
        try:
            time.sleep(1.0)
            yield
            time.sleep(0.5)
        finally:
            over.set()
        found.update({name: each.result() for name, each in waits.items()})


def measure(url: str, grammar: Grammar) -> dict[str, float]:
    """One request with a grammar beside another client's stream."""
    found: dict[str, float] = {}
    parameters: dict[str, Any] = {"temperature": 0, "max_new_tokens": 8, **grammar}
    with watched(url, found):
        started = time.monotonic()
        body: dict[str, Any] = {"text": "tea -> ", "sampling_params": parameters}
        answer = requests.post(f"{url}/generate", json=body, timeout=ANSWER_S)
        found["answer_s"] = time.monotonic() - started
    return {**found, "status": answer.status_code}


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="a demo server")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the result file")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    for name, (size, make) in GRAMMARS.items():
        for scale in SCALES:
            found = measure(options.url, make(scale * size))
            result.setdefault(name, []).append({"size": scale * size, **found})
            print(name, json.dumps(result[name][-1]), flush=True)
    print(write_result("grammars", {"grammars": result}, folder=options.out))


if __name__ == "__main__":
    main()
