"""The router: between SGLang's tokenizer manager and the ranks of whichever instance serves.

    TokenizerManager --dispatch--> [RequestRouter] --> the serving instance's socket
    detokenizer --on_output--> [RequestRouter]   (who runs where, what was sent)
    scale() --hold, pause, switch, release--> [RequestRouter]

It remembers each request as it was sent, and its tokens, so that a request whose instance goes
away is sent again, under the same id: the tokenizer manager, the detokenizer and the client see one
stream. While the instance that serves is lost, requests wait. Any thread may call anything.
"""

from __future__ import annotations

import copy
import logging
import math
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sgl_elastic.autoscale.slo import Attainment, SloWindow
from sgl_elastic.coordinator.ports import HandOver, Wire
from sgl_elastic.errors import BusyError, ElasticInternalError, EngineFailedError
from sgl_elastic.front.rank_choice import LoadBook, RankPolicy, choose
from sgl_elastic.front.routing import Routing
from sgl_elastic.instance.rank_messages import RequestState
from sgl_elastic.types import Placement

logger = logging.getLogger(__name__)

_OUTPUT_TIMEOUT_S = 2.0
_QUIET_S = 0.1  # so long after the last output of a dead instance none is on its way
_WARM_UP_POLL_S = 0.2
_SETTLE_POLL_S = 0.002
_LATELY_S = 600.0  # a change takes no longer
_INTERVAL_S = 0.005  # between threads of one interpreter: Python's own
_HELD_INTERVAL_S = 0.0005  # the same while requests are held


@dataclass
class _InFlight:
    """A request that has not been answered in full."""

    message: Any  # as it was sent, without a rank
    rank: int
    num_seen: int = 0  # tokens that came back
    output_ids: array[int] = field(default_factory=lambda: array("q"))  # those tokens


