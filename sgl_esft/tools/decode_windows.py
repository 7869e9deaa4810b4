"""Windows of steady decoding on a running server, for `sgl-esft offload calibrate`.

    asks --[measure]--> as many streams, begun together --events--> when each token came
    GET /metrics, before and after, while all of them decode --> SpeedPoint: a step, on average

Tokens are sampled at temperature 1: greedy answers of some length end in loops, and a loop's tokens
touch few experts. Prompts are not in a window: it begins when all streams have had some tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import httpx

from sgl_esft.errors import ConfigError, ServerAnswerError, ServerUnreachableError
from sgl_esft.memory.report import MemoryReport
from sgl_esft.offload.speed import SpeedPoint
from sgl_esft.tools.server_client import ServerAddress, call

Until: TypeAlias = Callable[[Callable[[], bool]], Awaitable[None]]

NEW_TOKENS: Final = 224  # of a stream; with its prompt they fit into a context of 512
WARM_TOKENS: Final = 24  # of each stream, before its window
SPARE_TOKENS: Final = 4  # at a stream's end, so that none ends within the window
SAMPLED: Final[Mapping[str, float]] = {"temperature": 1.0}
_MIN_TOKENS: Final = 4  # of each stream in a window
_TRIES: Final = 4
_POLL_S: Final = 0.02
_PROMPT_WORDS: Final = 12
_STARTS: Final = ("the", "one", "if", "a", "for", "in", "we", "no")  # what a server's words are of
_COUNTED: Final = {
    ("sgl_esft:expert_requests", ""): "needed",
    ("sgl_esft:expert_loads", "demand"): "loads",
    ("sgl_esft:expert_loads", "prefetch"): "prefetches",
    ("sgl_esft:expert_read_bytes", ""): "read_bytes",
    ("sgl_esft:expert_read_failures", ""): "failures",
    ("sgl_esft:expert_stall_seconds", ""): "stall_s",
    ("sglang:realtime_tokens", "decode"): "tokens",
}
_COMPLETED: Final = re.compile(r'"completion_tokens": ?(\d+)')


@dataclass(frozen=True)
class DecodeAsk:
    """A request of a window; `adapter` None = the base."""

    text: str
    adapter: str | None = None


@dataclass(frozen=True)
class ServedRows:
    """What a server has its experts in, one rank as all."""

    num_rows: int
    num_layers: int
    policy: str
    max_bytes_per_s: int | None  # None = what the storage gives


def served_rows(server: ServerAddress) -> ServedRows:
    """Raises ConfigError for a server without --expert-cache, and what `call` raises."""
    answer = call(server, "GET", "/v1/memory")
    devices = () if answer is None else MemoryReport.from_json(answer).devices
    tiers = devices[0].tiers if devices else None
    if tiers is None:
        raise ConfigError(f"{server.url} has all experts on the device: start --expert-cache N")
    return ServedRows(tiers.num_rows, len(devices[0].layers), tiers.policy, tiers.max_bytes_per_s)


def loaded_adapters(server: ServerAddress) -> list[str]:
    """Names of those that are on the device or in host memory, sorted."""
    listed = (call(server, "GET", "/v1/adapters") or {}).get("adapters")
    if not isinstance(listed, list):
        raise ServerAnswerError(f"{server.url}/v1/adapters answers with something else.")
    return sorted(
        str(each.get("name"))
        for each in listed
        if isinstance(each, dict) and each.get("state") in ("on_device", "in_host_cache")
    )


def own_words(server: ServerAddress) -> list[str]:
    """Words that the server's base says, at least eight: prompts are made of them."""
    words: dict[str, None] = {}
    for start in _STARTS:
        body = {"text": start, "sampling_params": _Answers(64, SAMPLED).parameters}
        answer = call(server, "POST", "/generate", body) or {}
        words |= dict.fromkeys(str(answer.get("text", "")).split())
    return [word for word in (*words, *_STARTS) if len(word) < 20]


def make_asks(
    words: Sequence[str], adapters: Sequence[str], count: int, seed: int
) -> list[DecodeAsk]:
    """`count` of them: `adapters` by turns, beginning with another for each seed, and the base."""
    rng, first = random.Random(seed), seed % max(1, len(adapters))
    turns = [*adapters[first:], *adapters[:first], None]
    return [
        DecodeAsk(" ".join(rng.choices(words, k=_PROMPT_WORDS)), turns[n % len(turns)])
        for n in range(count)
    ]


