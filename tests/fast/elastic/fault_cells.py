"""A scale of real memory workers by the real coordinator, and the faults that can meet its steps.

[MemoryScale] --> Coordinator --> Hmm --> worker processes   (instances and front are fakes)
[Fault] --inject, at a step--> signals, limits, budgets, memory_proxy.py before a worker
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from sgl_elastic.coordinator.coordinator import Coordinator
from sgl_elastic.coordinator.operations import Operation
from sgl_elastic.coordinator.steps import RetryPolicy
from sgl_elastic.errors import MemoryWorkerError
from sgl_elastic.memory.client import DeviceClient
from sgl_elastic.memory.control import Hmm
from sgl_elastic.memory.runs import Slots, subtract
from sgl_elastic.processes import is_stopped
from sgl_elastic.types import Placement, Plan, ScaleRequest, Step, StepKind
from tests.fast.elastic.memory.test_control import OLD as ONE
from tests.fast.elastic.memory.test_control import SCALE_UP, content, in_use
from tests.fast.elastic.memory_proxy import PAGES, Proxy
from tests.fast.elastic.memory_workers import ADAPTERS, SHAPE, count_fds, fill, hmm_of, settle
from tests.fast.elastic.scale_fakes import World

MOVING = (4, 5, 6, 7)
TWO = Placement((0, 1), (0, 0, 0, 0, 1, 1, 1, 1), (40, 60))
UP = Plan(ONE, TWO, SCALE_UP, (Step(StepKind.UNMAP_EXPERTS, 0, expert_ids=MOVING),), {}, {}, {})
DOWN = Plan(
    TWO,
    ONE,
    (
        Step(StepKind.MAP_EXPERTS, 0, expert_ids=MOVING),
        Step(StepKind.COPY_EXPERTS, 0, source_id=1, expert_ids=MOVING),
    ),
    (Step(StepKind.REMOVE_DEVICE, 1),),
    {},
    {},
    {1: 0},
)
PLANS = {"up": UP, "down": DOWN}
Inject = Callable[[], None]


def plan_for(request: ScaleRequest, old: Placement) -> Plan:
    """Up or down, or nothing where that many devices serve already."""
    if request.dp_size == old.dp_size:
        return Plan(old, old, (), (), {}, {}, {})
    return UP if request.dp_size == 2 else DOWN


class MemoryScale:
    """One or two devices that serve, and what is in use there."""

    def __init__(self, hmm: Hmm, direction: str) -> None:
        self.hmm, self.plan = hmm, PLANS[direction]
        self.world = World(self.plan.old)
        self._execute, self._at, self._inject = hmm.execute, -1, lambda: None
        hmm.execute = self._with_fault  # type: ignore[method-assign]
        self.coordinator = Coordinator(
            hmm,
            self.world,
            self.world,
            plan_for,
            lambda plan: {},
            retry_policy=RetryPolicy(attempts=3, first_pause_s=0.05),
        )

    def step(self, at: int) -> Step:
        return (*self.plan.before, *self.plan.after)[at]

    def scale(self, at: int = -1, inject: Inject = lambda: None) -> Operation:
        """Carry the plan out; before its step number `at`, `inject` happens."""
        self._at, self._inject = at, inject
        request = ScaleRequest(self.plan.new.dp_size)
        return self.coordinator.wait(self.coordinator.submit(request).operation_id, 60)

    def settle(self) -> None:
        """What the next requests do first, until a worker that hung has come back."""
        deadline = time.monotonic() + 5
        while any(self.hmm._pending_unmap.values()) and time.monotonic() < deadline:
            self.hmm.require(self.plan.old.device_ids)
            time.sleep(0.02)

    def _with_fault(self, step: Step) -> int:
        if self._at >= 0 and step == self.step(self._at):
            self._at = -1
            self._inject()
        return self._execute(step)

    def left(self) -> dict[str, Any]:
        """All that a scale may leave: pages and slots, descriptors, processes, sockets."""
        for device_id in self.hmm.device_ids():
            self.hmm.client(device_id).hello()  # a connection that broke is made anew
        pids = {d: w.process.pid for d, w in self.workers()}
        fds = settle(lambda: {"own": count_fds()} | {d: count_fds(p) for d, p in pids.items()})
        return {
            "pages": in_use(self.hmm),
            "fds": fds,
            "processes": {d: w.process.poll() for d, w in self.workers()},
            "children": len(children()),
            "sockets": sorted(path.name for path in self.hmm.socket_path(0).parent.iterdir()),
        }

    def workers(self) -> list[tuple[int, Any]]:
        return sorted(self.hmm._workers.items())


def children() -> list[int]:
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


@contextmanager
def serving(directory: Path, direction: str, **options: Any) -> Iterator[MemoryScale]:
    """`plan.old` in memory, with both adapters and valid content."""
    with hmm_of(directory, add=False, **options) as hmm:
        hmm.set_adapters(ADAPTERS)
        hmm.map_placement(PLANS[direction].old)
        halves = [range(8)] if direction == "up" else [range(4), range(4, 8)]
        for device_id, experts in enumerate(halves):
            fill(hmm, device_id, content(experts))
        yield MemoryScale(hmm, direction)


# ---- faults: `with fault(scale, step) as inject` ----


@contextmanager
def signalled(scale: MemoryScale, device_id: int, number: int) -> Iterator[Inject]:
    pids: list[int] = []

    def inject() -> None:
        pids.append(scale.hmm._workers[device_id].process.pid)
        os.kill(pids[0], number)
        if number == signal.SIGKILL:
            scale.hmm._workers[device_id].process.wait()
        while number == signal.SIGSTOP and not is_stopped(pids[0]):
            time.sleep(0.001)  # on a busy machine it may do something else first

    yield inject
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def full(scale: MemoryScale, step: Step) -> Iterator[Inject]:
    """Something else has taken the device's memory: every slot that the step does not want."""
    taken: list[Slots] = []

    def inject() -> None:
        client = scale.hmm.client(step.device_id)
        for slots in others(scale.hmm, step):
            with suppress(MemoryWorkerError):
                taken.append(client.map_slots(slots))
        assert taken

    yield inject
    for slots in taken if step.device_id in scale.hmm.device_ids() else ():
        scale.hmm.client(step.device_id).unmap_slots(slots)


