"""The slot table does what a list and a dictionary would do, in every order of calls."""

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sgl_esft.errors import InvariantError, NoFreeSlotError
from sgl_esft.weave.slot_table import Placement, SlotTable

IDS = st.sampled_from("abcdefg")
PAGES = {name: size for size, name in enumerate("abcdefg")}


class Model:
    """What the table promises, written down the slow way."""

    def __init__(self, num_slots: int, max_pages: int | None) -> None:
        self.max_pages = max_pages
        self.slots: list[str | None] = [None] * num_slots
        self.oldest_first: list[str] = []
        self.pinned: set[str] = set()

    def fits(self, wanted: set[str], pinned: set[str] | None = None) -> bool:
        needed = wanted | (self.pinned if pinned is None else pinned)
        pages = sum(PAGES[name] for name in needed)
        has_pages = self.max_pages is None or pages <= self.max_pages
        return has_pages and len(needed) <= len(self.slots)

    def admit(self, wanted: set[str]) -> list[Placement]:
        newcomers = sorted(wanted - set(self.oldest_first))
        for name in sorted(wanted & set(self.oldest_first)):
            self.oldest_first.remove(name)
            self.oldest_first.append(name)
        return [self._enter(name, wanted) for name in newcomers]

    def _enter(self, name: str, wanted: set[str]) -> Placement:
        evicted = []
        while None not in self.slots or not self.fits({*self.oldest_first, name}, pinned=set()):
            stay = wanted | self.pinned
            victim = next(other for other in self.oldest_first if other not in stay)
            evicted.append(self.leave(victim))
        slot = evicted[0] if evicted else self.slots.index(None)
        self.slots[slot] = name
        self.oldest_first.append(name)
        return Placement(name, slot, tuple(evicted))

    def leave(self, name: str) -> int | None:
        if name not in self.oldest_first:
            return None
        self.oldest_first.remove(name)
        self.pinned.discard(name)
        slot = self.slots.index(name)
        self.slots[slot] = None
        return slot


def places(table: SlotTable) -> dict[str, int | None]:
    return {name: table.slot_of(name) for name in "abcdefg"}


class TableMachine(RuleBasedStateMachine):
    @initialize(num_slots=st.integers(1, 5), max_pages=st.none() | st.integers(0, 20))
    def start(self, num_slots: int, max_pages: int | None) -> None:
        self.model = Model(num_slots, max_pages)
        self.table = SlotTable(num_slots, max_pages, PAGES.__getitem__)
        self.twin = SlotTable(num_slots, max_pages, PAGES.__getitem__)

    @rule(wanted=st.lists(IDS, max_size=6))
    def admit(self, wanted: list[str]) -> None:
        assert self.table.can_admit(wanted) == self.model.fits(set(wanted))
        if not self.model.fits(set(wanted)):
            self.refused(wanted)
            return
        pinned_before = {name: self.table.slot_of(name) for name in self.model.pinned}
        placed = self.table.admit(wanted)
        assert placed == self.twin.admit(reversed(wanted)), "the order asked in decides nothing"
        assert placed == self.model.admit(set(wanted))
        assert all(self.table.slot_of(name) is not None for name in wanted)
        assert pinned_before.items() <= places(self.table).items()

    def refused(self, wanted: list[str]) -> None:
        before = places(self.table)
        with pytest.raises(NoFreeSlotError, match="--max-adapters"):
            self.table.admit(wanted)
        with pytest.raises(NoFreeSlotError):
            self.twin.admit(wanted)
        assert places(self.table) == before

    @precondition(lambda self: self.model.oldest_first)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.model.oldest_first))
        self.model.pinned.add(name)
        self.table.pin(name)
        self.twin.pin(name)

    @rule(name=IDS)
    def pin_absent(self, name: str) -> None:
        if name not in self.model.oldest_first:
            with pytest.raises(InvariantError, match=name):
                self.table.pin(name)

    @rule(name=IDS)
    def remove(self, name: str) -> None:
        expected = self.model.leave(name)
        assert self.table.remove(name) == expected
        assert self.twin.remove(name) == expected

    @rule(name=IDS)
    def has_room_for(self, name: str) -> None:
        needed = {*self.model.oldest_first, name}
        assert self.table.has_room_for(name) == self.model.fits(needed, pinned=set())

    @rule(wanted=st.sets(IDS))
    def evict_one(self, wanted: set[str]) -> None:
        stay = wanted | self.model.pinned
        victim = next((name for name in self.model.oldest_first if name not in stay), None)
        expected = None if victim is None else self.model.leave(victim)
        assert self.table.evict_one(wanted) == self.twin.evict_one(wanted) == expected

    @invariant()
    def agrees(self) -> None:
        expected = dict.fromkeys("abcdefg")
        expected |= {name: i for i, name in enumerate(self.model.slots) if name is not None}
        assert places(self.table) == places(self.twin) == expected
        assert self.table.num_free == self.model.slots.count(None)
        self.table.check_integrity()


TestTableMachine = TableMachine.TestCase


@pytest.mark.parametrize(
    "damage",
    [
        lambda table: table._slot_of.update(b=0),
        lambda table: table._slot_of.update(b=2),
        lambda table: table._slot_of.update(b=-1),
        lambda table: table._pinned.add("z"),
    ],
    ids=["shared", "too large", "negative", "pinned without a slot"],
)
def test_integrity_check_sees_damage(damage: Callable[[SlotTable], object]) -> None:
    table = SlotTable(2)
    table.admit("ab")
    table.check_integrity()
    damage(table)
    with pytest.raises(InvariantError):
        table.check_integrity()
