"""What a decoding step of so many requests does: cut from a trace, and counted by a replay.

    read_trace --[requests_of]--> TracedRequests: each request's decoded tokens by themselves
    --[batched]--> steps of any number of requests together --[work_of]: a server's decisions-->
    StepWork: experts that layers ask for, and of them those that are read (speed.py: how long)

A trace was recorded at some batch sizes, mixed; speed is asked for at others.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from sgl_esft.errors import ConfigError
from sgl_esft.offload.decisions import Decisions, Load
from sgl_esft.offload.policies import POLICIES, ExpertPolicy, Values
from sgl_esft.offload.routing import Ints
from sgl_esft.offload.simulate import base_maps, replay
from sgl_esft.offload.trace import SlotChange, TraceEvent, TraceHeader, TraceStep

BASE: Final = -1  # an adapter slot
WARM_STEPS: Final = 64  # of a replay, that are not counted
MIN_STEPS: Final = 192  # that are counted, and at least
MIN_TOKENS: Final = 2048  # of so many tokens: few requests are not like all
COUNTED_POLICIES: Final = tuple(
    name for name, policy in POLICIES.items() if policy.predictor is None and not policy.streams
)
"""Those that fetch nothing ahead: what they do in a layer's step is all that it waits for."""


@dataclass(frozen=True)
class DecodedRequest:
    """Decoded tokens of one request, in order: `topk_ids` [S, L, k], -1 = none."""

    adapter_slot: int  # BASE = the base
    topk_ids: Ints


@dataclass(frozen=True)
class TracedRequests:
    """Requests whose adapters are those of `maps`, [L, N + 1, M] as SlotChange has it."""

    header: TraceHeader
    maps: Ints
    requests: tuple[DecodedRequest, ...]

    @property
    def has_adapters(self) -> bool:
        """Whether any request is an adapter's."""
        return any(each.adapter_slot != BASE for each in self.requests)

    def of_base(self, at_least: int = 1) -> TracedRequests:
        """The base's alone; where they are fewer, all, as if the base had been asked."""
        own = tuple(each for each in self.requests if each.adapter_slot == BASE)
        if len(own) < at_least:
            own = tuple(replace(each, adapter_slot=BASE) for each in self.requests)
        return replace(self, requests=own)

    def uses(self) -> Ints:
        """[L, num_slots]: how many tokens' choices each slot of a layer was."""
        found = np.zeros((self.header.num_layers, self.header.num_slots), dtype=np.int64)
        for each in self.requests:
            for layer in range(self.header.num_layers):
                ids = each.topk_ids[:, layer]
                slots = self.maps[layer, each.adapter_slot, ids[ids >= 0]]
                np.add.at(found[layer], slots[slots >= 0], 1)
        return found


def requests_of(header: TraceHeader, events: Iterable[TraceEvent]) -> TracedRequests:
    """Decoded tokens by request, in the order in which requests came.

    A request is left out where its adapter slot was another's, or empty, at the trace's end: one
    batch cannot have both. Raises ConfigError for a trace without decoded tokens.
    """
    maps = base_maps(header)
    tokens: dict[int, list[Ints]] = {}
    owners: dict[int, tuple[int, Ints]] = {}  # request -> adapter slot, and the maps then
    for event in events:
        if isinstance(event, SlotChange):
            maps = event.maps
            continue
        for index, request_id in enumerate(event.request_ids):
            owners.setdefault(request_id, (int(event.adapter_slots[index]), maps))
            tokens.setdefault(request_id, []).append(event.topk_ids[:, index])
    found = tuple(
        DecodedRequest(adapter_slot, np.stack(tokens[request_id]))
        for request_id, (adapter_slot, then) in owners.items()
        if _same_owner(adapter_slot, then, maps)
    )
    if not found:
        raise ConfigError("the trace has no decoded tokens: record a server that answers")
    return TracedRequests(header, maps, found)


def _same_owner(adapter_slot: int, then: Ints, now: Ints) -> bool:
    return then is now or np.array_equal(then[:, adapter_slot], now[:, adapter_slot])


def batched(traced: TracedRequests, batch_size: int, seed: int, num_steps: int) -> list[TraceStep]:
    """Steps of `batch_size` requests together; where one ends, the next one takes its place.

    Nothing is predicted for in them. Raises ConfigError for a trace of fewer requests, which would
    be asked of themselves.
    """
    if not 1 <= batch_size <= len(traced.requests):
        raise ConfigError(
            f"{batch_size} requests together: the trace has {len(traced.requests)} that decode "
            "and whose adapters it still has; record more, or ask for fewer"
        )
    order = np.random.default_rng(seed).permutation(len(traced.requests)).tolist()
    turn = itertools.cycle([traced.requests[number] for number in order])
    places = [_tokens(turn) for _ in range(batch_size)]
    return [step_of(traced.header, [next(place) for place in places]) for _ in range(num_steps)]


def _tokens(turn: Iterator[DecodedRequest]) -> Iterator[tuple[int, Ints]]:
    """(adapter slot, [L, k] expert ids) of each token at one place of a batch."""
    for request in turn:
        for ids in request.topk_ids:
            yield request.adapter_slot, ids


