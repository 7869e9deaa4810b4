"""Copies of a live server: in which order they come and go, and what a failure costs."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from sgl_elastic.coordinator.expert_copies import Copies, RedundantExperts
from sgl_elastic.errors import EngineFailedError, MemoryWorkerError
from sgl_elastic.plan.redundancy import Heat, RecentHeat, most_per_device
from sgl_elastic.types import AdapterEntry, ExpertCopy, MemoryShape, Placement
from tests.fast.elastic.plan_samples import make_shape

TWO = Placement((0, 1), (0, 0, 0, 0, 1, 1, 1, 1), (10, 10))
HOT_FIRST = [1000, 1, 1, 1, 1, 1, 1, 1]
HOT_LAST = [1, 1, 1, 1, 1, 1, 1, 1000]


@dataclass
class Fake:
    """Memory and instances in one: what was asked, in order."""

    counted: Heat = field(default_factory=dict)
    placement: Placement = TWO
    free: int = 1000
    fails: str = ""
    loaded: tuple[AdapterEntry, ...] = ()
    calls: list[tuple[str, Copies]] = field(default_factory=list)

    def shape(self) -> MemoryShape:
        return make_shape(layers=(1,), adapters=(1, 1))

    def adapters(self) -> tuple[AdapterEntry, ...]:
        return self.loaded

    def free_pages(self, placement: Placement) -> dict[int, int]:
        return dict.fromkeys(placement.device_ids, self.free)

    def serving(self) -> tuple[str, Placement]:
        return "i1", self.placement

    def heat(self) -> Heat:
        return self.counted

    def place(self, placement: Placement, copies: Copies) -> int:
        self._note("map", copies)
        return 0

    def drop(self, placement: Placement, kept: Copies = ()) -> None:
        self._note("unmap all but", kept)

    def place_copies(self, copies: Copies) -> None:
        self._note("compute by", copies)

    def _note(self, what: str, copies: Copies) -> None:
        self.calls.append((what, copies))
        if what == self.fails:
            raise (EngineFailedError if what == "compute by" else MemoryWorkerError)("broken")


FIRST, LAST = (ExpertCopy(1, 0, 1),), (ExpertCopy(1, 7, 0),)


def test_nobody_computes_by_a_copy_that_is_not_there() -> None:
    fake = Fake({1: HOT_FIRST})
    copies = RedundantExperts(1, fake, fake)
    copies.renew()
    assert fake.calls == [("map", FIRST), ("compute by", FIRST)]
    fake.calls.clear()
    copies.renew()
    assert fake.calls == [], "they are the best already"
    fake.counted = {1: HOT_LAST}
    copies.renew()
    assert fake.calls == [
        ("compute by", ()),
        ("unmap all but", ()),
        ("map", LAST),
        ("compute by", LAST),
    ]
    fake.calls.clear()
    copies.drop()
    assert fake.calls == [("compute by", ()), ("unmap all but", ())]
    fake.calls.clear()
    copies.drop()
    assert fake.calls == []


def test_what_cannot_be_mapped_is_taken_back_and_is_no_copy() -> None:
    fake = Fake({1: HOT_FIRST}, fails="map")
    copies = RedundantExperts(1, fake, fake)
    copies.renew()  # logs
    assert fake.calls == [("map", FIRST), ("unmap all but", ())]
    assert copies.report()["devices"][1]["copies"] == 0
    fake.fails = ""
    copies.renew()
    assert copies.report()["devices"][1] == {"device_id": 1, "copies": 1, "experts_only_here": 4}


def test_a_scale_does_not_begin_while_ranks_may_compute_by_copies() -> None:
    fake = Fake({1: HOT_FIRST})
    copies = RedundantExperts(1, fake, fake)
    copies.renew()
    fake.fails = "compute by"
    with pytest.raises(EngineFailedError):
        copies.drop()
    assert fake.calls[-1][0] == "compute by", "their pages stay: ranks have them mapped"


@pytest.mark.parametrize(
    ("counted", "free", "why"),
    [
        ({}, 1000, "nothing is counted"),
        ({1: [10, 1, 1, 1, 1, 1, 1, 1]}, 1000, "too little is counted"),
        ({1: HOT_FIRST}, 0, "there is no room"),
    ],
)
def test_there_are_none_where(counted: Heat, free: int, why: str) -> None:
    fake = Fake(counted, free=free)
    RedundantExperts(1, fake, fake).renew()
    assert fake.calls == [], why


def test_all_experts_need_no_heat() -> None:
    fake = Fake()
    copies = RedundantExperts(8, fake, fake)
    copies.renew()
    assert [each["experts_only_here"] for each in copies.report()["devices"]] == [0, 0]


def test_it_is_due_when_other_copies_would_do_better() -> None:
    fake = Fake({})
    copies = RedundantExperts(1, fake, fake)
    assert not copies.is_due()
    fake.counted = {1: HOT_FIRST}
    assert copies.is_due()
    copies.renew()
    assert not copies.is_due()
    fake.counted = {1: [1000, 20, 1, 1, 1, 1, 1, 1]}
    assert not copies.is_due(), "not worth a stop"
    fake.counted = {1: HOT_LAST}
    assert copies.is_due()
    report = copies.report()
    assert report["imbalance"] == pytest.approx(2 * 1003.5 / 1007, abs=0.01)


def test_what_has_no_room_is_not_due_before_something_changes() -> None:
    """Each try is a scale, and stops the ranks."""
    fake = Fake({1: HOT_FIRST}, free=0)
    copies = RedundantExperts(1, fake, fake)
    assert copies.is_due()
    copies.renew()
    assert not copies.is_due()
    fake.loaded = (AdapterEntry("id", "a0", "/a0", 0, False, {1: (0,)}),)
    assert copies.is_due(), "adapters have changed"
    copies.renew()
    assert not copies.is_due()
    fake.placement = Placement((2, 3), (2, 2, 2, 2, 3, 3, 3, 3), (10, 10))
    assert copies.is_due(), "devices have changed"
    copies.renew()
    fake.counted = {1: HOT_LAST}
    assert copies.is_due(), "others are wanted"


def test_between_a_loss_and_its_end_former_copies_are_none() -> None:
    """Another placement serves already: copies were on a device that is gone, or are homes now."""
    fake = Fake({1: HOT_FIRST})
    copies = RedundantExperts(8, fake, fake)
    copies.renew()
    for left in (0, 1):
        fake.placement = Placement((left,), (left,) * 8, (10,))
        assert copies.report()["devices"] == [
            {"device_id": left, "copies": 0, "experts_only_here": 8}
        ]
        assert not copies.is_due(), "there is nobody to copy to"


def test_room_is_for_half_of_the_copies_on_a_device() -> None:
    assert [most_per_device(n) for n in (0, 1, 2, 5)] == [0, 1, 1, 3]


def test_heat_fades_and_outlives_the_instance() -> None:
    heat = RecentHeat()
    assert heat.recent() == {}
    heat.note("i1", {1: (160, 0)})
    assert heat.recent() == {1: [160, 0]}
    heat.note("i1", {1: (160, 0)})
    assert heat.recent() == {1: [160, 0]}, "nothing fades while nothing comes"
    heat.note("i1", {1: (160, 16)})
    assert heat.recent() == {1: [150, 16]}
    heat.note("i2", {1: (0, 0)})
    assert heat.recent() == {1: [150, 16]}, "the new instance's traffic will be the old one's"
    heat.note("i2", {1: (0, 32)})
    assert heat.recent() == {1: [140, 47]}
    heat.note("i2", {1: (16, 0)})  # attached anew
    assert heat.recent() == {1: [147, 44]}
