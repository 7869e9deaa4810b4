"""The router: between SGLang's tokenizer manager and the ranks of whichever instance serves.

    TokenizerManager --dispatch--> [RequestRouter] --> its socket (instance_links.py)
    detokenizer --on_output--> [RequestRouter]   (in_flight.py: who runs where, what was sent)
    scale.py --hold, switch, release--> [RequestRouter]

A request whose instance goes away is sent again, under the same id, to the one that has taken over:
at once where it is handed over, one by one where its instance has died (quarantine.py). While the
instance that serves is lost, requests wait. Any thread may call anything.
"""

from __future__ import annotations

import copy
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sgl_elastic.autoscale.slo import Attainment, SloWindow
from sgl_elastic.coordinator.ports import Wire
from sgl_elastic.errors import EngineFailedError, IllegalTransitionError, SuspectRequestError
from sgl_elastic.front.adapter_changes import AdapterChanges
from sgl_elastic.front.in_flight import InFlight
from sgl_elastic.front.instance_links import InstanceLinks
from sgl_elastic.front.quarantine import Quarantine
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
        self._quarantine = Quarantine()
        self._changes = AdapterChanges(wire, self._lock, self.dispatch, clock)
        self._held: deque[tuple[Any, float]] = deque()  # with when each came
        self._asked: dict[type, Any] = {}  # control messages that ranks were sent, the last of each
        self._lost = ""  # the instance that requests may not be sent to
        self._on_size: Callable[[int], None] = lambda num_ranks: None
        self._on_held: Callable[[float], None] = lambda seconds: None
        self._on_given_up: Callable[[], None] = lambda: None
        self._table: tuple[str, Placement] | None = None
        self._is_held = False

    @property
    def table(self) -> tuple[str, Placement]:
        """The instance that requests go to, and its placement; one assignment at a switch.

        Raises IllegalTransitionError before `begin`.
        """
        if self._table is None:
            raise IllegalTransitionError("no instance serves yet: begin with the first one")
        return self._table

    def listen(
        self,
        on_size: Callable[[int], None],
        on_held: Callable[[float], None],
        on_given_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Of each switch `on_size` hears the number of ranks, before anything is sent to them.

        `on_held` hears how long each held message waited, in seconds; `on_given_up` of each request
        that is not tried again.
        """
        with self._lock:
            self._on_size, self._on_held, self._on_given_up = on_size, on_held, on_given_up

    # ---- an instance that stops, or is lost ----

    def lose(self, instance: str) -> None:
        """Nothing goes to this instance any more; if it serves, requests wait for the next."""
        with self._lock:
            self._lost = instance
            if self.table[0] == instance:
                self._is_held = True

    def states(self) -> list[tuple[int, RequestState]]:
        """(rank, state) of each request that has tokens, its instance being gone.

        Waits until its last outputs have come by: a token must not be computed a second time.
        """
        began = self._clock()
        while self._clock() < min(
            max(began, self._in_flight.last_output_s) + _QUIET_S, began + _OUTPUT_TIMEOUT_S
        ):
            time.sleep(_QUIET_S / 4)
        with self._lock:
            if self._lost == self.table[0]:
                for rid, num_deaths in self._quarantine.died().items():
                    self._give_up(rid, num_deaths)
            return self._in_flight.states()

    def _give_up(self, rid: str, num_deaths: int) -> None:
        self._in_flight.give_up(rid)
        error = SuspectRequestError(
            f"{num_deaths} engine instances ended while they ran this request: it is not tried "
            "again. Look at its prompt, its parameters and its adapter; the server's log says how "
            "the instances ended"
        )
        logger.error("elastic: request %s is given up: %s", rid, error)
        self._wire.fail(rid, error)
        self._on_given_up()

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
            self._in_flight.begin(placement)
            self._table = (instance, placement)

    def hold(self) -> None:
        # The scale's thread and the links' take turns with the event loop, a hundred times in a
        # switch, and each turn may cost one interval.
        sys.setswitchinterval(_HELD_INTERVAL_S)
        with self._lock:
            self._is_held = True

    def switch(self, instance: str, placement: Placement, handover: HandedOver) -> None:
        """Requests go to `instance`, which has taken over: those in flight first."""
        with self._lock:
            if self.table[0] == instance:
                return
            self._in_flight.move(handover, placement, has_kv=not self._lost)
            self._on_size(placement.dp_size)
            self._table = (instance, placement)
            if self._lost and self._lost != instance:
                self._lost = ""
                self._ask_again()
            ran = frozenset(self._quarantine.running)
            self._quarantine.handed_over()
            for rid, message, rank in self._in_flight.to_send():
                if rid in ran or self._quarantine.is_over:
                    self._send_request(rid, message, rank)

    def release(self) -> None:
        with self._lock:
            if self._lost == self.table[0]:
                return  # a release follows its replacement's switch
            self._is_held = False
            sys.setswitchinterval(_INTERVAL_S)
            self._go_on()

    def _go_on(self) -> None:
        """What waits is sent: the next suspect alone, and when there is none all the rest."""
        self._try_next()
        while self._held and self._may_route():
            message, since_s = self._held.popleft()
            self._route(message)
            self._on_held(self._clock() - since_s)

    def _try_next(self) -> None:
        while not self._is_held and (rid := self._quarantine.next()):
            message, rank, num_tokens = self._in_flight.find(rid)
            self.wake(self.table[0])
            if self._send_request(rid, message, rank):
                self._quarantine.begin(rid, num_tokens)
        running = self._quarantine.running
        for rid, message, rank in self._in_flight.to_send() if self._may_route() else ():
            if rid not in running:
                self._send_request(rid, message, rank)

    def _may_route(self) -> bool:
        return not self._is_held and self._quarantine.is_over

    def defer_adapter_changes(self, timeout_s: float) -> bool:
        return self._changes.defer(timeout_s, lambda: bool(self._lost))

    def scaling(self, is_running: bool) -> None:
        self._changes.scaling(is_running)

    # ---- requests ----

    def dispatch(self, message: Any) -> None:
        """What the tokenizer manager has for the scheduler."""
        with self._lock:
            self._asked.pop(type(message), None)
            if self._changes.defers(message):
                return
            if self._may_route():
                self._route(message)
            else:
                self._held.append((copy.copy(message), self._clock()))

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
                if self._quarantine.output(rid, num, is_finished=is_finished):
                    self._go_on()

    def _route(self, message: Any) -> None:
        instance, placement = self.table
        if self._in_flight.num_running == 0:
            self.wake(instance)
        if self._wire.is_request(message):
            for request in self._wire.singles(message):
                rank = self._in_flight.admit(request, placement.dp_size, self._clock())
                self._send_request(request.rid, request, rank)
            return
        # Every rank answers a control message. While it was held their number may have changed.
        self._wire.expect_answers(message)
        if self._send_or_keep(instance, message):
            self._asked[type(message)] = message
        else:
            self._held.append((message, self._clock()))

    def _ask_again(self) -> None:
        """Who waits for answers of ranks that are lost gets those of the ones that replace them."""
        unanswered = [asked for asked in self._asked.values() if self._wire.is_waiting(asked)]
        self._held.extendleft((message, self._clock()) for message in reversed(unanswered))
        self._asked.clear()

    def _send_request(self, rid: str, message: Any, rank: int) -> bool:
        is_sent = self._send_or_keep(self.table[0], self._wire.with_rank(message, rank))
        if is_sent:
            self._quarantine.sent(rid)
        return is_sent

    def _send_or_keep(self, instance: str, message: Any) -> bool:
        """False when the instance has ended: what was admitted goes to its replacement."""
        try:
            self.send(instance, message)
        except EngineFailedError as error:
            logger.warning("elastic: %s", error)
            self.lose(instance)
            return False
        return True
