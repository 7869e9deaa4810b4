"""Sleep of an idle rank that others can end.

    front --Wake--> rank's channel --> [WakefulSleeper] <-- SGLang's loop, when there is no batch

Under DP attention the ranks step together, but each sleeps by its own sockets: a request for one
rank would wait up to a second until the others wake. The front wakes them all, and whoever was
woken stays awake until the request has arrived where it is meant to.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

AWAKE_S = 0.1  # after a wake; more than a request takes through SGLang's controller
SLEEP_MS = 1000


class WakefulSleeper:
    """Has the face of SGLang's IdleSleeper."""

    def __init__(
        self, poller: zmq.Poller, descriptor: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        poller.register(descriptor, zmq.POLLIN)
        self.poller = poller
        self._clock = clock
        self._awake_until_s = 0.0

    def stay_awake(self) -> None:
        """Something is about to arrive, here or at another rank."""
        self._awake_until_s = self._clock() + AWAKE_S

    def maybe_sleep(self) -> None:
        """Until something arrives, a second at most; not at all shortly after a wake."""
        if self._clock() >= self._awake_until_s:
            self.poller.poll(SLEEP_MS)
