"""The router: between SGLang's tokenizer manager and the ranks of whichever instance serves.

    TokenizerManager --dispatch--> [RequestRouter] --> its socket (instance_links.py)
    detokenizer --on_output--> [RequestRouter]   (in_flight.py: who runs where, what was sent)
    scale.py --hold, switch, release--> [RequestRouter]   (dispatcher.py: what is sent when)

A request whose instance goes away is sent again, under the same id, to the one that has taken over:
at once where it is handed over, one by one where its instance has died (quarantine.py). While the
instance that serves is lost, requests wait. Any thread may call anything.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sgl_elastic.autoscale.slo import Attainment, SloWindow
from sgl_elastic.coordinator.ports import Wire
from sgl_elastic.errors import EngineFailedError, SuspectRequestError
from sgl_elastic.front.adapter_changes import AdapterChanges
from sgl_elastic.front.dispatcher import Dispatcher, FrontListener
from sgl_elastic.front.in_flight import InFlight
from sgl_elastic.front.instance_links import InstanceLinks
from sgl_elastic.front.rank_choice import RankPolicy
from sgl_elastic.instance.handover import HandedOver
from sgl_elastic.instance.rank_messages import RequestState
from sgl_elastic.types import Placement

logger = logging.getLogger(__name__)

_OUTPUT_TIMEOUT_S = 2.0
_OUTPUT_POLL_S = 0.0005
_QUIET_S = 0.1  # so long after the last output of a dead instance none is on its way
_INTERVAL_S = 0.005  # between threads of one interpreter: Python's own
_HELD_INTERVAL_S = 0.0005  # the same while requests are held


class RequestRouter(InstanceLinks):
    """`Front` of coordinator/ports.py and `EngineLink` of instance/running.py."""

    def __init__(
        self,
        wire: Wire,
        window: SloWindow,
        *,
        policy: RankPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(wire, clock)
        self._window = window
        self._in_flight = InFlight(policy or RankPolicy(), window)
        self._dispatcher = Dispatcher(self, wire, self._in_flight, clock)
        self._changes = AdapterChanges(wire, self._lock, self.dispatch, clock)

    @property
    def table(self) -> tuple[str, Placement]:
        """The instance that requests go to, and its placement; one assignment at a switch.

        Raises IllegalTransitionError before `begin`.
        """
        return self._dispatcher.table

    def listen(self, listener: FrontListener) -> None:
        """In place of the one before."""
        with self._lock:
            self._dispatcher.listener = listener

    # ---- an instance that stops, or is lost ----

    def lose(self, instance: str) -> None:
        """Nothing goes to this instance any more; if it serves, requests wait for the next."""
        with self._lock:
            self._dispatcher.lose(instance)

    def states(self) -> list[tuple[int, RequestState]]:
        """(rank, state) of each request that has tokens, its instance being gone.

        Waits until its last outputs have come by: a token must not be computed a second time.
        Requests that ran on too many instances that ended are refused here.
        """
        began = self._clock()
        while self._clock() < min(
            max(began, self._in_flight.last_output_s) + _QUIET_S, began + _OUTPUT_TIMEOUT_S
        ):
            time.sleep(_QUIET_S / 4)
        with self._lock:
            for rid, num_deaths in self._dispatcher.bury().items():
                self._refuse(rid, num_deaths)
            return self._in_flight.states()

    def _refuse(self, rid: str, num_deaths: int) -> None:
        error = SuspectRequestError(
            f"{num_deaths} engine instances ended while they ran this request: it is not tried "
            "again. Look at its prompt, its parameters and its adapter; the server's log says how "
            "the instances ended"
        )
        logger.error("elastic: request %s is given up: %s", rid, error)
        self._wire.fail(rid, error)

    def wait_for_outputs(self, num_sent: Mapping[str, int]) -> None:
        """Until so many tokens of each request have come by: the detokenizer must see them first.

        Raises EngineFailedError when they do not come in time.
        """
        deadline = self._clock() + _OUTPUT_TIMEOUT_S
        while True:
            with self._lock:
                late = self._in_flight.late(num_sent)
            if not late:
                return
            if self._clock() >= deadline:
                raise EngineFailedError(f"outputs of {len(late)} requests have not arrived")
            time.sleep(_OUTPUT_POLL_S)

    def num_running(self) -> int:
        with self._lock:
            return self._in_flight.num_running

    def num_tokens(self) -> int:
        """Tokens of all requests in flight, prompts and answers."""
        with self._lock:
            return self._in_flight.num_tokens

    def attainment(self, now_s: float) -> Attainment:
        """How the window's requests met their targets."""
        with self._lock:
            return self._window.attainment(now_s)

    # ---- Front ----

    def begin(self, instance: str, placement: Placement) -> None:
        """The first instance serves."""
        with self._lock:
            self._dispatcher.begin(instance, placement)

    def hold(self) -> None:
        # The scale's thread and the links' take turns with the event loop, a hundred times in a
        # switch, and each turn may cost one interval.
        sys.setswitchinterval(_HELD_INTERVAL_S)
        with self._lock:
            self._dispatcher.hold()

    def switch(self, instance: str, placement: Placement, handover: HandedOver) -> None:
        """Requests go to `instance`, which has taken over: those in flight first."""
        with self._lock:
            self._dispatcher.switch(instance, placement, handover)

    def release(self) -> None:
        with self._lock:
            if self._dispatcher.release():
                sys.setswitchinterval(_INTERVAL_S)

    def defer_adapter_changes(self, timeout_s: float) -> bool:
        return self._changes.defer(timeout_s, lambda: self._dispatcher.is_lost)

    def scaling(self, is_running: bool) -> None:
        self._changes.scaling(is_running)

    # ---- requests ----

    def dispatch(self, message: Any) -> None:
        """What the tokenizer manager has for the scheduler."""
        with self._lock:
            self._dispatcher.forget_answered(message)
            if not self._changes.defers(message):
                self._dispatcher.submit(message)

    def on_output(
        self,
        rids: Sequence[str],
        finished: Sequence[Any],
        tokens: Sequence[int],
        output_ids: Sequence[Sequence[int]] = (),
    ) -> None:
        """Outputs have come back: tokens so far, whether the request is finished, new tokens."""
        with self._lock:
            new_ids = output_ids or [()] * len(rids)
            for rid, reason, num, ids in zip(rids, finished, tokens, new_ids, strict=True):
                self.note_warm(rid)
                now_s, is_finished = self._clock(), reason is not None
                self._in_flight.output(rid, ids, num, now_s, is_finished=is_finished)
                self._dispatcher.note_progress(rid, num, is_finished=is_finished)

    def on_abort(self, rid: str) -> None:
        """A request has ended without an output, in the queue of its rank."""
        with self._lock:
            self._in_flight.drop(rid)
            self._dispatcher.note_progress(rid, 0, is_finished=True)
