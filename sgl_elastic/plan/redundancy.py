"""Redundant experts: which are copied, to which devices, and who computes a token's then.

    heat (tokens by expert), placement --> [choose_copies] --> copies --> computing_rank, layer_load

Every layer has its own copies, because each has other hot experts and each waits for its slowest
device. Pure integers: a load is counted in D-ths of a token, D the number of ranks, because tokens
come from all ranks alike and an expert's holders share them by rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from sgl_elastic.errors import PlanError
from sgl_elastic.plan.pages import expert_slots, pages_of_slots
from sgl_elastic.types import AdapterEntry, ExpertCopy, MemoryShape, Placement, RegionKind

# Layer id -> tokens of each expert id: the base's and all adapters', since an adapter's expert is
# computed where the base's of the same id is.
Heat = Mapping[int, Sequence[int]]

_MAX_SWAPS = 64  # of one layer; each makes it better, so few come about
# A layer whose busiest device has 2 % more than the mean counts as balanced: the next second's heat
# differs by more, and below that copies are better spent on tokens that then cross no device.
_BALANCED = (51, 50)


@dataclass(frozen=True)
class LayerLoad:
    """What a layer's holders make of its heat.

    `slowest` and `crossing` are D-ths of a token, D the number of ranks: (token, expert) pairs
    that the busiest rank computes, and those computed by another rank than the token's own.
    """

    slowest: int
    crossing: int
    total: int
    num_ranks: int

    @property
    def cost(self) -> tuple[int, int]:
        """What copies are chosen by, less is better: the slowest device, then crossings."""
        return max(self.slowest, _balanced(self.total // self.num_ranks)), self.crossing

    @property
    def imbalance(self) -> float:
        """Load of the busiest device over the mean; 1.0 without any."""
        return self.slowest * self.num_ranks / self.total if self.total else 1.0

    @property
    def crossing_share(self) -> float:
        """Share of (token, expert) pairs that are computed on another device than the token's."""
        return self.crossing / self.total if self.total else 0.0


def _balanced(mean_load: int) -> int:
    """The most that a device may have in a balanced layer."""
    return mean_load * _BALANCED[0] // _BALANCED[1]


Holders = tuple[int, ...]  # ranks that have an expert, ascending


def computing_rank(source: int, expert_id: int, holders: Holders) -> int:
    """The rank that computes an expert for tokens of rank `source`: its own copy, or a fixed one.

    Ranks without a copy are dealt to the holders in turn, beginning with another one for each
    expert, so that no holder gets the odd rank of all of them. Without copies it is the home.
    """
    if source in holders:
        return source
    others_before = source - sum(holder < source for holder in holders)
    return holders[(others_before + expert_id) % len(holders)]


def choose_copies(
    heat: Heat, placement: Placement, num_copies: int, max_copies_per_device: int | None = None
) -> tuple[ExpertCopy, ...]:
    """The best found `num_copies` in each layer, by layer, expert and device.

    Fewer where there are no more places: each device holds an expert once, and at most
    `max_copies_per_device` copies a layer. One after the other goes to where the layer is best
    then, and afterwards they are exchanged while that helps. With as many copies as experts each
    expert gets one before any gets two, so that a lost device leaves all of them. A layer without
    heat gets none unless they are as many, since there is nothing to choose them by.
    """
    if num_copies < 0:
        raise PlanError(f"{num_copies} copies cannot be chosen; take 0 or more.")
    found = []
    for layer_id, tokens in sorted(heat.items()):
        layer = _Layer(tokens, placement, num_copies, max_copies_per_device)
        found += [
            ExpertCopy(layer_id, expert_id, placement.device_ids[rank])
            for expert_id, rank in layer.chosen()
        ]
    return tuple(found)