def others(hmm: Hmm, step: Step) -> list[Slots]:
    """Single slots, but for those of a mapping step."""
    wanted = hmm._slots_of(step)
    return [
        {region.name: [(slot, 1)]}
        for region in SHAPE.regions
        for first, count in subtract([(0, region.num_slots)], wanted.get(region.name, ()))
        for slot in range(first, first + count)
    ]


@contextmanager
def without_descriptors(pid_of: Callable[[], int], spare: int = 0) -> Iterator[Inject]:
    """A process may open only `spare` more descriptors."""
    before: dict[int, tuple[int, int]] = {}

    def inject() -> None:
        pid = pid_of()
        used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}  # noqa: PTH208 - no generator
        if pid == os.getpid():
            used = {fd for fd in used if Path(f"/proc/self/fd/{fd}").exists()}
        free = [fd for fd in range(max(used) + spare + 2) if fd not in used]
        before[pid] = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[spare], before[pid][1]))

    try:
        yield inject
    finally:
        for pid, limits in before.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


@contextmanager
def message(scale: MemoryScale, step: Step, how: str) -> Iterator[Inject]:
    """What becomes of the next message to the device of a step."""
    device_id = step.device_id
    proxies: list[Proxy] = []
    clients: list[tuple[Any, DeviceClient]] = []

    def inject() -> None:
        real = scale.hmm.socket_path(device_id)
        proxies.append(Proxy(real, real.with_name("proxy.sock"), how))
        worker = scale.hmm._workers[device_id]
        client = DeviceClient(proxies[0].path, 10.0)
        clients.append((worker, client))
        scale.hmm._workers[device_id] = replace(worker, client=client)

    yield inject
    for worker, client in clients:
        now = scale.hmm._workers.get(device_id)
        if now is not None and now.client is client:
            assert client.hello() == worker.client.info  # the last chance for a late answer
            scale.hmm._workers[device_id] = worker
        elif now is None:
            worker.client.close()
        client.close()
    for proxy in proxies:
        proxy.close()
        assert proxy.is_done or device_id not in scale.hmm.device_ids()


@contextmanager
def peer_message(scale: MemoryScale, step: Step, how: str) -> Iterator[Inject]:
    """What becomes of the first pages that a worker asks its peer for, when it copies."""
    proxies: list[Proxy] = []
    hmm, path_of = scale.hmm, scale.hmm.socket_path

    def proxied(device_id: int, seen_from: int | None = None) -> Path:
        assert device_id == step.source_id
        hmm.socket_path = path_of  # type: ignore[method-assign]
        return proxies[0].path

    def inject() -> None:
        real = path_of(step.source_id)
        proxies.append(Proxy(real, real.with_name("peer-proxy.sock"), how, PAGES))
        hmm.socket_path = proxied  # type: ignore[method-assign]

    yield inject
    for proxy in proxies:
        proxy.close()
        assert proxy.is_done
