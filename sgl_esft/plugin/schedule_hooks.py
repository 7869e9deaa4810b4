"""Adapter-aware batches: SGLang's waiting queue, put into the order of adapter_batching.py.

    SGLang: calc_priority -> [prefer_running_adapters] -> waiting_queue, reordered in place
                                                       -> SGLang admits from its front,
                                                          asking [hold_back_for_the_oldest]

Every rank of a tensor parallel group runs its scheduler in lockstep with the others; the order is
made from what all of them see alike: requests, adapters and the order they came in.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from sgl_esft.config import required_config
from sgl_esft.plugin import adapter_batching
from sgl_esft.plugin.adapter_batching import AdapterId, ArrivalBook, Waiting

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger(__name__)


def prefer_running_adapters(
    result: None,
    policy: Any,
    waiting_queue: list[Any],
    running_batch: Any = None,
    processed_tokens: int = 0,
) -> None:
    """After SGLang has ordered the queue first come, first served. Other orders stand."""
    composer = getattr(policy, "esft_composer", None)
    if composer is None:
        bound = max_overtakes_for(policy)
        slot_bound = required_config().slot_overtakes
        composer = policy.esft_composer = Composer(bound, _metrics(), slot_bound)
    composer.reorder(waiting_queue, () if running_batch is None else running_batch.reqs)


def hold_back_for_the_oldest(
    original: Callable[..., bool], scheduler: Any, req: Any, running_loras: set[str | None]
) -> bool:
    """Whether a waiting request may join the batch: SGLang's answer, and then ours."""
    if not original(scheduler, req, running_loras):
        return False
    from sgl_esft import sglang_api

    composer = getattr(scheduler.policy, "esft_composer", None)
    fits = sglang_api.adapter_manager(scheduler).validate_lora_batch
    return composer is None or adapter_batching.may_join(
        req.lora_id, running_loras, composer.next_adapter, fits
    )


def refuse_unknown_adapter(original: Callable[..., bool], scheduler: Any, req: Any) -> bool:
    """Whether a request may wait: SGLang's answer, if this rank has its adapter.

    A batch with an adapter that is not here would end the rank, and an engine that replaces it
    would be sent the same request.
    """
    from sgl_esft import sglang_api

    adapter_id = req.lora_id
    if adapter_id is None or sglang_api.adapter_manager(scheduler).has(adapter_id):
        return bool(original(scheduler, req))
    message = "UnknownAdapterError: the request's adapter is not loaded any more: ask again"
    sglang_api.reject_request(scheduler, req, message)
    return False


class Composer:
    """One scheduler's order, and what it has to remember from step to step."""

    def __init__(
        self,
        max_overtakes: int,
        metrics: BatchingMetrics | None,
        slot_overtakes: int = 0,
    ) -> None:
        """max_overtakes: 0 leaves every queue as it is. slot_overtakes: fewer are as many."""
        self._max_overtakes = max_overtakes
        self._slot_overtakes = max(max_overtakes, slot_overtakes)
        self._metrics = metrics
        self._book = ArrivalBook()
        self.next_adapter: AdapterId = None  # of a request that gets the next slot, if any

    def reorder(self, waiting_queue: list[Any], running: Any) -> None:
        """Put SGLang's `Req`s into the order to admit them in, in place.

        running: those of the running batch, finished ones among them.
        """
        if not self._max_overtakes:
            return
        num_running: Counter[AdapterId] = Counter(
            req.lora_id for req in running if not req.finished()
        )
        by_key = _by_key(waiting_queue)
        self._book.observe(list(by_key))
        requests, waiting = [], []
        for key, num_overtakes in self._book.by_arrival():
            requests.append(by_key[key])
            waiting.append(Waiting(by_key[key].lora_id, num_overtakes))
        order = adapter_batching.plan_order(waiting, num_running, self._max_overtakes)
        waiting_queue[:] = [requests[index] for index in order]
        is_next = bool(waiting) and waiting[0].num_overtakes >= self._slot_overtakes
        self.next_adapter = waiting[0].adapter_id if is_next else None
        if self._metrics is not None:
            self._metrics.set(self._book.num_admissions_that_overtook)


class BatchingMetrics:
    """What the order does, beside SGLang's own metrics at /metrics (with --enable-metrics)."""

    def __init__(self, rank: int, registry: CollectorRegistry | None = None) -> None:
        # SGLang names the folder that its processes share before it starts a rank, and
        # prometheus_client reads that name when it is imported.
        from prometheus_client import REGISTRY, Counter

        self._overtaking = Counter(
            "sgl_esft:overtaking_admissions",
            "Requests that left the waiting queue while an earlier one waited.",
            labelnames=("rank",),
            registry=registry or REGISTRY,
        ).labels(str(rank))
        self._num_published = 0

    def set(self, num_overtaking: int) -> None:
        """Publish how many requests have overtaken others so far."""
        self._overtaking.inc(num_overtaking - self._num_published)
        self._num_published = num_overtaking


def _by_key(queue: Sequence[Any]) -> dict[Hashable, Any]:
    """The queue's requests, each under a key that is alike on all ranks and as long as it waits.

    SGLang puts a retracted request at the queue's end, so it gets another key and arrives anew.
    """
    seen: Counter[Hashable] = Counter()
    found: dict[Hashable, Any] = {}
    for req in queue:
        name = (req.rid, req.retraction_count)
        found[*name, seen[name]] = req  # clients choose ids, so two may have one
        seen[name] += 1
    return found


def max_overtakes_for(policy: Any) -> int:
    """0 where the user chose another order than ours bounds."""
    if policy.policy.value == "fcfs" and not policy.enable_priority_scheduling:
        return required_config().max_overtakes
    logger.info(
        "Batches are not composed by adapter: --max-overtakes reorders first come, first served, "
        "and this server orders by %s%s.",
        policy.policy.value,
        " and priority" if policy.enable_priority_scheduling else "",
    )
    return 0


def _metrics() -> BatchingMetrics | None:
    from sgl_esft import sglang_api

    return BatchingMetrics(sglang_api.tp_rank()) if sglang_api.has_metrics() else None
