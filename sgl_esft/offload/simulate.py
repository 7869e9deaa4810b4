"""A trace replayed: what a cache and a policy would have done, exactly as a server decides.

read_trace -> [replay]: the calls of tier.py in their order, nothing loaded -> Counts
              [Timeline]: when loads and layers would have ended, by r -> stall
              [ReplayWatch]: whatever else sees each layer's step (step_work.py)
[belady], [oracle]: what could not be beaten
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sgl_esft.offload.ahead import Ahead
from sgl_esft.offload.decisions import Counts, Decisions, Load
from sgl_esft.offload.predictors.predictor import Predictor
from sgl_esft.offload.recall import Recall
from sgl_esft.offload.routing import Ints, StepTokens, owners_of
from sgl_esft.offload.trace import SlotChange, TraceEvent, TraceHeader, TraceStep


def needed_slots(maps: Ints, topk_ids: Ints, adapter_slots: Ints) -> Ints:
    """[n] distinct slots, ascending, that one layer needs. maps [N + 1, M], topk_ids [T, k]."""
    is_some = topk_ids >= 0
    slots = maps[adapter_slots[:, None], np.where(is_some, topk_ids, 0)]
    found: Ints = np.unique(slots[is_some & (slots >= 0)])
    return found


class ReplayWatch(Protocol):
    """Sees a replay as it goes."""

    def guess(self, loads: Iterable[Load], *, during_layer: bool) -> None:
        """Loads ahead of need; asked for when the last layer began to compute, or now."""

    def compute(self, layer: int, needed: Sequence[int], loads: Sequence[Load]) -> None:
        """A layer's step: the distinct slots that it needs, and the loads that it must wait for."""


@dataclass
class Timeline:
    """One link and one processor, in units of a layer's computing time.

    `load_time`: of one expert (r of offload_notes, section 5). Loads on demand go before guesses
    that have not begun; a layer waits for what it needs, and then takes 1.
    """

    load_time: float
    now: float = 0.0
    stall: float = 0.0
    _link_free: float = 0.0

    def __post_init__(self) -> None:
        self._queue: list[tuple[Load, float]] = []  # guesses that have not begun, since when
        self._lands: dict[tuple[int, int], float] = {}  # (layer, slot) -> when it is there

    def guess(self, loads: Iterable[Load], *, during_layer: bool) -> None:
        """Loads ahead of need; asked for when the last layer began to compute, or now."""
        asked = self.now - 1.0 if during_layer else self.now
        self._queue.extend((load, asked) for load in loads)

    def compute(self, layer: int, needed: Iterable[int], loads: Sequence[Load]) -> None:
        """A layer's step: wait for what it needs, compute."""
        self._run_queue()
        wanted = set(needed)
        late = [load for load, _ in self._queue if load.layer == layer and load.slot in wanted]
        self._queue = [(load, asked) for load, asked in self._queue if load.layer > layer]
        ready = max((self._lands.pop((layer, slot), 0.0) for slot in wanted), default=self.now)
        for load in (*loads, *late):
            ready = max(ready, self._carry(load, self.now))
            self._lands.pop((load.layer, load.slot), None)
        self.stall += max(0.0, ready - self.now)
        self.now = max(self.now, ready) + 1.0

    def _run_queue(self) -> None:
        """Guesses begin while the link is free, up to now."""
        while self._queue and self._link_free < self.now:
            self._carry(*self._queue.pop(0))

    def _carry(self, load: Load, asked: float) -> float:
        self._link_free = max(self._link_free, asked) + self.load_time
        self._lands[load.layer, load.slot] = self._link_free
        return self._link_free


@dataclass(frozen=True)
class Replayed:
    """What came of a replay."""

    counts: Counts  # of all layers together
    by_layer: tuple[Counts, ...]
    num_steps: int
    num_tokens: int
    recall: Recall
    stall_layers: float = 0.0  # in layers' computing times; 0 without a timeline


