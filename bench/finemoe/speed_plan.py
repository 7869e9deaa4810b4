"""What bench.finemoe.speed asks, in which order: of the server that records, of those that are
measured, and in the replay.

    asks, of the base alone and mixed --[round_of]--> by server and round: groups, each a window
    a server records each ask by itself --> Recorded, in the same order
    its prompts and tokens, in a server's order --[works_of]: its decisions--> StepWork of a point

Answers are greedy, and tokens that were there are penalised: so they do not repeat themselves, and
are the same on every server, but for what another batch rounds. What a server reads follows then,
and what is compared are seconds.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from bench.finemoe.tier_servers import NONE, ZooModel, in_turns
from sgl_esft.offload.policies import policy_of
from sgl_esft.offload.step_work import (
    DecodedRequest,
    StepWork,
    TracedRequests,
    counted_work,
    requests_of,
    step_of,
)
from sgl_esft.offload.trace import TraceEvent, TraceHeader, TraceStep
from sgl_esft.tools.decode_windows import SPARE_TOKENS, WARM_TOKENS, DecodeAsk

ALL = 0.0  # a share of rows: one for every slot
SAMPLING: Final[Mapping[str, float]] = {"temperature": 0.0, "frequency_penalty": 1.0}
_PROMPTS = 32  # whose words are shuffled
_SEED = 5000
_PROMPT_WORDS = 12


@dataclass(frozen=True)
class SpeedServer:
    """`share`: rows, of the base's experts; r: tier_servers.py's, of the link."""

    share: float
    r: float

    def num_rows(self, traced: TracedRequests) -> int:
        """Of each layer."""
        if self.share == ALL:
            return traced.header.num_slots
        return max(traced.header.top_k, round(self.share * traced.header.num_base))


@dataclass(frozen=True)
class GridPoint:
    """What is predicted and measured."""

    server: SpeedServer
    batch: int
    with_adapters: bool


@dataclass(frozen=True)
class SpeedBench:
    """How much is asked."""

    model: str = "deep"
    reference: SpeedServer = SpeedServer(ALL, 0.3)  # one of:
    calibrated: tuple[SpeedServer, ...] = (
        SpeedServer(ALL, 0.3),
        SpeedServer(0.5, 0.3),
        SpeedServer(0.5, 3.0),
    )
    calibrated_batches: tuple[int, ...] = (1, 2, 4, 8)
    slow_batches: tuple[int, ...] = (1, 2, 4)  # where r > 1, whose steps are long
    grid: tuple[SpeedServer, ...] = (
        SpeedServer(0.375, 0.3),
        SpeedServer(0.75, 0.3),
        SpeedServer(0.5, 1.0),
        SpeedServer(0.75, 3.0),
    )
    grid_batches: tuple[int, ...] = (1, 3, 6)
    rounds: int = 3
    num_tokens: int = 64  # of a stream
    window_s: float = 60.0  # at most
    num_requests: int = 12  # of the base alone, and mixed

    @property
    def window_end(self) -> int:
        """Tokens of a stream until its window ends."""
        return self.num_tokens - SPARE_TOKENS

    def windows_of(self, batch: int) -> int:
        """In a round: in all rounds together each request is asked."""
        return -(-self.num_requests // (batch * self.rounds))

    def calibrated_points(self, server: SpeedServer) -> list[GridPoint]:
        """Of one of `calibrated`."""
        return _points(server, self.slow_batches if server.r > 1 else self.calibrated_batches)

    def points(self, server: SpeedServer) -> list[GridPoint]:
        """Of one of `grid`."""
        return _points(server, self.grid_batches)


def _points(server: SpeedServer, batches: Sequence[int]) -> list[GridPoint]:
    return [GridPoint(server, batch, mixed) for batch in batches for mixed in (False, True)]


def workload(model: ZooModel, count: int, with_adapters: bool) -> list[DecodeAsk]:
    """Adapters and the base in turns, where they are asked.

    Words of held-out prompts, shuffled: after a task's own prompt tokens soon repeat.
    """
    rng = random.Random(_SEED + with_adapters)
    words = [word for ask in model.asks(_PROMPTS, _SEED) for word in ask.text.split()]
    names = itertools.cycle([None, *model.adapters] if with_adapters else [None])
    return [
        DecodeAsk(" ".join(rng.choices(words, k=_PROMPT_WORDS)), next(names)) for _ in range(count)
    ]


@dataclass(frozen=True)
class Windows:
    """Of one point in one round: a group of requests each, by their numbers in the workload."""

    point: GridPoint
    groups: tuple[tuple[int, ...], ...]
    is_measured: bool = True  # else it fills the rows


def round_of(server: SpeedServer, number: int, bench: SpeedBench, num_kinds: int) -> list[Windows]:
    """What a server is asked in a round, in this order.

    num_kinds: adapters and the base, in turns in the mixed workload.
    """
    first = GridPoint(server, max(bench.grid_batches), with_adapters=True)
    fill = Windows(first, (tuple(range(first.batch)),), is_measured=False)
    points = in_turns(bench.points(server), number)
    return [fill, *(Windows(p, _groups(p, number, bench, num_kinds)) for p in points)]


def _groups(
    point: GridPoint, number: int, bench: SpeedBench, num_kinds: int
) -> tuple[tuple[int, ...], ...]:
    kinds = num_kinds if point.with_adapters else 1
    turn = mixed_order(bench.num_requests, kinds, random.Random(point.batch))
    count = bench.windows_of(point.batch)
    every = [tuple(next(turn) for _ in range(point.batch)) for _ in range(count * bench.rounds)]
    return tuple(every[number * count : (number + 1) * count])


def mixed_order(count: int, num_kinds: int, rng: random.Random) -> Iterator[int]:
    """Numbers below `count`, each once, and then again in another order.

    Those that leave the same rest by num_kinds are of one kind; kinds come in turns, so that groups
    are mixed alike.
    """
    while True:
        kinds = [rng.sample(each, len(each)) for each in _kinds(count, num_kinds)]
        for together in itertools.zip_longest(*kinds):
            yield from (number for number in together if number is not None)


def _kinds(count: int, num_kinds: int) -> list[range]:
    return [range(first, count, num_kinds) for first in range(num_kinds)]


# ---- the replay ----


@dataclass(frozen=True)
class RecordedRequest:
    """`prompt`: the forward pass that gave its first token."""

    prompt: TraceStep
    decoded: DecodedRequest


@dataclass(frozen=True)
class Recorded:
    """`requests`: of the base alone and, True, mixed, in the workload's order."""

    traced: TracedRequests
    requests: Mapping[bool, tuple[RecordedRequest, ...]]

    @classmethod
    def of(cls, header: TraceHeader, events: Sequence[TraceEvent], bench: SpeedBench) -> Recorded:
        """Of requests that came one after the other, the base's first.

        Raises ValueError for another number of them. Shorter ones are what a server asks itself at
        its start.
        """
        traced = requests_of(header, events)
        every = zip(_prompts(events), traced.requests, strict=True)
        asked = [RecordedRequest(prompt, decoded) for prompt, decoded in every]
        long = [each for each in asked if len(each.decoded.topk_ids) >= bench.window_end]
        count = bench.num_requests
        if len(long) != 2 * count:
            raise ValueError(f"{len(long)} requests were recorded, of {2 * count} that were asked")
        requests = {False: tuple(long[:count]), True: tuple(long[count:])}
        return cls(replace(traced, requests=tuple(each.decoded for each in long)), requests)