def step_of(header: TraceHeader, tokens: Sequence[tuple[int, Ints]]) -> TraceStep:
    """Of these tokens, (adapter slot, [L, k] expert ids) each."""
    return TraceStep(
        request_ids=tuple(range(len(tokens))),
        adapter_slots=np.array([adapter_slot for adapter_slot, _ in tokens], dtype=np.int64),
        topk_ids=np.stack([ids for _, ids in tokens], axis=1),
        probs=np.zeros((header.num_layers, 0, header.num_experts), np.float32),
        embeddings=np.zeros((0, header.embedding_size), np.float32),
    )


@dataclass(frozen=True)
class StepWork:
    """A decoding step, on average over steps.

    Layers' steps by kind, [n] float64 each: `needed` distinct experts, of which `loads` are read;
    `layers`: how many of a step's layers are so. They sum to the number of MoE layers.
    """

    num_tokens: int
    needed: Values
    loads: Values
    layers: Values

    @property
    def num_needed(self) -> float:
        """Of all layers."""
        return float(self.needed @ self.layers)

    @property
    def num_loads(self) -> float:
        """Of all layers."""
        return float(self.loads @ self.layers)

    @property
    def num_contended(self) -> float:
        """Of `num_needed`, those whose layers read any: computed while threads read."""
        return float((self.needed * (self.loads > 0.0)) @ self.layers)


class StepTally:
    """Counts layers' steps by kind, as simulate.ReplayWatch, of the steps that `is_counted` says.

    It is asked by the step's number, from 0.
    """

    def __init__(self, is_counted: Callable[[int], bool]) -> None:
        self._is_counted = is_counted
        self._num_steps = self._num_counted = 0
        self._is_on = False
        self._kinds: Counter[tuple[int, int]] = Counter()

    def guess(self, loads: Iterable[Load], *, during_layer: bool) -> None:
        """Policies that fetch ahead are not counted: `work_of` refuses them."""

    def compute(self, layer: int, needed: Sequence[int], loads: Sequence[Load]) -> None:
        if layer == 0:
            self._is_on = self._is_counted(self._num_steps)
            self._num_steps += 1
            self._num_counted += self._is_on
        if self._is_on:
            self._kinds[len(needed), len(loads)] += 1

    def work(self, num_tokens: int) -> StepWork:
        """What a counted step did, each of them of so many tokens."""
        kinds = np.array(sorted(self._kinds), dtype=np.float64).reshape(-1, 2)
        times = np.array([self._kinds[kind] for kind in sorted(self._kinds)], dtype=np.float64)
        return StepWork(num_tokens, kinds[:, 0], kinds[:, 1], times / max(1, self._num_counted))


def work_of(
    traced: TracedRequests,
    batch_size: int,
    num_rows: int,
    policy: ExpertPolicy,
    *,
    seed: int = 0,
    num_steps: int | None = None,
) -> StepWork:
    """As a server with `num_rows` rows a layer would decide, once it has been busy for a while.

    num_steps: that are counted; None = as many as say something.

    Raises as `counted_work`, and ConfigError for a trace of too few requests.
    """
    if num_steps is None:
        num_steps = max(MIN_STEPS, MIN_TOKENS // max(1, batch_size))
    steps = batched(traced, batch_size, seed, WARM_STEPS + num_steps)
    return counted_work(traced, steps, num_rows, policy, lambda step: step >= WARM_STEPS)


def counted_work(
    traced: TracedRequests,
    steps: Sequence[TraceStep],
    num_rows: int,
    policy: ExpertPolicy,
    is_counted: Callable[[int], bool],
) -> StepWork:
    """What a server does in `steps`, of equally many tokens each; of those that are counted.

    Raises ConfigError for rows that one token does not fit into and for a policy that is not among
    COUNTED_POLICIES.
    """
    header = traced.header
    if policy.name not in COUNTED_POLICIES:
        raise ConfigError(
            f"--expert-policy {policy.name} fetches ahead, and what that hides is not predicted: "
            f"use one of {', '.join(COUNTED_POLICIES)}"
        )
    if num_rows < header.top_k:
        raise ConfigError(
            f"--expert-cache {num_rows}: one token needs {header.top_k} experts of a layer"
        )
    num_rows = min(num_rows, header.num_slots)
    decisions = Decisions(
        header.num_layers, header.num_slots, num_rows, policy, num_base=header.num_base
    )
    for layer, uses in enumerate(traced.uses()):
        decisions.step(layer, _most_used(uses, num_rows))
    tally = StepTally(is_counted)
    replay(header, [SlotChange(traced.maps), *steps], decisions, timeline=tally)
    return tally.work(len(steps[0].adapter_slots))


def _most_used(uses: Ints, count: int) -> Ints:
    """Slots that were used at all, the `count` most used ones, ascending.

    Rows are filled with them at first: a replay is too short to fill them as a server does.
    """
    order = np.argsort(-uses, kind="stable")[:count]
    found: Ints = np.sort(order[uses[order] > 0])
    return found