@dataclass(frozen=True)
class _Answers:
    num_tokens: int
    sampling: Mapping[str, float]

    @property
    def parameters(self) -> dict[str, Any]:
        """For SGLang."""
        return {**self.sampling, "max_new_tokens": self.num_tokens, "ignore_eos": True}


# ---- a window ----


@dataclass
class _Stream:
    ask: DecodeAsk
    token_s: list[tuple[float, int]] = field(default_factory=list)  # when it had how many

    @property
    def num_tokens(self) -> int:
        return self.token_s[-1][1] if self.token_s else 0

    def take(self, line: str) -> None:
        """A line of the answer. Raises ServerAnswerError for one that says what went wrong."""
        found = _COMPLETED.search(line)
        if found is not None:
            self.token_s.append((time.monotonic(), int(found[1])))
        elif line.startswith("data: ") and '"error"' in line:
            raise ServerAnswerError(f"a stream of {self.ask.adapter or 'the base'} ended: {line}")

    def token_seconds(self, since: int) -> float:
        """Between two tokens, on average, from the event of this index on."""
        (first_s, first), (last_s, last) = self.token_s[since], self.token_s[-1]
        return (last_s - first_s) / (last - first)


def measure(
    server: ServerAddress,
    rows: ServedRows,
    asks: Sequence[DecodeAsk],
    seconds: float,
    num_tokens: int | None = None,
    sampling: Mapping[str, float] = SAMPLED,
) -> SpeedPoint:
    """Decode all `asks` together, for at most so long, or until the first is at its end.

    num_tokens: of each stream, more than WARM_TOKENS; None = NEW_TOKENS. sampling: SGLang's
    parameters of it, by which answers may not soon repeat themselves. Raises ConfigError for a
    server that counts nothing, or fetches ahead; ServerAnswerError, ServerUnreachableError.
    """
    answers = _Answers(num_tokens or NEW_TOKENS, sampling)
    try:
        for _ in range(_TRIES):
            found = asyncio.run(_window(server, rows, asks, seconds, answers))
            if found is not None:
                return found
    except httpx.HTTPError as error:
        raise ServerUnreachableError(f"{server.url}: {error!r}; is the server up?") from error
    raise ServerAnswerError(
        f"{server.url}: tokens come all at once; is the machine busy otherwise?"
    )


async def _window(
    server: ServerAddress,
    rows: ServedRows,
    asks: Sequence[DecodeAsk],
    seconds: float,
    answers: _Answers,
) -> SpeedPoint | None:
    """None: a stream was at its end when the window had hardly begun."""
    async with _client(server) as client, _decoding(client, asks, answers) as (streams, until):
        started = time.monotonic()
        await until(lambda: _are_warm(streams, started + seconds / 2))
        before, since = await _counted(client), [len(s.token_s) - 1 for s in streams]
        begun = [s.num_tokens for s in streams]
        ends_at, last = time.monotonic() + seconds, answers.num_tokens - SPARE_TOKENS
        await until(lambda: _is_over(streams, begun, ends_at, last))
        after = await _counted(client)
        if min(s.num_tokens - n for s, n in zip(streams, begun, strict=True)) < _MIN_TOKENS:
            return None
        step_s = sum(map(_Stream.token_seconds, streams, since)) / len(streams)
    counted = {name: after[name] - before[name] for name in before}
    return _point(rows, asks, step_s, counted)


def _are_warm(streams: Sequence[_Stream], at_latest: float) -> bool:
    enough = WARM_TOKENS if time.monotonic() < at_latest else 2
    return min(s.num_tokens for s in streams) >= enough


def _is_over(streams: Sequence[_Stream], begun: Sequence[int], ends_at: float, last: int) -> bool:
    if max(s.num_tokens for s in streams) >= last:
        return True
    least = min(s.num_tokens - first for s, first in zip(streams, begun, strict=True))
    return time.monotonic() > ends_at and least >= _MIN_TOKENS


