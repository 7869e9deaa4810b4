"""Steady mixed load on a server that is being scaled, and what each of its streams went through.

    asks --[steady]--> Stream (tokens, when each came, error) --> failures, differences, gaps
    url, dp_size --[scale]--> the operation, as the server tells it

Greedy and of a set length, so that every answer can be compared token for token with a static
server's, whatever happens to the server meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from sgl_esft.zoo.taskset import TASKS, held_out

TIMEOUT_SECONDS = 120.0  # of a request


@dataclass(frozen=True)
class Ask:
    """One greedy request."""

    text: str
    adapter: str | None
    num_tokens: int
    regex: str = ""  # what the answer must match, if anything


@dataclass
class Stream:
    """What came of an ask. Times in seconds of the monotonic clock."""

    ask: Ask
    sent_s: float
    token_s: list[float] = field(default_factory=list)  # when each event came
    output_ids: tuple[int, ...] = ()
    error: str = ""

    @property
    def gaps_s(self) -> list[tuple[float, float]]:
        """(when it ended, seconds) of each wait between two tokens."""
        pairs = zip(self.token_s, self.token_s[1:], strict=False)
        return [(after, after - before) for before, after in pairs]


def make_asks(adapters: Sequence[str], count: int, tokens: range, seed: int = 0) -> list[Ask]:
    """Held-out prompts of the zoo's tasks, each for the base or one of `adapters`."""
    rng = random.Random(seed)
    texts = [example.prompt for task in TASKS.values() for example in held_out(task, 32, seed)]
    return [
        Ask(rng.choice(texts), rng.choice([None, *adapters]), rng.choice(tokens))
        for _ in range(count)
    ]


async def ask_once(session: aiohttp.ClientSession, url: str, ask: Ask) -> Stream:
    """One streamed request; a refusal or a break is the stream's error."""
    body: dict[str, Any] = {
        "text": ask.text,
        "stream": True,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": ask.num_tokens,
            "ignore_eos": True,
        },
    }
    if ask.adapter is not None:
        body["adapter"] = ask.adapter
    if ask.regex:
        body["sampling_params"] |= {"regex": ask.regex, "ignore_eos": False}
    stream = Stream(ask, time.monotonic())
    try:
        async with session.post(f"{url}/generate", json=body) as response:
            if response.status != 200:
                stream.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                return stream
            async for line in response.content:
                _take_event(stream, line)
    except (aiohttp.ClientError, TimeoutError) as error:
        stream.error = f"{type(error).__name__}: {error}"
    if not stream.error and len(stream.output_ids) != ask.num_tokens:
        stream.error = f"{len(stream.output_ids)} tokens of {ask.num_tokens}"
    return stream


def _take_event(stream: Stream, line: bytes) -> None:
    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
        return
    event = json.loads(line[len(b"data: ") :])
    if "error" in event:
        stream.error = str(event["error"])
        return
    stream.token_s.append(time.monotonic())
    stream.output_ids = tuple(event["output_ids"])


async def steady(
    url: str, asks: Sequence[Ask], concurrency: int, stop: asyncio.Event | None = None
) -> list[Stream]:
    """All asks, `concurrency` at a time; with `stop`, over and over until it is set."""
    streams: list[Stream] = []
    turns = iter(range(1 << 60)) if stop is not None else iter(range(len(asks)))
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def worker() -> None:
            for turn in turns:
                if stop is not None and stop.is_set():
                    return
                streams.append(await ask_once(session, url, asks[turn % len(asks)]))

        await asyncio.gather(*(worker() for _ in range(concurrency)))
    return streams


async def scale(
    url: str, body: Mapping[str, Any], timeout_s: float = 120.0, poll_s: float = 0.02
) -> dict[str, Any]:
    """Ask for a scale and wait for its end. Returns the operation, or the refusal."""
    deadline = time.monotonic() + timeout_s
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/scale", json=dict(body)) as response:
            answer: dict[str, Any] = await response.json()
            if response.status != 202:
                return answer
        while time.monotonic() < deadline:
            async with session.get(f"{url}/v1/scale/{answer['id']}") as response:
                answer = await response.json()
            if answer["state"] not in ("pending", "running"):
                return answer
            await asyncio.sleep(poll_s)
    return answer


def differences(
    streams: Sequence[Stream], expected: Mapping[Ask, tuple[int, ...]]
) -> list[tuple[Stream, int]]:
    """Streams whose tokens are not the expected ones, and the first position that differs."""
    found = []
    for stream in streams:
        want = expected[stream.ask]
        if not stream.error and stream.output_ids != want:
            pairs = zip(stream.output_ids, want, strict=False)
            found.append((stream, next((i for i, (a, b) in enumerate(pairs) if a != b), -1)))
    return found
