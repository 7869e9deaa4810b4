"""What one rank keeps, loads and gives up, layer after layer: pure, without a clock or a thread.

    slots that a layer needs --[Decisions.step]--> Plan: who is here, what to load into which row
    predictions --[expect]--> candidates --[prefetches]--> what to load ahead, within the budget

The same steps give the same decisions anywhere, so the simulator's counts are the server's. How
long a load takes enters as one number only: `loads_per_layer`, how many experts the link carries
while a layer is computed (1 / r of offload_notes, section 5).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sgl_esft.errors import InvariantError
from sgl_esft.offload.policies import Eviction, ExpertPolicy, Values
from sgl_esft.offload.recall import Recall
from sgl_esft.offload.routing import Floats, Ints
from sgl_esft.offload.rows import EMPTY, NOT_HERE, RowTable

WAVE_ROWS = 4  # rows that a step with more experts than rows goes through; the others stay
MAX_CREDIT_LAYERS = 2.0  # layers whose unused link time is kept for later prefetches


@dataclass(frozen=True)
class Load:
    """One expert to read into a row.

    `after`: the slot of the same step that must be computed first, because it is in that row;
    EMPTY = at once.
    """

    layer: int
    slot: int
    row: int
    after: int = EMPTY


@dataclass(frozen=True)
class Plan:
    """One layer's step: `present` (slot, row) in the order to compute them, then `loads`.

    Rows are those of the step: a row may have changed hands when the plan was made.
    """

    layer: int
    present: tuple[tuple[int, int], ...]
    loads: tuple[Load, ...]
    is_wave: bool = False  # more experts than rows


@dataclass
class Counts:
    """Of one layer or of all, since the start."""

    num_asked: int = 0  # distinct slots of all steps
    num_hits: int = 0  # of them in a row when their step began, prefetched ones too
    num_loads: int = 0  # on demand
    num_prefetches: int = 0
    num_useful: int = 0  # prefetched, and asked for by the step that they were fetched for
    num_wasted: int = 0  # prefetched, and not


@dataclass
class _Layer:
    rows: RowTable
    eviction: Eviction
    pinned: set[int] = field(default_factory=set)
    ahead: dict[int, int] = field(default_factory=dict)  # slots fetched for the next step -> row
    wanted: dict[int, float] = field(default_factory=dict)  # candidates -> priority
    counts: Counts = field(default_factory=Counts)

    def by_value(self, slots: Ints) -> list[int]:
        """Slots, the least worth keeping first."""
        slots = np.sort(slots)
        order = np.argsort(self.eviction.values(slots), kind="stable")
        found: list[int] = slots[order].tolist()
        return found

    def rows_to_take(self, kept: set[int]) -> list[int]:
        """Rows that slots outside `kept` may leave: empty ones, then by value.

        What was fetched ahead for this very step and is not needed is worth no more than others.
        """
        kept = kept | self.pinned
        others = [slot for slot in self.rows.residents().tolist() if slot not in kept]
        leaving = self.by_value(np.array(others, dtype=np.int64))
        return [*self.rows.empty_rows().tolist(), *self.rows.where[leaving].tolist()]


class Decisions:
    """All MoE layers of one rank, numbered from 0.

    num_slots: virtual slots of a layer; num_base: of them the base's, which streaming goes through.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_rows: int,
        policy: ExpertPolicy,
        *,
        num_base: int,
        loads_per_layer: float = 0.0,
        popularity: Sequence[Values] | None = None,
    ) -> None:
        """popularity: a layer's [num_slots] each. Raises InvariantError for less than a row."""
        self.policy = policy
        self.num_base = num_base
        self.loads_per_layer = loads_per_layer
        self.recall = Recall(num_layers)
        self._credit = 0.0
        self._layers = [
            _Layer(
                RowTable(num_slots, num_rows),
                policy.evict(num_slots, None if popularity is None else popularity[layer]),
            )
            for layer in range(num_layers)
        ]

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return len(self._layers)

    @property
    def num_rows(self) -> int:
        """Of each layer."""
        return self._layers[0].rows.num_rows

    # ---- one step of one layer ----

    def step(self, layer: int, needed: Ints) -> Plan:
        """`needed`: [n] distinct slots, ascending. Afterwards they are here, or were."""
        of = self._layers[layer]
        is_here = of.rows.where[needed] != NOT_HERE
        present, missing = needed[is_here], needed[~is_here]
        self._count(of, needed, present, missing)
        self.recall.asked(layer, needed)
        plan = self._make_room(layer, needed, present, missing)
        if not plan.is_wave:  # a prompt that asks for everything says nothing about what comes
            of.eviction.used(needed)
        of.ahead.clear()
        of.wanted.clear()
        return plan

    def _count(self, of: _Layer, needed: Ints, present: Ints, missing: Ints) -> None:
        counts = of.counts
        counts.num_asked += len(needed)
        counts.num_hits += len(present)
        counts.num_loads += len(missing)
        useful = sum(slot in of.ahead for slot in present.tolist())
        counts.num_useful += useful
        counts.num_wasted += len(of.ahead) - useful

    def _make_room(self, layer: int, needed: Ints, present: Ints, missing: Ints) -> Plan:
        of = self._layers[layer]
        found = dict(zip(present.tolist(), of.rows.where[present].tolist(), strict=True))
        if not len(missing):
            return Plan(layer, tuple(found.items()), ())
        free = of.rows_to_take(set(needed.tolist()))
        if len(missing) > len(free):
            return self._in_waves(layer, found, missing, free)
        slots = zip(missing.tolist(), free, strict=False)
        loads = [self._enter(layer, slot, row) for slot, row in slots]
        return Plan(layer, tuple(found.items()), tuple(loads))

    def _in_waves(
        self, layer: int, present: dict[int, int], missing: Ints, free: list[int]
    ) -> Plan:
        """More experts than rows: the missing ones go through a few rows, one after the other.

        `present`: slot -> row.
        """
        of = self._layers[layer]
        lent = [s for s in of.by_value(np.array([*present], dtype=np.int64)) if s not in of.pinned]
        num_lent = max(0, min(len(lent), WAVE_ROWS - len(free)))
        first = lent[:num_lent]  # computed first, and gone then
        pool = [*free, *(present[slot] for slot in first)]
        if not pool:
            raise InvariantError(
                f"layer {layer}: every row is pinned, and {len(missing)} must load"
            )
        loads = []
        for index, slot in enumerate(missing.tolist()):
            row = pool[index % len(pool)]
            before = int(of.rows.slot_of[row])
            is_lent = index >= len(pool) or before in first
            loads.append(self._enter(layer, slot, row, before if is_lent else EMPTY))
        order = [*first, *(slot for slot in present if slot not in first)]
        return Plan(layer, tuple((s, present[s]) for s in order), tuple(loads), is_wave=True)

    def _enter(self, layer: int, slot: int, row: int, after: int = EMPTY) -> Load:
        of = self._layers[layer]
        of.rows.put(slot, row)
        of.eviction.entered(slot)
        return Load(layer, slot, row, after)

    # ---- ahead of a layer's step ----

    def begin(self) -> None:
        """A forward pass begins: what was expected of the last one is over."""
        self.recall.begin()
        for of in self._layers:
            of.wanted.clear()

    def expect(self, layer: int, slots: Ints, probs: Floats) -> None:
        """Several tokens may expect one slot: its probabilities are added."""
        of = self._layers[layer]
        of.eviction.predicted(slots, probs)
        for slot, prob in zip(slots.tolist(), probs.tolist(), strict=True):
            of.wanted[slot] = of.wanted.get(slot, 0.0) + prob

    def prefetches(self, layer: int) -> tuple[Load, ...]:
        """What to load ahead while MoE layer `layer` is computed, the most urgent first.

        layer: -1 before the first. Priority is probability over distance (FineMoE section 4.3);
        what the link cannot carry while a layer is computed is left out: it would only displace.
        The layer's own loads have the link first, but they take little of that time: it waits for
        them, and while it waits nothing is computed that could hide a load.
        """
        self._credit += self.loads_per_layer
        self._credit = min(self._credit, MAX_CREDIT_LAYERS * max(1.0, self.loads_per_layer))
        loads = []
        for target, slot in self._urgent(layer):
            if self._credit < 1.0:
                break
            row = self._row_ahead(target)
            if row is None:
                continue
            loads.append(self._enter(target, slot, row))
            self._layers[target].ahead[slot] = row
            self._layers[target].counts.num_prefetches += 1
            self._credit -= 1.0
        return tuple(loads)

    def _urgent(self, layer: int) -> Iterable[tuple[int, int]]:
        """(layer, slot) of candidates that are not here, by falling priority."""
        if self.policy.streams:
            self._expect_all(layer + 1)
        found = []
        for target in range(layer + 1, len(self._layers)):
            of = self._layers[target]
            for slot, prob in of.wanted.items():
                if of.rows.where[slot] == NOT_HERE:
                    found.append((-prob / (target - layer), target, slot))
        return [(target, slot) for _, target, slot in sorted(found)]

    def _expect_all(self, layer: int) -> None:
        if layer < len(self._layers) and not self._layers[layer].wanted:
            self._layers[layer].wanted = dict.fromkeys(range(self.num_base), 1.0)

    def _row_ahead(self, layer: int) -> int | None:
        """A row that a guess may have: never one of a live entry (offload_notes, pitfall 13).

        What streams expects everything of every layer, so there only what came in last is live.
        """
        of = self._layers[layer]
        if len(of.ahead) >= max(1, of.rows.num_rows // 2):
            return None
        kept = set(of.ahead) if self.policy.streams else {*of.wanted, *of.ahead}
        rows = of.rows_to_take(kept)
        return rows[0] if rows else None

    # ---- who may be here at all ----

    def where(self, layer: int) -> Ints:
        """[num_slots]: the row of each slot or NOT_HERE; changes with each call."""
        return self._layers[layer].rows.where

    def forget(self, layer: int, slots: Iterable[int]) -> None:
        """These slots have other weights from now on, or none: they leave their rows."""
        of = self._layers[layer]
        for slot in slots:
            of.rows.take(slot)
            of.pinned.discard(slot)
            of.ahead.pop(slot, None)
            of.wanted.pop(slot, None)

    def pin(self, layer: int, slots: Iterable[int]) -> None:
        """Once here, they stay. Raises InvariantError where nothing would be left to load into."""
        of = self._layers[layer]
        wanted = of.pinned | set(slots)
        if len(wanted) >= of.rows.num_rows:
            raise InvariantError(f"{len(wanted)} slots pinned in {of.rows.num_rows} rows")
        of.pinned = wanted

    def unpin(self, layer: int, slots: Iterable[int]) -> None:
        """They may leave again."""
        self._layers[layer].pinned.difference_update(slots)

    def counts(self, layer: int) -> Counts:
        """Of one layer; changes with each call."""
        return self._layers[layer].counts

    def check_integrity(self) -> None:
        """Raises InvariantError when a table contradicts itself."""
        for of in self._layers:
            of.rows.check_integrity()
            strays = [slot for slot, row in of.ahead.items() if of.rows.where[slot] != row]
            if strays:
                raise InvariantError(f"slots {strays} were fetched ahead and are not there")
