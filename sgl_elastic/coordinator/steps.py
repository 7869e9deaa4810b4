"""One step of a plan, done or taken back: by the memory, or by the rank that serves.

    scale.py --[Steps.do, .take_back]--> Memory.execute, .undo   all kinds but two
                                           '-> Instances.resize_kv     SHRINK_KV, GROW_KV

A rank that shrinks its KV first stops using it, then asks for its pages to be taken back. If the
memory worker hangs meanwhile nobody knows whether they are gone, so the rank goes on with less.
What it cannot be given again at once is pending: the next operation plans with it, and gives it
back before anything else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from sgl_elastic.coordinator.ports import Instances, Memory
from sgl_elastic.coordinator.progress import Progress
from sgl_elastic.errors import ElasticError
from sgl_elastic.types import Placement, Step, StepKind

ENGINE_STEPS = frozenset({StepKind.SHRINK_KV, StepKind.GROW_KV})


class Steps:
    """For one thread at a time, like its ports."""

    def __init__(self, memory: Memory, instances: Instances) -> None:
        self._memory = memory
        self._instances = instances
        self._pending_kv: dict[int, int] = {}  # KV capacity in tokens, by device

    def do(self, step: Step) -> int:
        """Returns the bytes that were copied. Raises StepFailedError."""
        if step.kind in ENGINE_STEPS:
            self._instances.resize_kv(step.device_id, step.num_tokens)
            return 0
        return self._memory.execute(step)

    def take_back(self, step: Step, old: Placement) -> None:
        """A step that failed, or was not done, too. Raises StepFailedError; KV is pending then."""
        if step.kind in ENGINE_STEPS:
            self._give_back(step.device_id, old.kv_tokens_of(step.device_id))
        else:
            self._memory.undo(step)

    def flush_pending(self) -> None:
        """Give back all that is pending. Raises StepFailedError while that is impossible."""
        for device_id, num_tokens in list(self._pending_kv.items()):
            self._give_back(device_id, num_tokens)

    def with_pending(self, placement: Placement) -> Placement:
        """What serves, as it is once all that is pending is given back."""
        tokens = zip(placement.device_ids, placement.kv_tokens, strict=True)
        return replace(placement, kv_tokens=tuple(self._pending_kv.get(d, n) for d, n in tokens))

    def forget_pending(self, device_ids: Iterable[int] | None = None) -> None:
        """These devices are lost; none named: another instance has come, with all of its KV."""
        for device_id in list(self._pending_kv) if device_ids is None else device_ids:
            self._pending_kv.pop(device_id, None)

    def _give_back(self, device_id: int, num_tokens: int) -> None:
        self._pending_kv[device_id] = num_tokens
        self._instances.resize_kv(device_id, num_tokens)
        del self._pending_kv[device_id]


# How long the coordinator waits, and how often it tries.

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RetryPolicy:
    """How often what cannot be taken back is tried, and how long a drain may take."""

    attempts: int = 4
    first_pause_s: float = 0.1  # doubled after each attempt
    drain_timeout_s: float = 30.0
    adapter_change_s: float = 5.0  # for an adapter's change that is on its way to the ranks
    drain_messages_s: float = 1.0  # for what the ranks have said

    def retry(self, act: Callable[[], None], sleep: Callable[[float], None]) -> None:
        """Try an action that is harmless to repeat. Raises the last attempt's error."""
        for attempt in range(self.attempts - 1):
            try:
                return act()
            except ElasticError as error:
                logger.warning("Attempt %d failed: %s", attempt + 1, error)
            sleep(self.first_pause_s * 2**attempt)
        return act()


# What follows a switch: it must happen, and is tried until it does.
#
# scale.py --> [PostSwitchTasks] --tasks, in order--> done, or kept for the next operation


@dataclass(frozen=True)
class Task:
    """Something that must happen after the switch; harmless to repeat."""

    phase: str
    act: Callable[[], None]


@dataclass
class PostSwitchTasks:
    """What an operation still has to do after its switch."""

    progress: Progress
    tasks: list[Task]
