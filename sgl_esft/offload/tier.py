"""One rank's experts in tiers: what happens when a MoE layer asks for slots.

    a layer's slots --[ExpertTier.arrivals]--> decisions.step -> loads on demand -> loader.py
                                                  |  beside the computing, on a thread of its own:
                                                  |  predictor -> decisions.expect -> prefetches
                                                  v
                            (slot, row) in the order in which they can be computed

Decisions are made in one order whatever the loads' times are: step(l), what layer l's router said,
prefetches(l), step(l + 1). So a trace replayed by simulate.py decides the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from sgl_esft.errors import EsftError, ExpertReadError, InvariantError
from sgl_esft.offload.ahead import Ahead
from sgl_esft.offload.decisions import Counts, Decisions, Load, Plan
from sgl_esft.offload.loader import LastTickets, Loader, LoadJob, LoadPriority, LoadTicket
from sgl_esft.offload.routing import Floats, StepTokens
from sgl_esft.offload.rows import EMPTY
from sgl_esft.offload.source import ExpertPlace
from sgl_esft.platform.moe import FAILED

logger = logging.getLogger(__name__)

# (LoadJob, *TierLayer.at(its row)): an expert into its row, on a loader's thread
LoadRow = Callable[..., None]


@dataclass
class TierLayer:
    """One layer's rows on the device, and where each slot's expert lies.

    w13 [num_rows, 2 * I_local, H], w2 [num_rows, H, I_local] and, of quantised experts, their
    scales [num_rows, 2 * I_local, 1] and [num_rows, H, 1]: written by the loader's threads.
    """

    layer_id: int
    w13: torch.Tensor
    w2: torch.Tensor
    places: dict[int, ExpertPlace] = field(default_factory=dict)  # by virtual slot
    scales: tuple[torch.Tensor, torch.Tensor] | None = None

    def at(self, row: int) -> tuple[torch.Tensor, ...]:
        """What an expert in this row fills: of w13, of w2, and of their scales if there are any."""
        return tuple(tensor[row] for tensor in (self.w13, self.w2, *(self.scales or ())))


@dataclass
class TierTimes:
    """Of the forward passes since the start, in seconds."""

    stall_s: float = 0.0  # nothing could be computed, because nothing had arrived
    num_failed: int = 0  # experts that could not be read when they were needed


class ExpertTier:
    """The rows of all MoE layers of a rank; `layers` in the order of the model."""

    def __init__(
        self,
        layers: Sequence[TierLayer],
        decisions: Decisions,
        make_loader: Callable[[Callable[[LoadJob], None]], Loader],
        load: LoadRow,
        ahead: Ahead | None = None,
    ) -> None:
        """ahead: None = nothing is fetched before it is asked for."""
        self.layers = tuple(layers)
        self.decisions = decisions
        self.times = TierTimes()
        self._load = load
        self._ahead = ahead
        self._loader = make_loader(self._run)
        self._last = LastTickets()
        self._beside = _Beside()
        self.failure: str | None = None  # of the forward pass at hand, the last one

    def _run(self, job: LoadJob) -> None:
        """On a loader's thread."""
        self._load(job, *self.layers[job.layer].at(job.row))

    # ---- a forward pass ----

    def begin(self, tokens: StepTokens | None) -> None:
        """A forward pass begins. tokens: those to predict for; None = of a prompt, or none."""
        self._beside.join()
        self.failure = None
        self.decisions.begin()
        if self._ahead is not None:
            self._ahead.begin(tokens)

    def embedded(self, embeddings: Floats | None) -> None:
        """The embedding layer's outputs of the pass's tokens, before the first MoE layer.

        None where they are not wanted.
        """
        ahead = self._ahead
        if ahead is None or not ahead.is_on:
            return
        if embeddings is None:
            self._fetch(ahead.embedded(None))
        else:
            self._beside.start(lambda: self._fetch(ahead.embedded(embeddings)))

    @property
    def wants_embeddings(self) -> bool:
        """Whether `embedded` has use for them in the pass at hand."""
        return self._ahead is not None and self._ahead.wants_embeddings

    @property
    def wants_hidden(self) -> bool:
        """Whether `arrivals` has use for hidden states in the pass at hand."""
        return self._ahead is not None and self._ahead.wants_hidden

    def arrivals(
        self,
        layer: int,
        slots: Sequence[int],
        probs: Floats | None = None,
        hidden: Floats | None = None,
    ) -> Iterator[tuple[int, int]]:
        """`platform.moe.Arrivals` of one layer: an expert at a time.

        probs: [num_tokens, J] of the router for the tokens of `begin`, for what looks ahead;
        hidden: [num_tokens, H], what the router was given, where it is wanted.
        """
        with self._step(layer, slots, probs, hidden) as step:
            yield from step.run()

    def waves(
        self,
        layer: int,
        slots: Sequence[int],
        probs: Floats | None = None,
        hidden: Floats | None = None,
    ) -> Iterator[list[tuple[int, int]]]:
        """As `arrivals`, with all that can be computed at a time together: one kernel each."""
        with self._step(layer, slots, probs, hidden) as step:
            yield from step.waves()

    @contextmanager
    def _step(
        self, layer: int, slots: Sequence[int], probs: Floats | None, hidden: Floats | None
    ) -> Iterator[_Step]:
        """Whatever happens in it, what is not in its row in the end is nowhere."""
        self._beside.join()
        plan = self.decisions.step(layer, np.array(slots, dtype=np.int64))
        step = _Step(self, plan)
        try:
            step.begin()
            self._look_ahead(layer, probs, hidden)
            yield step
        finally:
            self._beside.join()
            for slot in step.unfinished():
                self.decisions.forget(layer, (slot,))

    def _look_ahead(self, layer: int, probs: Floats | None, hidden: Floats | None) -> None:
        ahead = self._ahead
        if ahead is None:
            return
        if ahead.is_quick(layer) and not self.decisions.policy.streams:
            self._fetch(ahead.routed(layer, probs, hidden))
        else:
            self._beside.start(lambda: self._fetch(ahead.routed(layer, probs, hidden)))

    def _fetch(self, loads: Sequence[Load]) -> None:
        for load in loads:
            self.submit(load, LoadPriority.PREFETCH)

    def submit(self, load: Load, priority: LoadPriority) -> LoadTicket:
        """Start a load whose row is free to be written."""
        place = self.layers[load.layer].places.get(load.slot)
        if place is None:
            raise InvariantError(f"layer {load.layer}: slot {load.slot} has no expert")
        ticket = self._loader.submit(LoadJob(load.layer, load.slot, load.row, priority, place))
        self._last.put(ticket)
        return ticket

    def ticket_of(self, layer: int, row: int) -> LoadTicket | None:
        """The last load into a row; None when it is there."""
        return self._last.unfinished(layer, row)

    def demand(self, ticket: LoadTicket) -> None:
        """What was fetched ahead is needed now."""
        self._loader.promote(ticket)

    def note_failure(self, layer: int, slot: int, error: BaseException) -> None:
        """An expert that is needed cannot be had: its tokens get no answer."""
        self.times.num_failed += 1
        kind = type(error).__name__ if isinstance(error, EsftError) else ExpertReadError.__name__
        self.failure = f"{kind}: {error}"
        logger.error("layer %d, slot %d: %s", self.layers[layer].layer_id, slot, self.failure)

    # ---- adapters come and go ----

    def add(self, layer: int, places: Mapping[int, ExpertPlace]) -> None:
        """These slots have experts from now on."""
        self.layers[layer].places.update(places)

    def remove(self, layer: int, slots: Sequence[int]) -> None:
        """These slots have none from now on; what is on its way to them lands in vain."""
        self._beside.join()
        self.decisions.forget(layer, slots)
        for slot in slots:
            self.layers[layer].places.pop(slot, None)
            self._last.forget(layer, slot)

    def totals(self) -> Counts:
        """Counts of all layers together."""
        every = [vars(self.decisions.counts(layer)) for layer in range(len(self.layers))]
        return Counts(**{name: sum(each[name] for each in every) for name in every[0]})

    def close(self) -> None:
        """End the threads."""
        self._beside.close()
        self._loader.close()