def replay(
    header: TraceHeader,
    events: Iterable[TraceEvent],
    decisions: Decisions,
    predictor: Predictor | None = None,
    timeline: ReplayWatch | None = None,
) -> Replayed:
    """Decide as tier.py does, pass by pass; `timeline` is told of each layer's step."""
    maps = base_maps(header)
    num_steps = num_tokens = 0
    holder = _Maps(maps)
    looks = predictor is not None or decisions.policy.streams
    ahead = Ahead(decisions, predictor, holder.slots_of) if looks else None
    for event in events:
        if isinstance(event, SlotChange):
            holder.maps, holder.owners = event.maps, event.owners
            for layer, slot in event.forgotten:
                decisions.forget(layer, (slot,))
            continue
        num_steps += 1
        num_tokens += len(event.adapter_slots)
        _replay_step(event, holder, decisions, ahead, timeline)
    by_layer = tuple(decisions.counts(layer) for layer in range(header.num_layers))
    stall = timeline.stall if isinstance(timeline, Timeline) else 0.0
    return Replayed(added(by_layer), by_layer, num_steps, num_tokens, decisions.recall, stall)


class _Maps:
    def __init__(self, maps: Ints) -> None:
        self.maps = maps
        self.owners: tuple[int, ...] = ()  # by adapter slot; () = not known

    def slots_of(self, layer: int, adapter_slot: int, expert_ids: Ints) -> Ints:
        found: Ints = self.maps[layer, adapter_slot, expert_ids]
        return found


def _replay_step(
    step: TraceStep,
    holder: _Maps,
    decisions: Decisions,
    ahead: Ahead | None,
    timeline: ReplayWatch | None,
) -> None:
    decisions.begin()
    if ahead is not None:
        ahead.begin(_tokens_of(step, holder.owners))
        if ahead.is_on:
            loads = ahead.embedded(step.embeddings)
            if timeline is not None:
                timeline.guess(loads, during_layer=False)
    for layer in range(len(step.topk_ids)):
        needed = needed_slots(holder.maps[layer], step.topk_ids[layer], step.adapter_slots)
        plan = decisions.step(layer, needed)
        if timeline is not None:
            timeline.compute(layer, needed.tolist(), plan.loads)
        if ahead is not None:
            probs = step.probs[layer] if step.request_ids else None
            loads = ahead.routed(layer, probs)
            if timeline is not None:
                timeline.guess(loads, during_layer=True)


def _tokens_of(step: TraceStep, owners: Sequence[int]) -> StepTokens | None:
    if not step.request_ids:
        return None
    slots = tuple(step.adapter_slots[: len(step.request_ids)].tolist())
    return StepTokens(step.request_ids, slots, owners=owners_of(slots, owners))


def base_maps(header: TraceHeader) -> Ints:
    """[L, 1, M]: the base alone, each expert in the slot of its id."""
    row = np.arange(header.num_experts, dtype=np.int64)
    return np.broadcast_to(row, (header.num_layers, 1, header.num_experts))


def added(counts: Iterable[Counts]) -> Counts:
    """All together."""
    every = [vars(each) for each in counts]
    return Counts(**{name: sum(each[name] for each in every) for name in vars(Counts())})


def belady_hits(needs: Sequence[Ints], num_rows: int) -> int:
    """Hits of one layer's steps where who is asked for last leaves first: no policy has more.

    As a server, a step keeps all that it needs, as far as there are rows.
    """
    next_use = _next_uses(needs)
    here: dict[int, int] = {}  # slot -> step of its next use
    hits = 0
    for number, needed in enumerate(needs):
        wanted = needed.tolist()
        hits += sum(slot in here for slot in wanted)
        for slot in wanted:
            here[slot] = next_use[number, slot]
        while len(here) > num_rows:
            del here[max(here, key=lambda slot: (here[slot], slot))]
    return hits


def _next_uses(needs: Sequence[Ints]) -> dict[tuple[int, int], int]:
    """(step, slot) -> the next step that needs it."""
    last: dict[int, int] = {}
    found = {}
    for number in range(len(needs) - 1, -1, -1):
        for slot in needs[number].tolist():
            found[number, slot] = last.get(slot, len(needs))
            last[slot] = number
    return found


def needs_of(header: TraceHeader, events: Iterable[TraceEvent]) -> list[list[Ints]]:
    """By layer, what each step needs."""
    maps = base_maps(header)
    found: list[list[Ints]] = [[] for _ in range(header.num_layers)]
    for event in events:
        if isinstance(event, SlotChange):
            maps = event.maps
            continue
        for layer, ids in enumerate(event.topk_ids):
            found[layer].append(needed_slots(maps[layer], ids, event.adapter_slots))
    return found
