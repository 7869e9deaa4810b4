"""Horizontal scaling: a second, whole replica beside the first, and requests for both.

    scale up:   memory, weights from disk --> replica runs --> [switch]: new requests go to either
    scale down: [narrow]: new ones go to the first --> wait for the second's --> it ends

The replicas look like one instance, named `first+second`: ranks 0 to N - 1 are the first's, N to
2 N - 1 the second's. They share nothing. A replica that dies is not replaced; this is a baseline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sgl_elastic.autoscale.slo import Attainment, SloWindow
from sgl_elastic.baselines.plans import map_steps
from sgl_elastic.baselines.strategies import ScaleStrategy, check_strategy
from sgl_elastic.coordinator.ports import Memory, Wire
from sgl_elastic.coordinator.scale import Scaling
from sgl_elastic.coordinator.steps import Task
from sgl_elastic.errors import BadScaleError, EngineFailedError
from sgl_elastic.front.adapter_changes import AdapterChanges
from sgl_elastic.front.dispatcher import FrontListener
from sgl_elastic.front.router import RequestRouter
from sgl_elastic.instance.handover import HandedOver
from sgl_elastic.instance.manager import InstanceManager
from sgl_elastic.instance.rank_messages import RequestState
from sgl_elastic.plan.replay import peak_and_final_pages
from sgl_elastic.types import Placement, Plan, ScaleRequest, Step, StepKind

_ATTEMPT_S = 60.0  # to wait for the second replica's requests, each of the coordinator's attempts
_POLL_S = 0.01


@dataclass(frozen=True)
class ReplicaPlanner:
    """Twice as many devices, or half of them again."""

    memory: Memory
    max_devices: int

    def make_plan(self, request: ScaleRequest, old: Placement) -> Plan:
        """Raises BadScaleError."""
        first, second = parts(old)
        if request.dp_size == old.dp_size and not request.device_ids:
            return Plan(old, old, (), (), {}, {})
        check_strategy(ScaleStrategy.HORIZONTAL, old.dp_size, request.dp_size, self.max_devices)
        if request.device_ids or request.leave:
            raise BadScaleError("horizontal scaling chooses its devices itself: name only dp_size")
        if request.dp_size < old.dp_size:
            return self._down(old, first, second)
        return self._up(old, second)

    def _up(self, old: Placement, second: Placement | None) -> Plan:
        if second is not None:
            raise BadScaleError("there are two replicas and can be no more: halve them first")
        free = [d for d in range(self.max_devices) if d not in old.device_ids]
        replica = replica_on(free[: old.dp_size], old)
        steps = tuple(map_steps(replica))
        peak, final = self._pages(old, steps)
        return Plan(old, both(old, replica), steps, (), peak, final)

    def _down(self, old: Placement, first: Placement, second: Placement | None) -> Plan:
        if second is None:
            raise BadScaleError(
                f"one replica of {old.dp_size} devices cannot be halved: it can only be doubled"
            )
        steps = tuple(Step(StepKind.REMOVE_DEVICE, device) for device in second.device_ids)
        peak, final = self._pages(second, steps)
        stays, _ = self._pages(first, ())
        return Plan(old, first, (), steps, {**stays, **peak}, {**stays, **final})

    def _pages(
        self, placement: Placement, steps: Sequence[Step]
    ) -> tuple[dict[int, int], dict[int, int]]:
        shape, adapters = self.memory.shape(), self.memory.adapters()
        return peak_and_final_pages(shape, adapters, placement, steps)


@dataclass(frozen=True)
class HorizontalScale:
    """`CarryOut` that adds and takes away a replica; nothing is ever held."""

    front: ReplicaRouter

    def __call__(self, scaling: Scaling, plan: Plan) -> None:
        """Raises what stopped it; a replica that does not come up is taken back."""
        if plan.before:
            self._grow(scaling, plan)
        else:
            self._shrink(scaling, plan)

    def _grow(self, scaling: Scaling, plan: Plan) -> None:
        _, replica = parts(plan.new)
        if replica is None:
            raise BadScaleError(f"{plan.new.device_ids} are not two replicas")
        scaling.map_memory(plan)
        new = scaling.prepare(replica)
        scaling.progress.enter("switch")
        scaling.instances.start_serving(new)
        scaling.finish(self._switch(scaling, f"{scaling.old}+{new}", plan.new))

    def _shrink(self, scaling: Scaling, plan: Plan) -> None:
        first, _, second = scaling.old.partition("+")
        scaling.finish(
            [
                Task("drain", partial(self.front.narrow, _ATTEMPT_S)),
                *self._switch(scaling, first, plan.new),
                Task("retire", partial(scaling.instances.retire, second)),
                *scaling.step_tasks("after", plan),
            ]
        )

    def _switch(self, scaling: Scaling, name: str, placement: Placement) -> list[Task]:
        executor = scaling.executor
        return [
            Task("switch", partial(executor.front.switch, name, placement, HandedOver({}, {}))),
            Task("switch", partial(executor.note_serving, name, placement)),
        ]


class Replicas:
    """`Instances` of the coordinator, and what its watchdog watches: a second one may serve too."""

    def __init__(self, manager: InstanceManager) -> None:
        self._manager = manager
        self._second = ""
        self.prepare, self.cancel = manager.prepare, manager.cancel
        self.num_read = manager.num_read
        self.freeze, self.resume, self.drain = manager.freeze, manager.resume, manager.drain
        self.activate, self.resize_kv = manager.activate, manager.resize_kv
        self.drain_messages, self.check = manager.drain_messages, manager.check

    def serving(self) -> tuple[str, Placement]:
        name, first = self._manager.serving()
        for each in self._manager.instances():
            if each.instance_id == self._second and each.placement is not None:
                return f"{name}+{self._second}", both(first, each.placement)
        return name, first

    def is_lost(self) -> bool:
        return False  # a baseline: what dies is not replaced

    def start_serving(self, instance: str) -> None:
        """A prepared replica runs beside the first."""
        self._manager.start_serving(instance)
        self._second = instance

    def retire(self, instance: str) -> None:
        """The second replica ends; harmless a second time."""
        self._manager.stop(instance)
        self._second = ""


class ReplicaRouter:
    """A RequestRouter for each replica: `Front`, and the way to every instance.

        dispatch --> [ReplicaRouter] --> the first replica's router: ranks 0 to N - 1
                                    '--> the second's: ranks N to 2 N - 1

    Who serves is in `_serving`. What is no request goes to all that serve.
    """

    def __init__(
        self, wire: Wire, make_router: Callable[[], RequestRouter], window: SloWindow
    ) -> None:
        self._wire = wire
        self._make_router = make_router
        self._window = window
        self._lock = threading.RLock()
        self._routers: dict[str, RequestRouter] = {}  # of all instances
        self._serving: Mapping[str, RequestRouter] = {}  # never changed, but for another
        self._num_open = 1  # replicas that new requests may go to
        self._listener = FrontListener()
        changes = AdapterChanges(wire, self._lock, self.dispatch)
        self.defer_adapter_changes, self.scaling = changes.defer, changes.scaling
        self._defers = changes.defers

    def listen(self, listener: FrontListener) -> None:
        """As a RequestRouter's; nothing is ever held, and what dies is not replaced."""
        self._listener = listener

    # ---- EngineLink ----

    def connect(self, instance: str, input_ipc: str, wake: Callable[[], None]) -> None:
        router = self._make_router()
        router.connect(instance, input_ipc, wake)
        with self._lock:
            self._routers[instance] = router

    def disconnect(self, instance: str) -> None:
        with self._lock:
            self._serving = {n: r for n, r in self._serving.items() if n != instance}
            router = self._routers.pop(instance, None)
        if router is not None:
            router.disconnect(instance)

    def pause(self, instance: str) -> None:
        self._routers[instance].pause(instance)

    def warm_up(self, instance: str, num_ranks: int, timeout_s: float) -> None:
        self._routers[instance].warm_up(instance, num_ranks, timeout_s)

    def lose(self, instance: str) -> None:
        if instance in self._serving:
            self._serving[instance].lose(instance)

    def states(self) -> list[tuple[int, RequestState]]:
        return [state for router in self._serving.values() for state in router.states()]

    def wait_for_outputs(self, num_sent: Mapping[str, int]) -> None:
        for router in self._serving.values():
            router.wait_for_outputs(num_sent)

    def num_running(self) -> int:
        return sum(router.num_running() for router in self._serving.values())

    def num_tokens(self) -> int:
        """Tokens of all requests in flight, prompts and answers."""
        return sum(router.num_tokens() for router in self._serving.values())

    def attainment(self, now_s: float) -> Attainment:
        """How the window's requests met their targets."""
        with self._lock:
            return self._window.attainment(now_s)

    # ---- Front ----

    def begin(self, instance: str, placement: Placement) -> None:
        """The first instance serves."""
        with self._lock:
            self._routers[instance].begin(instance, placement)
            self._serving = {**self._serving, instance: self._routers[instance]}

    def hold(self) -> None:
        for router in self._serving.values():
            router.hold()

    def release(self) -> None:
        for router in self._serving.values():
            router.release()

    def switch(self, group: str, placement: Placement, handover: HandedOver) -> None:
        """Requests go to the replicas of `group`; those that run stay where they are."""
        names = group.split("+")
        with self._lock:
            if names == list(self._serving):
                return
            pieces = zip(names, parts(placement), strict=False)
            for name, piece in pieces:
                if name not in self._serving and piece is not None:
                    self.begin(name, piece)
            self._serving = {name: self._serving[name] for name in names}
            self._num_open = len(names)
            self._window.forget_finished()
            self._listener.on_size(placement.dp_size)

    def narrow(self, timeout_s: float) -> None:
        """New requests go to the first replica; returns when the second has none left.

        Raises EngineFailedError at the time-out; new requests then still go to the first.
        """
        with self._lock:
            self._num_open = 1
        deadline = time.monotonic() + timeout_s
        while any(router.num_running() for router in list(self._serving.values())[1:]):
            if time.monotonic() > deadline:
                raise EngineFailedError(f"the second replica still runs after {timeout_s:g} s")
            time.sleep(_POLL_S)

    # ---- requests ----

    def dispatch(self, message: Any) -> None:
        """What the tokenizer manager has for the scheduler."""
        with self._lock:
            if self._defers(message):
                return
            if not self._wire.is_request(message):
                for router in self._serving.values():
                    router.dispatch(message)
                return
            for request in self._wire.singles(message):
                members = list(self._serving.values())[: self._num_open]
                router, routed = _replica_for(request, members, self._wire)
                router.dispatch(routed)

    def on_output(self, rids: Sequence[str], *outputs: Any) -> None:
        """Outputs have come back; a router passes over what is not its own."""
        with self._lock:
            for router in self._routers.values():
                router.on_output(rids, *outputs)

    def on_abort(self, rid: str) -> None:
        """A request has ended without an output; a router passes over what is not its own."""
        with self._lock:
            for router in self._routers.values():
                router.on_abort(rid)


