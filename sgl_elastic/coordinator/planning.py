"""The pure planner, asked about the memory there is.

request, placement --> [Planner] <-- memory.shape, adapters, budget_pages
                          └--> plan/{request, placement, planner, check} --> Plan
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_elastic.coordinator.ports import Memory
from sgl_elastic.plan.check import check
from sgl_elastic.plan.placement import MIN_KV_TOKENS, place
from sgl_elastic.plan.planner import plan
from sgl_elastic.plan.request import resolve
from sgl_elastic.plan.text import describe
from sgl_elastic.types import Placement, Plan, ScaleRequest


class Planner:
    """`make_plan` and `describe` of the coordinator, over the real memory.

    Devices are numbered 0 to `max_devices` - 1. `kv_limit` is the most KV tokens of a rank, None
    for all that fit; `min_kv_tokens` is what a rank must keep. `headroom_pages` is asked what KV
    leaves of a device to adapters that come later, `node_of` where a device is, "" on one machine.
    """

    def __init__(
        self,
        memory: Memory,
        max_devices: int,
        kv_limit: int | None = None,
        min_kv_tokens: int = MIN_KV_TOKENS,
        *,
        headroom_pages: Callable[[], int] = lambda: 0,
        node_of: Callable[[int], str] = lambda device_id: "",
    ) -> None:
        self._memory = memory
        self._headroom_pages = headroom_pages
        self._node_of = node_of
        self._max_devices = max_devices
        self._kv_limit = kv_limit
        self._min_kv_tokens = min_kv_tokens

    def make_plan(self, request: ScaleRequest, old: Placement) -> Plan:
        """A checked plan. Raises BadScaleError, DoesNotFitError, and PlanError for a defect."""
        device_ids = resolve(request, old, self._max_devices)
        shape, adapters = self._memory.shape(), self._memory.adapters()
        devices = sorted({*device_ids, *old.device_ids})
        budgets = {each: self._memory.budget_pages(each) for each in devices}
        least = self._min_kv_tokens
        headroom = self._headroom_pages()
        for_kv = {device_id: pages - headroom for device_id, pages in budgets.items()}
        new = place(shape, device_ids, old, for_kv, adapters, self._kv_limit, min_kv_tokens=least)
        made = plan(old, new, shape, adapters, budgets, min_kv_tokens=least)
        check(made, shape, adapters, budgets)
        return made

    def describe(self, made: Plan) -> dict[str, Any]:
        """The dry run's answer."""
        plan = dict(describe(made, self._memory.shape()))
        for device in plan["devices"]:
            node = self._node_of(device["device_id"])
            if node:
                device["node"] = node
        return plan