def holders_of(placement: Placement, copies: Sequence[ExpertCopy], layer_id: int) -> list[Holders]:
    """Of each expert id, the ranks that have it in a layer: its home's, and its copies'."""
    rank_of = {device_id: rank for rank, device_id in enumerate(placement.device_ids)}
    found = [{rank_of[home]} for home in placement.homes]
    for copy in copies:
        if copy.layer_id == layer_id:
            found[copy.expert_id].add(rank_of[copy.device_id])
    return [tuple(sorted(ranks)) for ranks in found]


def computed_for(source: int, rank: int, holders: Sequence[Holders]) -> list[int]:
    """Expert ids, ascending, that `rank` computes for tokens of rank `source`."""
    return [
        expert_id
        for expert_id, ranks in enumerate(holders)
        if computing_rank(source, expert_id, ranks) == rank
    ]


def layer_load(tokens: Sequence[int], holders: Sequence[Holders], num_ranks: int) -> LayerLoad:
    """What these holders make of a layer's heat: `tokens` by expert id."""
    loads = [0] * num_ranks
    for expert_id, (count, ranks) in enumerate(zip(tokens, holders, strict=True)):
        for rank, share in enumerate(_shares_of(expert_id, ranks, num_ranks)):
            loads[rank] += share * count
    crossing = sum(
        count * (num_ranks - len(ranks)) for count, ranks in zip(tokens, holders, strict=True)
    )
    return LayerLoad(max(loads), crossing, sum(tokens) * num_ranks, num_ranks)


def expert_load(heat: Heat, placement: Placement, copies: Sequence[ExpertCopy]) -> LayerLoad:
    """All layers one after the other: each takes as long as its busiest device."""
    num_ranks = placement.dp_size
    loads = [
        layer_load(tokens, holders_of(placement, copies, layer_id), num_ranks)
        for layer_id, tokens in heat.items()
    ]
    return LayerLoad(
        sum(load.slowest for load in loads),
        sum(load.crossing for load in loads),
        sum(load.total for load in loads),
        num_ranks,
    )


def not_copied(
    placement: Placement, copies: Sequence[ExpertCopy], layer_ids: Sequence[int], device_id: int
) -> int:
    """Experts, in all of these layers, that are nowhere else if the device is lost."""
    elsewhere = {(c.layer_id, c.expert_id) for c in copies if c.device_id != device_id}
    return sum(
        (layer_id, expert_id) not in elsewhere
        for layer_id, expert_id in product(layer_ids, placement.experts_of(device_id))
    )


def copies_by_layer(copies: Sequence[ExpertCopy], device_id: int) -> dict[int, tuple[int, ...]]:
    """Layer id -> expert ids, ascending, of which the device has a copy."""
    found: dict[int, list[int]] = {}
    for copy in copies:
        if copy.device_id == device_id:
            found.setdefault(copy.layer_id, []).append(copy.expert_id)
    return {layer_id: tuple(sorted(ids)) for layer_id, ids in sorted(found.items())}


def copy_pages(
    shape: MemoryShape,
    placement: Placement,
    copies: Sequence[ExpertCopy],
    adapters: Sequence[AdapterEntry],
    device_id: int,
) -> int:
    """Pages that a device takes for its copies, beside those of the experts whose home it is.

    The adapters' experts of the same ids are with them.
    """
    here = placement.experts_of(device_id)
    extra = copies_by_layer(copies, device_id)
    return sum(
        _pages(
            shape, region.layer_id, region.slot_bytes, (*here, *extra[region.layer_id]), adapters
        )
        - _pages(shape, region.layer_id, region.slot_bytes, here, adapters)
        for region in shape.of_kind(RegionKind.EXPERT)
        if region.layer_id in extra
    )


