"""The pure planner, asked about the memory there is.

request, placement --> [Planner] <-- memory.shape, adapters, budget_pages, lost, held
                          └--> plan/{request, placement, planner, loss, check} --> Plan
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sgl_elastic.coordinator.ports import Memory
from sgl_elastic.errors import DoesNotFitError
from sgl_elastic.plan.check import check
from sgl_elastic.plan.loss import Limits, Loss, candidates, plan_loss
from sgl_elastic.plan.placement import MIN_KV_TOKENS, place
from sgl_elastic.plan.planner import plan
from sgl_elastic.plan.request import resolve
from sgl_elastic.plan.text import describe
from sgl_elastic.types import READS, Placement, Plan, ScaleRequest


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
        budgets, for_kv = self._budgets({*device_ids, *old.device_ids})
        least = self._min_kv_tokens
        new = place(shape, device_ids, old, for_kv, adapters, self._kv_limit, min_kv_tokens=least)
        made = plan(old, new, shape, adapters, budgets, min_kv_tokens=least)
        check(made, shape, adapters, budgets)
        return made

    def make_loss_plan(self, old: Placement, *, is_serving: bool) -> Plan:
        """A checked plan for memory of `old` that is lost, on the first devices that can do it.

        Raises DoesNotFitError.
        """
        lost = self._memory.lost(old.device_ids)
        held = self._memory.held(d for d in old.device_ids if d not in lost)
        loss = Loss(lost, held, is_serving)
        first: DoesNotFitError | None = None
        for device_ids in candidates(old, loss, self._max_devices):
            try:
                return self._readable_plan(old, loss, device_ids)
            except DoesNotFitError as error:
                first = first or error
        raise first or DoesNotFitError(f"no device is left of {old.device_ids}")

    def _readable_plan(self, old: Placement, loss: Loss, device_ids: tuple[int, ...]) -> Plan:
        """Without adapters that would have to be read again and have changed."""
        made = self._plan_loss(old, loss, device_ids)
        reads = [e for step in made.before if step.kind in READS for e in step.expert_ids]
        if self._memory.drop_changed_adapters(reads):
            return self._plan_loss(old, loss, device_ids)
        return made

    def _plan_loss(self, old: Placement, loss: Loss, device_ids: tuple[int, ...]) -> Plan:
        shape, adapters = self._memory.shape(), self._memory.adapters()
        budgets, for_kv = self._budgets({*device_ids, *old.device_ids})
        limits = Limits(budgets, for_kv, self._kv_limit, self._min_kv_tokens)
        made = plan_loss(old, loss, device_ids, shape, adapters, limits)
        check(made, shape, adapters, budgets)
        return made

    def _budgets(self, device_ids: Iterable[int]) -> tuple[dict[int, int], dict[int, int]]:
        """Pages of each device, and what of them KV may take."""
        budgets = {each: self._memory.budget_pages(each) for each in sorted(device_ids)}
        headroom = self._headroom_pages()
        return budgets, {device_id: pages - headroom for device_id, pages in budgets.items()}

    def describe(self, made: Plan) -> dict[str, Any]:
        """The dry run's answer."""
        plan = dict(describe(made, self._memory.shape()))
        for device in plan["devices"]:
            node = self._node_of(device["device_id"])
            if node:
                device["node"] = node
        return plan
