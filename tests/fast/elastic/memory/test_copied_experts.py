"""Room for copies of experts on real workers, whichever experts are hot, and their content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from sgl_elastic.memory.control import Hmm
from sgl_elastic.memory.copied_experts import CopiedExperts
from sgl_elastic.memory.slots import expert_slots, trunk_slots
from sgl_elastic.plan.placement import place
from sgl_elastic.plan.redundancy import copy_pages, fitting_copies
from sgl_elastic.types import AdapterEntry, ExpertCopy, Placement, RegionKind
from tests.fast.elastic.memory_workers import ADAPTERS, PAGE, SHAPE, fill, hmm_of

KV_FOR_ALL = 100_000  # tokens, more than any device has room for: KV takes all that it may
KV_REGIONS = [
    replace(region, num_slots=KV_FOR_ALL) if region.kind is RegionKind.KV else region
    for region in SHAPE.regions
]
HUNGRY = replace(SHAPE, regions=tuple(KV_REGIONS))
ROOM = 140 * PAGE
EVEN_HEAT = {layer: [100] * SHAPE.num_experts for layer in (0, 1)}


def placed(hmm: Hmm, adapters: Sequence[AdapterEntry]) -> Placement:
    """Both devices full, but for what KV leaves; all experts have content at home."""
    hmm.set_adapters(tuple(adapters))
    devices = (0, 1)
    budgets = {device: hmm.budget_pages(device) - hmm.headroom_pages() for device in devices}
    found = place(hmm.shape(), devices, None, budgets, adapters)
    hmm.map_placement(found)
    for device in devices:
        experts = expert_slots(SHAPE, adapters, found.experts_of(device))
        fill(hmm, device, {**trunk_slots(SHAPE), **experts})
    return found


def largest(placement: Placement, adapters: Sequence[AdapterEntry]) -> tuple[ExpertCopy, ...]:
    """One copy a layer and device: of the expert that takes most pages with its adapters'."""

    def pages(copy: ExpertCopy) -> int:
        return copy_pages(HUNGRY, placement, [copy], adapters, copy.device_id)

    found = []
    for layer, device in product((0, 1), placement.device_ids):
        away = (e for e, home in enumerate(placement.homes) if home != device)
        found.append(max((ExpertCopy(layer, e, device) for e in away), key=pages))
    return tuple(sorted(found))


@pytest.mark.parametrize("reserve_pages", [0, 5, 40])
@pytest.mark.parametrize("num_adapters", [0, 1, 2])
def test_whichever_expert_is_hot_there_is_room_for_its_copy(
    tmp_path: Path, num_adapters: int, reserve_pages: int
) -> None:
    """An adapter's experts go with it, and were where KV would be if it left too little."""
    adapters = ADAPTERS[:num_adapters]
    with hmm_of(tmp_path, budget_bytes=ROOM, shape=HUNGRY, num_copies=1) as hmm:
        hmm.reserve_for_adapters(reserve_pages * PAGE)
        placement = placed(hmm, adapters)
        wanted = largest(placement, adapters)
        copied = CopiedExperts(hmm, 1, verify=True)
        free = copied.free_pages(placement)
        assert fitting_copies(HUNGRY, placement, wanted, adapters, free, EVEN_HEAT) == wanted
        assert copied.place(placement, wanted) > 0
        assert copied.place(placement, wanted) == 0, "they are there"


def test_an_adapter_that_comes_later_has_room_for_its_experts_at_copies(tmp_path: Path) -> None:
    with hmm_of(tmp_path, budget_bytes=ROOM, shape=HUNGRY, num_copies=1) as hmm:
        hmm.reserve_for_adapters(40 * PAGE)
        placement = placed(hmm, ())
        hmm.set_adapters(ADAPTERS)
        wanted = largest(placement, ADAPTERS)
        free = CopiedExperts(hmm, 1, verify=True).free_pages(placement)
        assert fitting_copies(HUNGRY, placement, wanted, ADAPTERS, free, EVEN_HEAT) == wanted