def most_copy_pages(
    shape: MemoryShape, copies_per_layer: int, adapters: Sequence[AdapterEntry]
) -> int:
    """Pages for so many copies a layer, of whichever experts, with the adapters' that go with them.

    An expert of S bytes touches at most one page more than S bytes have.
    """
    return sum(
        _most_slots(copies_per_layer, region.layer_id, adapters)
        * -(-(region.slot_bytes + shape.page_bytes - 1) // shape.page_bytes)
        for region in shape.of_kind(RegionKind.EXPERT)
    )


def _most_slots(num_copies: int, layer_id: int, adapters: Sequence[AdapterEntry]) -> int:
    """Slots of a layer's copies: hot experts are often those that all adapters replace."""
    replaced = (len(adapter.experts.get(layer_id, ())) for adapter in adapters)
    return num_copies + sum(min(num_copies, count) for count in replaced)


def most_per_device(num_copies: int) -> int:
    """Copies a layer that a device has room for: half of all, since two devices share them."""
    return -(-num_copies // 2)


def fitting_copies(
    shape: MemoryShape,
    placement: Placement,
    copies: Sequence[ExpertCopy],
    adapters: Sequence[AdapterEntry],
    free_pages: Mapping[int, int],
    heat: Heat,
) -> tuple[ExpertCopy, ...]:
    """The copies for which every device has pages; those of the fewest tokens are given up."""
    kept = sorted(copies, key=lambda copy: heat[copy.layer_id][copy.expert_id])
    for device_id in placement.device_ids:
        own = [copy for copy in kept if copy.device_id == device_id]
        while (
            own and copy_pages(shape, placement, own, adapters, device_id) > free_pages[device_id]
        ):
            kept.remove(own.pop(0))
    return tuple(sorted(kept))


def _pages(
    shape: MemoryShape,
    layer_id: int,
    slot_bytes: int,
    expert_ids: Sequence[int],
    adapters: Sequence[AdapterEntry],
) -> int:
    slots = expert_slots(shape, layer_id, expert_ids, adapters)
    return pages_of_slots(slots, slot_bytes, shape.page_bytes)


@lru_cache(maxsize=4096)
def _shares(turn: int, holders: Holders, num_ranks: int) -> tuple[int, ...]:
    """Of each rank, for how many source ranks it computes an expert whose id is `turn` mod k."""
    found = [computing_rank(source, turn, holders) for source in range(num_ranks)]
    return tuple(found.count(rank) for rank in range(num_ranks))


def _shares_of(expert_id: int, holders: Holders, num_ranks: int) -> tuple[int, ...]:
    return _shares(expert_id % len(holders), holders, num_ranks)


Place = tuple[int, int]  # expert id, rank that gets a copy


class _Layer:
    """One layer while its copies are chosen."""

    def __init__(
        self, tokens: Sequence[int], placement: Placement, num_copies: int, most: int | None
    ) -> None:
        self._tokens = tokens
        self._num_ranks = placement.dp_size
        self._covers_all = num_copies >= len(tokens)
        self._num_copies = num_copies if any(tokens) or self._covers_all else 0
        self._most = num_copies if most is None else most
        self._holders = holders_of(placement, (), 0)
        self._homes = [ranks[0] for ranks in self._holders]
        self._copies: set[Place] = set()
        self._num_on = [0] * self._num_ranks  # copies, by rank
        self._loads = [0] * self._num_ranks  # D-ths of a token, by rank
        self._crossing = 0
        self._least = _balanced(sum(tokens))  # D-ths: the mean is all tokens over D
        for expert_id in range(len(tokens)):
            self._count(expert_id, 1)

    def chosen(self) -> list[Place]:
        """(expert id, rank) of each copy, ascending: the better of two beginnings, bettered."""
        found = []
        for preference in (self._with, self._hotter):
            while len(self._copies) < self._num_copies and (places := list(self._free_places())):
                self._add(min(places, key=preference))
            for _ in range(_MAX_SWAPS):
                if not self._swap_for_the_better():
                    break
            found.append((self._now(), sorted(self._copies)))
            for place in found[-1][1]:
                self._remove(place)
        return min(found)[1]

    def _free_places(self) -> Iterator[Place]:
        """Where a copy may go: with copies for all, to experts that have the fewest so far."""
        fewest = min(map(len, self._holders))
        for expert_id, rank in product(range(len(self._tokens)), range(self._num_ranks)):
            holders = self._holders[expert_id]
            is_due = not self._covers_all or fewest > 1 or len(holders) == 1
            if is_due and rank not in holders and self._num_on[rank] < self._most:
                yield expert_id, rank

    def _swap_for_the_better(self) -> bool:
        """Give one copy up for the best one elsewhere, if the layer is better for it."""
        for old in sorted(self._copies):
            before = self._now()
            self._remove(old)
            best = min(self._free_places(), key=self._with)
            if self._with(best)[:2] < before:
                self._add(best)
                return True
            self._add(old)
        return False

    def _with(self, place: Place) -> tuple[int, int, int, int]:
        """How the layer would be with one more copy; places that are equally good, in order."""
        expert_id, rank = place
        holders, tokens = self._holders[expert_id], self._tokens[expert_id]
        before = _shares_of(expert_id, holders, self._num_ranks)
        after = _shares_of(expert_id, tuple(sorted((*holders, rank))), self._num_ranks)
        changes = zip(self._loads, before, after, strict=True)
        slowest = max(load + (more - less) * tokens for load, less, more in changes)
        return max(slowest, self._least), self._crossing - tokens, expert_id, rank

    def _hotter(self, place: Place) -> tuple[int, int, int]:
        """Hot experts first, to the devices that have least to do."""
        expert_id, rank = place
        return -self._tokens[expert_id], self._loads[rank], expert_id

    def _now(self) -> tuple[int, int]:
        return max(self._least, *self._loads), self._crossing

    def _add(self, place: Place) -> None:
        self._copies.add(place)
        self._num_on[place[1]] += 1
        self._set_holders(place[0])

    def _remove(self, place: Place) -> None:
        self._copies.remove(place)
        self._num_on[place[1]] -= 1
        self._set_holders(place[0])

    def _set_holders(self, expert_id: int) -> None:
        self._count(expert_id, -1)
        ranks = {rank for expert, rank in self._copies if expert == expert_id}
        self._holders[expert_id] = tuple(sorted({self._homes[expert_id], *ranks}))
        self._count(expert_id, 1)

    def _count(self, expert_id: int, sign: int) -> None:
        holders, tokens = self._holders[expert_id], self._tokens[expert_id]
        for rank, share in enumerate(_shares_of(expert_id, holders, self._num_ranks)):
            self._loads[rank] += sign * share * tokens
        self._crossing += sign * tokens * (self._num_ranks - len(holders))


# What the traffic was lately.
#
#     a rank's totals, every few seconds --> [RecentHeat.note] --> Heat, old tokens fading

_KEPT = (15, 16)  # of what was counted before, at each report that has traffic


class RecentHeat:
    """What ranks report as totals since they were attached, with former traffic fading.

    Copies chosen by the heat of other traffic balance nothing. Of one instance after the other:
    what the last one's traffic was stays until it fades.
    """

    def __init__(self) -> None:
        self._source = ""
        self._totals: Heat = {}
        self._recent: Heat = {}

    def note(self, source: str, totals: Heat) -> None:
        """A report of `source`, counted since it was attached. Fewer than before: attached anew."""
        has_begun_anew = source != self._source or _sum(totals) < _sum(self._totals)
        before = {} if has_begun_anew else self._totals
        self._source, self._totals = source, totals
        if _sum(totals) == _sum(before):
            return
        self._recent = {
            layer_id: _faded(self._recent.get(layer_id), before.get(layer_id), counts)
            for layer_id, counts in totals.items()
        }

    def recent(self) -> Heat:
        """Layer id -> tokens by expert id; empty before the first traffic."""
        return self._recent


def _faded(
    recent: Sequence[int] | None, before: Sequence[int] | None, counts: Sequence[int]
) -> list[int]:
    zeros = [0] * len(counts)
    rows = zip(recent or zeros, before or zeros, counts, strict=True)
    return [old * _KEPT[0] // _KEPT[1] + now - then for old, then, now in rows]


def _sum(heat: Heat) -> int:
    return sum(map(sum, heat.values()))
