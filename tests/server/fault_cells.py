"""The matrix of faults: which process, which signal, in which phase of a scale, up or down.

    CELLS, shuffled --[carry_out]--> a scale under load, one fault; what must hold then

A phase takes milliseconds, so a fault is aimed by the clock: at a moment within the phase, as long
after the request as that phase came in scales without a fault. It may miss: each cell notes the
phase that was hit.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import requests

from tests.server.elastic_faults import HANG_S, SOON_S, Elastic, is_idle, kill

__all__ = [
    "CELLS",
    "Cell",
    "Measured",
    "Note",
    "carry_out",
    "check_processes",
    "is_idle",
    "measured",
]

PHASES = ("plan", "memory", "prepare", "switch", "retire", "after")
# "worker" 0 stays; 1 joins or leaves.
PROCESSES = ("supervisor", "rank", "standby supervisor", "standby rank", "worker 0", "worker 1")
WORKER_HANG_S = 3.25  # sgl_elastic/memory/connection.py
START_S = 60.0  # an instance in place of a standby that is lost, on a busy machine

Note = Callable[[str, object], None]  # a name and its value, as pytest's record_property
Measured = Mapping[int, Mapping[str, tuple[float, float]]]  # new size -> phase -> from, to (s)


@dataclass(frozen=True)
class Cell:
    """One fault of one scale to `target` devices; `moment`: how far into the phase, 0 to 1."""

    target: int
    process: str
    signal: str
    phase: str
    moment: float

    def __str__(self) -> str:
        words = ("up" if self.target == 2 else "down", self.process, self.signal, self.phase)
        return "-".join(words).replace(" ", "_")


def _cells() -> list[Cell]:
    rng = random.Random(7)
    found = [
        Cell(target, process, sig, phase, rng.random())
        for target, process, sig, phase in product(
            (2, 1), PROCESSES, ("SIGKILL", "SIGSTOP"), PHASES
        )
    ]
    rng.shuffle(found)
    return found


CELLS = _cells()


def measured(elastic: Elastic) -> Measured:
    """Scales up and down without a fault, twice: only the second time all is warm."""
    found: dict[int, dict[str, tuple[float, float]]] = {}
    for target in (2, 1, 2, 1):
        _stand_by(elastic, target)
        with elastic.load():
            operation = elastic.scaled(target)
        assert operation["state"] == "succeeded", operation
        found[target] = _spans(operation)
    return found


def _spans(operation: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """When its phases were, in seconds since it was asked for."""
    at, spans = 0.0, {}
    for phase in operation["phases"]:
        seconds = max(phase["seconds"], 0.0)
        spans[phase["name"]] = (at, at + seconds)
        at += seconds
    return spans


def _stand_by(elastic: Elastic, target: int) -> None:
    """The other number of devices serves; standbys of both are there."""
    elastic.wait_for(lambda: is_idle(elastic), START_S)
    if elastic.size() == target:
        assert elastic.scaled(3 - target)["state"] == "succeeded"
    for size in (target, 3 - target):
        elastic.wait_for_standby(*range(size))


def carry_out(elastic: Elastic, cell: Cell, phases: Measured, note: Note) -> None:
    """The cell's scale with its fault, under load; then all that must hold."""
    _stand_by(elastic, cell.target)
    begin, end = phases[cell.target].get(cell.phase, (0.0, 0.0))
    shot = _Shot(elastic, cell, begin + cell.moment * (end - begin))
    with elastic.load():
        operation = shot.scaled()
        elastic.wait_for(lambda: is_idle(elastic), START_S)
    shot.go_on()
    note("state", operation["state"])
    note("hit", _phase_of(operation, shot.at_s))
    try:
        _check(elastic, cell, operation, shot)
    except AssertionError as error:
        raise AssertionError(f"{cell}: {operation}\n{elastic.server.log()}") from error


def _phase_of(operation: Mapping[str, Any], at_s: float) -> str:
    """The phase in which the fault was in fact, or on which side of the scale it missed."""
    spans = _spans(operation)
    since_s = at_s - (operation["created_s"] - spans["plan"][1])  # created when it is planned
    if since_s < 0:
        return "before"
    return next((n for n, (a, b) in spans.items() if a <= since_s < b), "ended")