class _Beside:
    """One thing at a time on a thread beside the forward pass; what it raises, `join` raises."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="expert-ahead")
        self._running: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        self.join()
        self._running = self._pool.submit(work)

    def join(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        self.join()
        self._pool.shutdown()


class _Step:
    """One layer's step: loads that wait for rows, and experts in the order they can be computed."""

    def __init__(self, tier: ExpertTier, plan: Plan) -> None:
        self._tier = tier
        self._plan = plan
        self._blocked: dict[int, list[Load]] = {}  # by the slot that is in their row
        self._landed: SimpleQueue[Load] = SimpleQueue()
        self._tickets: dict[int, LoadTicket] = {}  # by slot
        self._left = {load.slot for load in plan.loads}  # not computed yet

    def begin(self) -> None:
        """Start every load whose row may be written now."""
        for load in self._plan.loads:
            if load.after == EMPTY:
                self._start(load)
            else:
                self._blocked.setdefault(load.after, []).append(load)

    def _start(self, load: Load) -> None:
        self._wait_for(load, self._tier.submit(load, LoadPriority.ON_DEMAND))

    def _wait_for(self, load: Load, ticket: LoadTicket) -> None:
        self._tickets[load.slot] = ticket
        ticket.when_finished(partial(self._landed.put, load))

    def run(self) -> Iterator[tuple[int, int]]:
        """Who is here first, then who arrives."""
        for slot, row in self._plan.present:
            if self._is_here(slot, row):
                yield slot, row
                self._computed(slot)
        while self._tickets:
            slot, row = self._arrived()
            yield slot, row
            self._computed(slot)

    def waves(self) -> Iterator[list[tuple[int, int]]]:
        """All that wait for nobody's row, then those that waited for theirs, and so on."""
        wave = [(slot, row) for slot, row in self._plan.present if self._is_here(slot, row)]
        while True:
            while self._tickets:
                wave.append(self._arrived())
            if not wave:
                return
            yield wave
            for slot, _ in wave:
                self._computed(slot)
            wave = []

    def _arrived(self) -> tuple[int, int]:
        """The next one, and its row, or FAILED."""
        load = self._next()
        self._left.discard(load.slot)
        return load.slot, self._row_of(load)

    def _is_here(self, slot: int, row: int) -> bool:
        """False: it was fetched ahead, and is on its way still."""
        layer = self._plan.layer
        ticket = self._tier.ticket_of(layer, row)
        if ticket is None:
            return True
        self._left.add(slot)
        load = Load(layer, slot, row)
        if ticket.is_finished:  # and failed: now that it is needed, once more
            self._start(load)
        else:
            self._tier.demand(ticket)
            self._wait_for(load, ticket)
        return False

    def _next(self) -> Load:
        if not self._landed.empty():
            return self._landed.get()
        began = time.perf_counter()
        found = self._landed.get()
        self._tier.times.stall_s += time.perf_counter() - began
        return found

    def _row_of(self, load: Load) -> int:
        error = self._tickets.pop(load.slot).error
        if error is None:
            return load.row
        self._left.add(load.slot)  # it is not here, whatever was decided
        self._tier.note_failure(load.layer, load.slot, error)
        return FAILED

    def _computed(self, slot: int) -> None:
        for load in self._blocked.pop(slot, ()):
            self._start(load)

    def unfinished(self) -> set[int]:
        """Slots that are not in the rows that they were given."""
        return self._left


def probabilities(router_logits: torch.Tensor, scoring: str) -> Floats:
    """[num_tokens, J] float32, rows that sum to 1: the router's whole distribution."""
    logits = router_logits.float()
    scores = logits.softmax(dim=-1) if scoring == "softmax" else logits.sigmoid()
    found: Any = (scores / scores.sum(dim=-1, keepdim=True)).cpu().numpy()
    return np.asarray(found, dtype=np.float32)