def _point(
    rows: ServedRows,
    asks: Sequence[DecodeAsk],
    step_s: float,
    counted: Mapping[str, float],
) -> SpeedPoint:
    if counted["prefetches"]:
        raise ConfigError(
            f"the server fetches ahead ({rows.policy}), and what that hides is not predicted: "
            "start it with --expert-policy lfu"
        )
    if counted["failures"] or not counted["needed"] or not counted["tokens"]:
        raise ServerAnswerError(
            f"{counted['failures']:.0f} of {counted['needed']:.0f} experts could not be read, for "
            f"{counted['tokens']:.0f} tokens"
        )
    num_steps = counted["tokens"] / len(asks)
    return SpeedPoint(
        num_tokens=len(asks),
        num_rows=rows.num_rows,
        num_layers=rows.num_layers,
        with_adapters=any(ask.adapter is not None for ask in asks),
        step_s=step_s,
        stall_s=min(step_s, counted["stall_s"] / num_steps),
        num_needed=counted["needed"] / num_steps,
        num_loads=counted["loads"] / num_steps,
        read_bytes=counted["read_bytes"] / num_steps,
        max_bytes_per_s=rows.max_bytes_per_s,
    )


@asynccontextmanager
async def _decoding(
    client: httpx.AsyncClient, asks: Sequence[DecodeAsk], answers: _Answers
) -> AsyncIterator[tuple[list[_Stream], Until]]:
    """Streams of all asks, and what waits for a moment of theirs; what is left of them is ended."""
    streams = [_Stream(ask) for ask in asks]
    tasks = [asyncio.create_task(_follow(client, stream, answers)) for stream in streams]

    async def until(is_so: Callable[[], bool]) -> None:
        while not is_so():
            await asyncio.sleep(_POLL_S)
            for task in tasks:
                if task.done():
                    task.result()
                    raise ServerAnswerError("a stream ended before its last token")

    try:
        yield streams, until
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(client: httpx.AsyncClient, stream: _Stream, answers: _Answers) -> None:
    body: dict[str, Any] = {
        "text": stream.ask.text,
        "stream": True,
        "sampling_params": answers.parameters,
    }
    if stream.ask.adapter is not None:
        body["adapter"] = stream.ask.adapter
    async with client.stream("POST", "/generate", json=body) as answer:
        if not answer.is_success:
            said = (await answer.aread())[:300].decode(errors="replace")
            raise ServerAnswerError(f"/generate answers with HTTP {answer.status_code}: {said}")
        async for line in answer.aiter_lines():
            stream.take(line)


def _client(server: ServerAddress) -> httpx.AsyncClient:
    headers = {} if server.key is None else {"Authorization": f"Bearer {server.key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(
        base_url=server.url, headers=headers, timeout=server.timeout_s, limits=limits
    )


async def _counted(client: httpx.AsyncClient) -> dict[str, float]:
    answer = await client.get("/metrics")
    if not answer.is_success:
        raise ServerAnswerError(
            f"/metrics answers with HTTP {answer.status_code}: start the server with "
            "--enable-metrics, and give its admin key where it has one"
        )
    return counters_in(answer.text)


def counters_in(text: str) -> dict[str, float]:
    """Of rank 0, from the text of /metrics: every rank asks for its experts in every step.

    Raises ConfigError where they are missing; SGLang has no tokens before the first was decoded.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sample.labels
            of = labels.get("why", labels.get("mode", ""))
            counted = _COUNTED.get((sample.name.removesuffix("_total"), of))
            if counted is not None and labels.get("rank", labels.get("tp_rank")) == "0":
                found[counted] = found.get(counted, 0.0) + sample.value
    missing = sorted(set(_COUNTED.values()) - found.keys())
    if missing:
        raise ConfigError(
            f"/metrics does not have {', '.join(missing)} of rank 0's experts: start the server "
            "with --expert-cache and --enable-metrics"
        )
    return found


# ---- all of them ----


def windows_of(
    server: ServerAddress,
    rows: ServedRows,
    adapters: Sequence[str],
    batch_sizes: Sequence[int],
    seconds: float,
) -> Iterator[SpeedPoint]:
    """Each batch size, of the base and, where there are adapters, of both: forth, back and forth.

    So a machine that drifts meanwhile has each setting early and late, each time for a third of
    `seconds`. One window before all fills the rows, and counts nowhere.
    """
    words, seeds = own_words(server), itertools.count()
    settings = [(size, of) for of in ([], adapters)[: 1 + bool(adapters)] for size in batch_sizes]
    window_s = seconds / 3
    measure(server, rows, make_asks(words, adapters, max(batch_sizes), next(seeds)), window_s)
    for size, of in (*settings, *reversed(settings), *settings):
        yield measure(server, rows, make_asks(words, of, size, next(seeds)), window_s)