class _Shot:
    """A signal to one process, some seconds after a scale is asked for."""

    def __init__(self, elastic: Elastic, cell: Cell, delay_s: float) -> None:
        self._elastic, self._cell = elastic, cell
        self._pid = self._find()  # a process that joins is not there yet
        self._timer = threading.Timer(delay_s, self._fire)
        self.at_s = 0.0

    def scaled(self) -> dict[str, Any]:
        self._timer.start()
        operation = self._elastic.scaled(self._cell.target)
        self._timer.join()
        return operation

    def go_on(self) -> None:
        """Whoever was stopped and is not ended by now goes on."""
        if self._pid is not None:
            kill(self._pid, signal.SIGCONT)

    def _fire(self) -> None:
        deadline = time.monotonic() + SOON_S
        while self._pid is None and time.monotonic() < deadline:
            self._pid = self._find()
            time.sleep(0.002)
        self.at_s = time.time()
        if self._pid is not None:
            kill(self._pid, getattr(signal, self._cell.signal))

    def _find(self) -> int | None:
        kind, _, which = self._cell.process.rpartition(" ")
        if kind == "worker":
            return self._elastic.worker(int(which))
        name = self._elastic.instances()[0]
        if kind == "standby":
            name = self._elastic.wait_for_standby(*range(self._cell.target))
        return self._elastic.supervisor(name) if which == "supervisor" else self._elastic.rank(name)


def _check(elastic: Elastic, cell: Cell, operation: Mapping[str, Any], shot: _Shot) -> None:
    assert operation["state"] in ("succeeded", "rolled_back", "degraded")
    assert operation["finished_s"] - shot.at_s < _limit_s(cell)
    if cell.process.startswith("worker") and cell.signal == "SIGKILL":  # perhaps of what serves
        elastic.wait_for(lambda: not _is_memory_lost(elastic) and is_idle(elastic), START_S)
        check_processes(elastic)
        return
    _check_placement(elastic, operation)
    if operation["state"] == "degraded":
        _finish(elastic, operation)
    check_processes(elastic)


def _limit_s(cell: Cell) -> float:
    """How long after the fault the scale may go on: until it is noticed, and then SOON_S."""
    if cell.process.startswith("standby") or (cell.process, cell.signal) == ("worker 0", "SIGSTOP"):
        return START_S  # an instance is started in place of a standby that failed
    if cell.signal == "SIGKILL":
        return 2 * SOON_S
    return SOON_S + (WORKER_HANG_S if cell.process.startswith("worker") else 2 * HANG_S)


def _check_placement(elastic: Elastic, operation: Mapping[str, Any]) -> None:
    """Old or new, and nothing between; a degraded one may still have to grow its KV."""
    placement, plan = elastic.placement(), operation["plan"]
    if operation["state"] == "rolled_back":
        assert placement == plan["old"]
    elif operation["state"] == "succeeded":
        assert placement == plan["new"]
    else:
        for field in ("device_ids", "homes"):
            assert placement[field] == plan["new"][field]


def _is_memory_lost(elastic: Elastic) -> bool:
    return any(elastic.worker(device_id) is None for device_id in elastic.placement()["device_ids"])


def _finish(elastic: Elastic, operation: Mapping[str, Any]) -> None:
    """The next scale, here to what is there already, does the rest."""
    elastic.scaled(elastic.size())
    url = f"{elastic.server.url}/v1/scale/{operation['id']}"
    assert requests.get(url, timeout=30).json()["state"] == "succeeded"
    assert elastic.placement() == operation["plan"]["new"]


def check_processes(elastic: Elastic) -> None:
    """A worker for each device that serves, a supervisor for each instance, and no others."""
    devices = elastic.placement()["device_ids"]
    workers = elastic.children_named("sgl_elastic.memory.worker")
    assert sorted(workers) == sorted(pid for d in devices if (pid := elastic.worker(d)) is not None)
    elastic.wait_for(lambda: _supervisors(elastic), SOON_S)


def _supervisors(elastic: Elastic) -> bool:
    """Whether all that run are known; one may be starting or ending at this moment."""
    known = {each["pid"] for each in elastic.instances()[1].values()}
    return set(elastic.children_named("sgl_elastic.instance.process")) <= known