def _prompts(events: Iterable[TraceEvent]) -> Iterator[TraceStep]:
    """Of each request that decodes, the pass before its first decoded token: no prompt is as long
    as a chunk, and no prefix cache is on.
    """
    seen: set[int] = set()
    last: TraceStep | None = None
    for event in events:
        if not isinstance(event, TraceStep):
            continue
        for request_id in event.request_ids:
            if request_id not in seen and last is not None:
                yield last
            seen.add(request_id)
        last = event


def works_of(recorded: Recorded, bench: SpeedBench, num_kinds: int) -> dict[GridPoint, StepWork]:
    """Of each point of the grid, what a step of its windows does, on average.

    By the decisions of a server that is asked all that this one is asked.
    """
    found = {}
    for server in bench.grid:
        steps, owners = _steps_of(server, recorded, bench, num_kinds)
        for point in bench.points(server):
            counted = {step for step, owner in enumerate(owners) if owner == point}
            work = counted_work(
                recorded.traced,
                steps,
                server.num_rows(recorded.traced),
                policy_of(NONE),
                counted.__contains__,
            )
            found[point] = replace(work, num_tokens=point.batch)
    return found


def _steps_of(
    server: SpeedServer, recorded: Recorded, bench: SpeedBench, num_kinds: int
) -> tuple[list[TraceStep], list[GridPoint | None]]:
    """All steps of a server, and which point's windows each is in: prompts and a request's first
    tokens are in none, so what those read is read by then.
    """
    steps: list[TraceStep] = []
    owners: list[GridPoint | None] = []
    rounds = (round_of(server, number, bench, num_kinds) for number in range(bench.rounds))
    for windows in itertools.chain.from_iterable(rounds):
        requests = recorded.requests[windows.point.with_adapters]
        for group in windows.groups:
            steps.append(_together([requests[n].prompt for n in group]))
            owners.append(None)
            decoded = [requests[n].decoded for n in group]
            for token in range(bench.window_end):
                tokens = [(each.adapter_slot, each.topk_ids[token]) for each in decoded]
                steps.append(step_of(recorded.traced.header, tokens))
                is_counted = windows.is_measured and token >= WARM_TOKENS
                owners.append(windows.point if is_counted else None)
    return steps, owners


def _together(prompts: Sequence[TraceStep]) -> TraceStep:
    """As one pass, which a server makes of most that come together."""
    return replace(
        prompts[0],
        adapter_slots=np.concatenate([each.adapter_slots for each in prompts]),
        topk_ids=np.concatenate([each.topk_ids for each in prompts], axis=1),
    )