def _replica_for(
    request: Any, members: Sequence[RequestRouter], wire: Wire
) -> tuple[RequestRouter, Any]:
    """That of the rank which the client wants, by its own number there, or the least busy one."""
    wanted = request.routed_dp_rank
    if wanted is None:
        return min(members, key=lambda router: router.num_running()), request
    _, placement = members[0].table
    replica, rank = divmod(wanted, placement.dp_size)
    return members[replica % len(members)], wire.with_rank(request, rank)


# Two replicas of a model as one placement, and back.
#
# first, second --> [both] --> Placement --> [parts] --> first, second


def both(first: Placement, second: Placement) -> Placement:
    """Two replicas as one placement. `homes` are the first's."""
    return Placement(
        (*first.device_ids, *second.device_ids), first.homes, (*first.kv_tokens, *second.kv_tokens)
    )


def parts(placement: Placement) -> tuple[Placement, Placement | None]:
    """The first replica, and the second where there is one.

    Homes say which: a placement of one replica has experts on all of its devices.
    """
    num_ranks = placement.dp_size // 2
    if any(home in placement.device_ids[num_ranks:] for home in placement.homes):
        return placement, None
    first = Placement(
        placement.device_ids[:num_ranks], placement.homes, placement.kv_tokens[:num_ranks]
    )
    return first, replica_on(placement.device_ids[num_ranks:], first)


def replica_on(device_ids: Sequence[int], first: Placement) -> Placement:
    """The same layout on as many other devices, rank by rank."""
    twins = dict(zip(first.device_ids, device_ids, strict=True))
    homes = tuple(twins[home] for home in first.homes)
    return Placement(tuple(device_ids), homes, first.kv_tokens)
