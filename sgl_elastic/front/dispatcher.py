"""What the instance that serves is sent next, and what waits meanwhile.

    router.py --submit--> [Dispatcher] --> instance_links.py --> ranks
    router.py --lose, bury, switch, release--'    '--> what waits: a queue, and quarantine.py

All that comes is sent at once, unless requests are held, their instance is lost, or suspects are
tried: then it waits in the order of its coming. What ran on an instance is sent again to the one
that takes over: together where it is handed over, one by one where the former has died.

Not safe to share between threads: the router's lock guards it.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sgl_elastic.coordinator.ports import Wire
from sgl_elastic.errors import EngineFailedError, IllegalTransitionError
from sgl_elastic.front.in_flight import InFlight
from sgl_elastic.front.instance_links import InstanceLinks
from sgl_elastic.front.quarantine import Quarantine
from sgl_elastic.instance.handover import HandedOver
from sgl_elastic.types import Placement

logger = logging.getLogger(__name__)


def _ignore(_: float) -> None:
    pass


@dataclass(frozen=True)
class FrontListener:
    """Who hears of what the front does; called under its lock, so each is quick."""

    on_size: Callable[[int], None] = _ignore  # ranks, at a switch: before they are sent anything
    on_held: Callable[[float], None] = _ignore  # seconds that a held message has waited
    on_given_up: Callable[[], None] = lambda: None  # a request is not tried again


class Dispatcher:
    """`links` are the ways to the instances, `in_flight` what was sent and came back."""

    def __init__(
        self, links: InstanceLinks, wire: Wire, in_flight: InFlight, clock: Callable[[], float]
    ) -> None:
        self.listener = FrontListener()
        self._links = links
        self._wire = wire
        self._in_flight = in_flight
        self._clock = clock
        self._quarantine = Quarantine()
        self._held: deque[tuple[Any, float]] = deque()  # with when each came
        self._asked: dict[type, Any] = {}  # control messages that ranks were sent, the last of each
        self._lost = ""  # the instance that requests may not be sent to
        self._is_held = False
        self._table: tuple[str, Placement] | None = None

    @property
    def table(self) -> tuple[str, Placement]:
        """Raises IllegalTransitionError before `begin`."""
        if self._table is None:
            raise IllegalTransitionError("no instance serves yet: begin with the first one")
        return self._table

    @property
    def is_lost(self) -> bool:
        """Whether an instance is lost whose replacement does not serve yet."""
        return bool(self._lost)

    # ---- which instance serves ----

    def begin(self, instance: str, placement: Placement) -> None:
        """The first one does."""
        self._in_flight.begin(placement)
        self._table = (instance, placement)

    def lose(self, instance: str) -> None:
        """Nothing goes there any more; if it serves, everything waits for the next."""
        self._lost = instance
        if self.table[0] == instance:
            self._is_held = True

    def bury(self) -> Mapping[str, int]:
        """If the instance that serves is lost, what ran there is under suspicion from now on.

        Returns those that are not tried again, with the instances that ended while they ran. A
        second time nothing runs there.
        """
        given_up = self._quarantine.died() if self._lost == self.table[0] else {}
        for rid in given_up:
            self._in_flight.drop(rid)
            self.listener.on_given_up()
        return given_up

    def hold(self) -> None:
        """From now on everything waits."""
        self._is_held = True

    def switch(self, instance: str, placement: Placement, handover: HandedOver) -> None:
        """`instance` has taken over, and is sent what ran. Nothing when it serves already."""
        if self.table[0] == instance:
            return
        self._in_flight.move(handover, placement, has_kv=not self._lost)
        self.listener.on_size(placement.dp_size)
        self._table = (instance, placement)
        if self._lost and self._lost != instance:
            self._lost = ""
            self._ask_again()
        ran = self._quarantine.running
        self._quarantine.handed_over()
        for rid, message, rank in self._in_flight.to_send():
            if rid in ran or self._quarantine.is_over:
                self._send_request(rid, message, rank)

    def release(self) -> bool:
        """What waits is sent; False while the instance that serves is lost."""
        if self._lost == self.table[0]:
            return False  # another release follows its replacement's switch
        self._is_held = False
        self._go_on()
        return True

    # ---- what comes, and what came back ----

    def forget_answered(self, message: Any) -> None:
        """Who asks anew has had the answer to the last message of this kind."""
        self._asked.pop(type(message), None)

    def submit(self, message: Any) -> None:
        """Sent now, or as soon as it may be."""
        if self._may_send():
            self._send_new(message)
        else:
            self._held.append((copy.copy(message), self._clock()))

    def note_progress(self, rid: str, num_tokens: int, *, is_finished: bool) -> None:
        """A request has so many tokens by now: that may end its trial."""
        if self._quarantine.output(rid, num_tokens, is_finished=is_finished):
            self._go_on()

    # ---- sending ----

    def _may_send(self) -> bool:
        return not self._is_held and self._quarantine.is_over

    def _go_on(self) -> None:
        """The next suspect is sent alone; when there is none, all the rest."""
        self._try_next()
        while self._held and self._may_send():
            message, since_s = self._held.popleft()
            self._send_new(message)
            self.listener.on_held(self._clock() - since_s)

    def _try_next(self) -> None:
        while not self._is_held and (rid := self._quarantine.next()):
            message, rank, num_tokens = self._in_flight.find(rid)
            self._links.wake(self.table[0])
            if self._send_request(rid, message, rank):
                self._quarantine.begin(rid, num_tokens)
        running = self._quarantine.running
        for rid, message, rank in self._in_flight.to_send() if self._may_send() else ():
            if rid not in running:
                self._send_request(rid, message, rank)

    def _send_new(self, message: Any) -> None:
        instance, placement = self.table
        if self._in_flight.num_running == 0:
            self._links.wake(instance)
        if self._wire.is_request(message):
            for request in self._wire.singles(message):
                rank = self._in_flight.admit(request, placement.dp_size, self._clock())
                self._send_request(request.rid, request, rank)
            return
        # Every rank answers a control message. While it was held their number may have changed.
        self._wire.expect_answers(message)
        if self._reaches(instance, message):
            self._asked[type(message)] = message
        else:
            self._held.append((message, self._clock()))

    def _ask_again(self) -> None:
        """Who waits for answers of ranks that are lost gets those of the ones that replace them."""
        unanswered = [asked for asked in self._asked.values() if self._wire.is_waiting(asked)]
        self._held.extendleft((message, self._clock()) for message in reversed(unanswered))
        self._asked.clear()

    def _send_request(self, rid: str, message: Any, rank: int) -> bool:
        is_sent = self._reaches(self.table[0], self._wire.with_rank(message, rank))
        if is_sent:
            self._quarantine.sent(rid)
        return is_sent

    def _reaches(self, instance: str, message: Any) -> bool:
        """False when the instance has ended: what was admitted goes to its replacement."""
        try:
            self._links.send(instance, message)
        except EngineFailedError as error:
            logger.warning("elastic: %s", error)
            self.lose(instance)
            return False
        return True
