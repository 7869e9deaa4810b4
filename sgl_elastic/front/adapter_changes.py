"""Adapters stay as they are while a scale runs: loads and unloads wait for its end.

router.py --each message--> [AdapterChanges.defers] --True--> kept until [scaling(False)]
coordinator --defer-------> the change that is on its way to the ranks has ended
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sgl_elastic.coordinator.ports import Wire
from sgl_elastic.errors import BusyError

_POLL_S = 0.002
_LATELY_S = 600.0  # a change takes no longer


@dataclass
class AdapterChanges:
    """The changes that wait, and when the last one came.

    Safe from any thread; `lock` is its router's, whose `dispatch` gets what has waited.
    """

    wire: Wire
    lock: threading.RLock
    dispatch: Callable[[Any], None]
    clock: Callable[[], float] = time.monotonic
    _is_scaling: bool = False
    _last_s: float = -math.inf
    _deferred: deque[Any] = field(default_factory=deque)

    def defers(self, message: Any) -> bool:
        """Whether this message is a change that must wait; it is kept then."""
        if not self.wire.is_adapter_change(message):
            return False
        with self.lock:
            self._last_s = self.clock()
            if self._is_scaling:
                self._deferred.append(message)
            return self._is_scaling

    def defer(self, timeout_s: float, is_lost: Callable[[], bool] = lambda: False) -> bool:
        """Changes wait from now on; the one that is on its way to the ranks has ended.

        Returns whether there was one lately. Raises BusyError at the time-out: none waits then.
        `is_lost`: no rank will answer.
        """
        deadline = self.clock() + timeout_s
        self.scaling(True)
        while self._is_changing(is_lost):
            if self.clock() >= deadline:
                self.scaling(False)
                raise BusyError(
                    f"an adapter's change has not ended within {timeout_s:g} s: scale when it has"
                )
            time.sleep(_POLL_S)
        return self.clock() - self._last_s < _LATELY_S

    def _is_changing(self, is_lost: Callable[[], bool]) -> bool:
        """One change is asked for at a time: if it waits here, no rank has heard of it."""
        with self.lock:
            waits = bool(self._deferred) or is_lost()
        return not waits and self.wire.is_changing_adapters()

    def scaling(self, is_running: bool) -> None:
        """A scale begins or has ended."""
        with self.lock:
            self._is_scaling = is_running
            while not is_running and self._deferred:
                self.dispatch(self._deferred.popleft())