class RequestRouter:
    """`Front` of coordinator/ports.py and `EngineLink` of instance/manager.py."""

    def __init__(
        self,
        wire: Wire,
        *,
        handed_over: Callable[[], HandOver],
        on_switch: Callable[[Placement], None] = lambda _: None,
        wake: Callable[[str], None] = lambda _: None,
        go_on: Callable[[str], None] = lambda _: None,
        on_held: Callable[[float], None] = lambda _: None,
        policy: RankPolicy | None = None,
        window: SloWindow | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wire = wire
        self._handed_over = handed_over
        self._on_switch = on_switch
        self._wake = wake
        self._go_on = go_on
        self._on_held = on_held
        self._policy = policy or RankPolicy()
        self._window = window
        self._clock = clock
        self._lock = threading.RLock()
        self._sockets: dict[str, Any] = {}
        self._requests: dict[str, _InFlight] = {}
        self._held: deque[tuple[Any, float]] = deque()  # with when each came
        self._deferred: deque[Any] = deque()  # adapter changes while a scale runs
        self._asked: dict[type, Any] = {}  # control messages that ranks were sent, the last of each
        self._is_scaling = False
        self._last_change_s = -math.inf
        self._warmed: dict[str, threading.Event] = {}
        self._lost = ""  # the instance that requests may not be sent to
        self._last_output_s = 0.0
        self._book = LoadBook(1)
        self.routing = Routing()

    # ---- EngineLink: the way to each instance ----

    def connect(self, instance: str, input_ipc: str) -> None:
        with self._lock:
            self._sockets[instance] = self._wire.open(input_ipc)

    def disconnect(self, instance: str) -> None:
        with self._lock:
            socket = self._sockets.pop(instance, None)
            if socket is not None:
                self._wire.close(socket)

    def pause(self, instance: str) -> None:
        self._send(instance, self._wire.pause())

    def warm_up(self, instance: str, num_ranks: int, timeout_s: float) -> None:
        deadline = self._clock() + timeout_s
        for rank in range(num_ranks):
            rid = f"{instance}-{rank}-{id(self):x}"
            message = self._wire.warm_up(rid, rank)
            answered = self._warmed[message.rid] = threading.Event()
            self._send(instance, message)
            self._wait_for_warm_up(instance, rank, answered, deadline)
            self._warmed.pop(message.rid, None)

    def _wait_for_warm_up(
        self, instance: str, rank: int, answered: threading.Event, deadline: float
    ) -> None:
        while not answered.wait(min(max(deadline - self._clock(), 0), _WARM_UP_POLL_S)):
            if instance not in self._sockets:
                raise EngineFailedError(f"{instance} ended while it warmed up")
            if self._clock() >= deadline:
                raise EngineFailedError(f"rank {rank} of {instance} did not warm up in time")

    # ---- an instance that is lost ----

    def lose(self, instance: str) -> None:
        """Nothing goes to this instance any more; if it serves, requests wait for the next."""
        with self._lock:
            self._lost = instance
            if self.routing.table.instance_id == instance:
                self.routing.hold(self._clock())

    def states(self) -> list[tuple[int, RequestState]]:
        """(rank, state) of each request that has tokens, its instance being gone.

        Waits until its last outputs have come by: a token must not be computed a second time.
        """
        began = self._clock()
        while self._clock() < min(
            max(began, self._last_output_s) + _QUIET_S, began + _OUTPUT_TIMEOUT_S
        ):
            time.sleep(_QUIET_S / 4)
        with self._lock:
            return [
                (
                    request.rank,
                    RequestState(rid, request.output_ids.tobytes(), request.num_seen, {}, {}),
                )
                for rid, request in self._requests.items()
                if request.num_seen
            ]

    def wait_for_outputs(self, num_sent: Mapping[str, int]) -> None:
        """Until so many tokens of each request have come by: the detokenizer must see them first.

        Raises EngineFailedError when they do not come in time.
        """
        deadline = self._clock() + _OUTPUT_TIMEOUT_S
        while late := self._late(num_sent):
            if self._clock() >= deadline:
                raise EngineFailedError(f"outputs of {len(late)} requests have not arrived")
            time.sleep(0.0005)

    def _late(self, num_sent: Mapping[str, int]) -> list[str]:
        with self._lock:
            return [
                rid
                for rid, count in num_sent.items()
                if rid in self._requests and self._requests[rid].num_seen < count
            ]

    def num_running(self) -> int:
        with self._lock:
            return len(self._requests)

    def num_tokens(self) -> int:
        """Tokens of all requests in flight, prompts and answers."""
        with self._lock:
            return sum(load.num_tokens for load in self._book.snapshot())

    def attainment(self, now_s: float) -> Attainment:
        """How the window's requests met their targets. Raises ElasticInternalError without one."""
        if self._window is None:
            raise ElasticInternalError("the router has no SLO window")
        with self._lock:
            return self._window.attainment(now_s)

    # ---- Front ----

    def begin(self, instance: str, placement: Placement) -> None:
        """The first instance serves."""
        with self._lock:
            self._book = LoadBook(placement.dp_size, placement.kv_tokens)
            self.routing.swap(instance, placement, self._clock())
            self._on_switch(placement)

    def hold(self) -> None:
        # The scale's thread and the links' take turns with the event loop, a hundred times in a
        # switch, and each turn may cost one interval.
        sys.setswitchinterval(_HELD_INTERVAL_S)
        with self._lock:
            self.routing.hold(self._clock())

    def switch(self, instance: str, placement: Placement) -> None:
        """Requests go to `instance`, which has taken over: those in flight first; then it runs."""
        with self._lock:
            if self.routing.table.instance_id != instance:
                self._send_all(self._handed_over(), instance, placement)
        self._go_on(instance)

    def _send_all(self, handed: HandOver, instance: str, placement: Placement) -> None:
        moves = self._moves(handed, placement.dp_size)
        self._book.rebase(moves, placement.dp_size, placement.kv_tokens)
        self._on_switch(placement)
        self.routing.swap(instance, placement, self._clock())
        if self._lost and self._lost != instance:
            self._lost = ""
            self._ask_again()
        for rid, request in self._requests.items():
            request.rank = handed.ranks.get(rid, moves[request.rank])
            self._send_or_keep(instance, self._wire.with_rank(request.message, request.rank))

    def _moves(self, handed: HandOver, num_ranks: int) -> dict[int, int]:
        """Old rank -> new rank. Without KV, any rank may go on with any request."""
        if not self._lost:
            return dict(handed.rank_of_old)
        known = range(len(self._book.snapshot()))
        return {old: handed.rank_of_old.get(old, old % num_ranks) for old in known}

    def release(self) -> None:
        with self._lock:
            if self._lost == self.routing.table.instance_id:
                return  # a release follows its replacement's switch
            self.routing.release(self._clock())
            sys.setswitchinterval(_INTERVAL_S)
            while self._held and self.routing.held is None:
                message, since_s = self._held.popleft()
                self._route(message)
                self._on_held(self._clock() - since_s)

    # ---- adapters stay as they are while a scale runs ----

    def settle(self, timeout_s: float) -> bool:
        """Adapter changes wait from now on; the one that is on its way to the ranks has ended.

        Returns whether there was one lately. Raises BusyError at the time-out: none waits then.
        """
        deadline = self._clock() + timeout_s
        with self._lock:
            self._is_scaling = True
        while self._is_changing():
            if self._clock() >= deadline:
                self.scaling(False)
                raise BusyError(
                    f"an adapter's change has not ended within {timeout_s:g} s: scale when it has"
                )
            time.sleep(_SETTLE_POLL_S)
        return self._clock() - self._last_change_s < _LATELY_S

    def _is_changing(self) -> bool:
        """One change is asked for at a time: if it waits here, no rank has heard of it."""
        with self._lock:
            waits = bool(self._deferred or self._lost)
        return not waits and self._wire.is_changing_adapters()

    def scaling(self, is_running: bool) -> None:
        """A scale begins or has ended."""
        with self._lock:
            self._is_scaling = is_running
            while not is_running and self._deferred:
                self.dispatch(self._deferred.popleft())

    # ---- requests ----

    def dispatch(self, message: Any) -> None:
        """What the tokenizer manager has for the scheduler."""
        with self._lock:
            self._asked.pop(type(message), None)
            is_change = self._wire.is_adapter_change(message)
            if is_change:
                self._last_change_s = self._clock()
            if is_change and self._is_scaling:
                self._deferred.append(message)
            elif self.routing.held is not None:
                self._held.append((copy.copy(message), self._clock()))
            else:
                self._route(message)

    def on_output(
        self,
        rids: Sequence[str],
        finished: Sequence[Any],
        tokens: Sequence[int],
        output_ids: Sequence[Sequence[int]] = (),
    ) -> None:
        """Outputs have come back: tokens so far, whether the request is finished, new tokens."""
        with self._lock:
            for rid, new_ids in zip(rids, output_ids, strict=False):
                if rid in self._requests:
                    self._last_output_s = self._clock()
                    self._requests[rid].output_ids.extend(new_ids)
            for rid, reason, num_tokens in zip(rids, finished, tokens, strict=True):
                self._note_output(rid, reason is not None, num_tokens)

    def _note_output(self, rid: str, is_finished: bool, num_tokens: int) -> None:
        if rid in self._warmed:
            self._warmed[rid].set()
        request = self._requests.get(rid)
        if request is None:
            return
        now = self._clock()
        if self._window is not None and request.num_seen == 0 and num_tokens > 0:
            self._window.first_token(rid, now)
        request.num_seen = max(request.num_seen, num_tokens)
        if is_finished:
            del self._requests[rid]
            self._book.finish(rid)
            if self._window is not None:
                self._window.finished(rid, now, num_tokens)

    def _route(self, message: Any) -> None:
        instance = self.routing.table.instance_id
        if not self._requests:
            self._wake(instance)
        if self._wire.is_request(message):
            for request in self._wire.singles(message):
                self._send_or_keep(instance, self._admit(request))
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

    def _send_or_keep(self, instance: str, message: Any) -> bool:
        """False when the instance has ended: what was admitted goes to its replacement."""
        try:
            self._send(instance, message)
        except EngineFailedError as error:
            logger.warning("elastic: %s", error)
            self.lose(instance)
            return False
        return True

    def _admit(self, request: Any) -> Any:
        """Choose a rank, remember the request; returns what to send."""
        rank = self._choose_rank(request)
        self._requests[request.rid] = _InFlight(copy.copy(request), rank)
        self._book.add(request.rid, rank, request.lora_id, len(request.input_ids or ()))
        if self._window is not None:
            self._window.arrived(request.rid, self._clock())
        return self._wire.with_rank(request, rank)

    def _choose_rank(self, request: Any) -> int:
        wanted = request.routed_dp_rank
        num_ranks = self.routing.table.placement.dp_size
        if wanted is not None and 0 <= wanted < num_ranks:
            return int(wanted)
        return choose(
            self._book.snapshot(),
            request.lora_id,
            len(request.input_ids or ()),
            self._policy,
            turn=self._book.num_added,
        )

    def _send(self, instance: str, message: Any) -> None:
        with self._lock:
            socket = self._sockets.get(instance)
            if socket is None:
                raise EngineFailedError(f"there is no way to instance {instance}")
            self._wire.send(socket, message)
