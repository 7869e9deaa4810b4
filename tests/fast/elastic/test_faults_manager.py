"""The instance manager over processes that do nothing and ranks that are threads: who is lost?

Real sockets, real process groups, real SIGKILL and SIGSTOP; no SGLang.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sgl_elastic.errors import EngineFailedError, MemoryWorkerError
from sgl_elastic.instance import rank_messages as m
from sgl_elastic.instance import supervise
from sgl_elastic.instance.handover import HandedOver
from sgl_elastic.instance.manager import InstanceManager
from sgl_elastic.instance.running import Timeouts
from sgl_elastic.instance.state import InstanceState
from sgl_elastic.instance.supervise import EngineSettings
from sgl_elastic.processes import LocalProcess
from sgl_elastic.types import Placement, Step, StepKind
from tests.fast.elastic.instance.test_links import rank_channel
from tests.fast.elastic.memory_workers import comes_to, count_fds, settle
from tests.fast.elastic.scale_fakes import SHAPE
from tests.support.waiting import wait_until

ONE = Placement((0,), (0,) * 6, (100,))
TWO = Placement((0, 1), (0, 0, 0, 1, 1, 1), (100, 90))
HANG_S = 0.3
STATE = m.RequestState("a", array("q", [7, 8]).tobytes(), 2, {}, {})


class FakeRank(threading.Thread):
    """Does what it is told, except what `mutes` names: that it never answers."""

    def __init__(self, path: Path, instance: str, rank: int) -> None:
        super().__init__(daemon=True)
        self.mutes: set[type] = set()
        self.fails: set[type] = set()
        self.heard: list[m.ToRank] = []
        self.is_started = False
        self.is_parked = threading.Event()
        self.published = m.Frozen((), ())
        self._number = 0
        self.channel = rank_channel(path, instance, rank, 1)
        self.channel.send(m.Declared(SHAPE))
        self.start()

    def run(self) -> None:
        with contextlib.suppress(EngineFailedError, ValueError, OSError):
            while True:
                self.channel.wait()
                told, fds = self.channel.receive()
                fds.close()
                self._number, message = told.number, told.message
                self.heard.append(message)
                if type(message) not in self.mutes:
                    self.answer(message)

    def answer(self, message: m.ToRank) -> None:
        if type(message) in self.fails:
            self.channel.send(m.Failed("PeerCopyError", "no bytes came", self._number))
            return
        match message:
            case m.Ping():
                self.channel.send(m.Pong())
            case m.Wake():
                pass
            case m.Attach(must_load=True):
                self.channel.send(m.Loaded(0))
            case m.Park() | m.Run() if not self.is_started:
                self.is_started = True
                self.channel.send(m.Started())
            case _:
                self.channel.send(m.RankDone(number=self._number))

    def freeze(self) -> None:
        if m.Frozen not in self.mutes:
            self.channel.send(self.published)


class FakeMemory:
    """An Hmm in which everything is there at once."""

    def __init__(self) -> None:
        self.dead: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: ()

    def are_apart(self, one: int, other: int) -> bool:
        return False

    def client(self, device_id: int) -> None:
        if device_id in self.dead:
            raise MemoryWorkerError(f"the memory worker of device {device_id} ended")

    def socket_path(self, device_id: int, seen_from: int) -> str:
        return f"device-{device_id}"


class Scene:
    """A manager whose instances are `sleep` and threads. Also its engine_link."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory / "sockets"
        self.ranks: dict[str, list[FakeRank]] = {}
        self.lost: list[str] = []
        self.memory = FakeMemory()
        monkeypatch.setattr(supervise, "start", self.start_process)
        settings = EngineSettings(self.directory, (), "t", "d", "host", 4096, 100, 10)
        self.manager = InstanceManager(
            settings,
            self.memory,  # type: ignore[arg-type]
            self,
            standby_ranks=6,
            max_devices=3,
            timeouts=Timeouts(start_s=5.0, step_s=1.0, freeze_s=0.3),
        )

    def start_process(self, spec: Any, environment: object) -> LocalProcess:
        process = LocalProcess(["sleep", "60"], start_new_session=True)
        engine = json.loads(spec.engine)
        name, count = engine["instance"], len(engine["device_ids"])
        path = self.directory / "ranks.sock"
        self.ranks[name] = [FakeRank(path, name, rank) for rank in range(count)]
        return process

    # EngineLink
    def connect(self, instance: str, input_ipc: str, wake: object) -> None: ...
    def disconnect(self, instance: str) -> None: ...
    def warm_up(self, instance: str, num_ranks: int, timeout_s: float) -> None: ...
    def num_running(self) -> int:
        return 0

    def pause(self, instance: str) -> None:
        for rank in self.ranks[instance]:
            rank.freeze()

    def wait_for_outputs(self, num_sent: Mapping[str, int]) -> None: ...

    def lose(self, instance: str) -> None:
        self.lost.append(instance)

    def states(self) -> list[tuple[int, m.RequestState]]:
        return [(1, STATE)]

    # what tests ask
    def park(self, device_ids: tuple[int, ...]) -> str:
        """As `keep_standbys` does with each."""
        name = self.manager._start_parked(device_ids)
        self.manager._put_away(self.manager._running[name])
        return name

    def first(self, placement: Placement = TWO) -> str:
        return self.manager.start_first(placement.device_ids, lambda shape: placement)

    def state_of(self, name: str) -> InstanceState:
        return {each.instance_id: each.state for each in self.manager.instances()}[name]

    def names(self) -> set[str]:
        return {each.instance_id for each in self.manager.instances()}

    def pid_of(self, name: str) -> int:
        return next(e.pid for e in self.manager.instances() if e.instance_id == name)

    def check_until_lost(self, name: str, timeout_s: float = 5.0) -> float:
        """Seconds until the manager finds `name` lost."""
        return wait_until(lambda: name in self.manager.check(time.monotonic(), HANG_S), timeout_s)

    def check_that_none_is_lost(self) -> None:
        """For three times as long as a rank may say nothing."""
        deadline = time.monotonic() + 3 * HANG_S
        while time.monotonic() < deadline:
            assert self.manager.check(time.monotonic(), HANG_S) == ()
            time.sleep(0.02)

    def kill(self, name: str) -> float:
        """Kill a supervisor; seconds until that is noticed."""
        os.kill(self.pid_of(name), signal.SIGKILL)
        return self.check_until_lost(name)

    def heard(self, name: str, rank: int, kind: type) -> list[Any]:
        return [message for message in self.ranks[name][rank].heard if isinstance(message, kind)]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    scene = Scene(tmp_path, monkeypatch)
    yield scene
    pids = [each.pid for each in scene.manager.instances()]
    scene.manager.close()
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists(), "its process outlives the manager"


def test_who_answers_is_not_lost(scene: Scene) -> None:
    name = scene.first()
    scene.manager.keep_standbys(lambda: False)
    scene.check_that_none_is_lost()
    assert scene.heard(name, 1, m.Ping)
    assert not scene.manager.is_lost()


def test_a_supervisor_that_died(scene: Scene) -> None:
    name = scene.first()
    assert scene.kill(name) < 1.0
    assert scene.manager.is_lost()
    assert scene.lost == [name]
    assert scene.state_of(name) is InstanceState.FAILED
    assert scene.manager.serving() == (name, TWO), "what its replacement gets"
    assert scene.manager.check(time.monotonic(), HANG_S) == (), "once is enough"
    scene.num_running = lambda: 1  # type: ignore[method-assign]
    with pytest.raises(EngineFailedError, match="is lost"):
        scene.manager.drain(name, 30)


def test_a_rank_whose_connection_ended(scene: Scene) -> None:
    name = scene.first()
    pid, rank = scene.pid_of(name), scene.ranks[name][1]
    rank.channel.close()
    os.kill(pid, 0)
    rank.join(1)
    scene.check_until_lost(name)
    assert not Path(f"/proc/{pid}").exists(), "the rest of it is ended"


def test_a_rank_that_hangs(scene: Scene) -> None:
    name = scene.first()
    scene.ranks[name][1].mutes = {m.Ping}
    assert HANG_S < scene.check_until_lost(name) < 6 * HANG_S


def test_a_rank_with_an_instruction_may_be_given_more_time(scene: Scene) -> None:
    """Reading weights from disk, it answers no ping, and is waited for all the same."""
    scene.manager._timeouts = replace(scene.manager._timeouts, silent_s=30.0)
    name = scene.first()
    rank = scene.ranks[name][0]
    rank.mutes = {m.Ping, m.ResizeKv}
    told = threading.Thread(target=scene.manager.resize_kv, args=(0, 120))
    told.start()
    scene.check_that_none_is_lost()
    rank.channel.send(m.RankDone())
    told.join(5)
    scene.check_until_lost(name)


def test_ranks_that_read_what_was_lost_are_waited_for(scene: Scene) -> None:
    """They answer no ping meanwhile, and take longer than any other instruction may."""
    scene.first(ONE)
    standby = scene.park((0, 1))
    ranks = scene.ranks[standby]
    for rank in ranks:
        rank.mutes = {m.Ping, m.Attach}
    reads = (
        Step(StepKind.READ_EXPERTS, 1, expert_ids=(3, 5)),
        Step(StepKind.READ_TRUNK, 1),
    )
    prepared: list[str] = []
    told = threading.Thread(target=lambda: prepared.append(scene.manager.prepare(TWO, reads)))
    told.start()
    scene.check_that_none_is_lost()
    time.sleep(0.5)  # with that longer than `step_s`
    for rank, num_bytes in zip(ranks, (0, 77), strict=True):
        rank.channel.send(m.RankDone(num_bytes=num_bytes))
    told.join(5)
    assert prepared == [standby]
    attaches = [scene.heard(standby, rank, m.Attach)[0] for rank in (0, 1)]
    assert [(each.disk_experts, each.loads_trunk) for each in attaches] == [
        ((), False),
        ((3, 5), True),
    ]
    assert [scene.manager.num_read(standby, device) for device in (0, 1)] == [0, 77]
    scene.check_until_lost(standby)  # from now on it must answer


def test_a_supervisor_that_is_stopped_for_long(scene: Scene) -> None:
    name = scene.first()
    pid = scene.pid_of(name)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(HANG_S / 3)
    scene.manager.check(time.monotonic(), HANG_S)
    os.kill(pid, signal.SIGCONT)
    time.sleep(HANG_S)
    assert scene.manager.check(time.monotonic(), HANG_S) == (), "it went on in time"
    os.kill(pid, signal.SIGSTOP)
    assert scene.check_until_lost(name) > HANG_S


def test_a_standby_that_dies_or_hangs_is_replaced(scene: Scene) -> None:
    scene.first(ONE)
    scene.manager.keep_standbys(lambda: False)
    found = scene.manager.instances()[1:]
    assert {each.state for each in found} == {InstanceState.PARKED}
    parked = {each.device_ids: each.instance_id for each in found}
    assert sorted(parked) == [(0,), (0, 1), (0, 1, 2)], "a spare of the present one too"
    scene.kill(parked[(0,)])
    scene.ranks[parked[(0, 1)]][0].mutes = {m.Ping}
    scene.check_until_lost(parked[(0, 1)])
    assert scene.names() == {"i1", parked[(0, 1, 2)]}
    assert scene.lost == [], "the one that serves is fine"
    scene.manager.keep_standbys(lambda: False)
    assert {each.device_ids for each in scene.manager.instances()[1:]} == set(parked)


@pytest.mark.parametrize("fault", ["died", "mute", "EngineFailedError", "MemoryWorkerError"])
def test_a_standby_of_no_use_is_replaced_by_a_fresh_one(scene: Scene, fault: str) -> None:
    """Not where a memory worker hangs: another instance would wait for the same one in vain."""
    scene.first(ONE)
    standby = scene.park((0, 1))
    rank = scene.ranks[standby][0]
    rank.mutes = {m.Attach}
    if fault == "died":
        os.kill(scene.pid_of(standby), signal.SIGKILL)
        rank.channel.close()
    elif fault != "mute":
        threading.Timer(0.05, rank.channel.send, (m.Failed(fault, "it hangs"),)).start()
    if fault == "MemoryWorkerError":
        with pytest.raises(MemoryWorkerError, match="hangs"):
            scene.manager.prepare(TWO)
        assert scene.names() == {"i1"}
        return
    name = scene.manager.prepare(TWO)
    assert name not in ("i1", standby)
    assert scene.state_of(name) is InstanceState.WARM
    assert standby not in scene.names()


def test_a_standby_that_is_being_started_is_waited_for(scene: Scene) -> None:
    scene.first(ONE)
    go_on = threading.Event()
    scene.warm_up = lambda instance, num_ranks, timeout_s: go_on.wait(5)  # type: ignore[method-assign]
    starting = threading.Thread(target=scene.park, args=((0, 1),))
    starting.start()
    wait_until(lambda: len(scene.names()) == 2)
    threading.Timer(0.05, go_on.set).start()
    assert scene.manager.prepare(TWO) == "i2"
    starting.join(5)
    assert scene.names() == {"i1", "i2"}


def test_nothing_is_started_for_memory_that_is_gone(scene: Scene) -> None:
    scene.first(ONE)
    scene.memory.dead = {1}
    with pytest.raises(MemoryWorkerError, match="device 1"):
        scene.manager.prepare(TWO)
    assert scene.names() == {"i1"}


def replaced(scene: Scene, lost: str, placement: Placement) -> tuple[str, HandedOver]:
    new = scene.manager.prepare(placement)
    return new, scene.manager.activate(new, scene.manager.freeze(lost), {1: 0})


def test_requests_of_a_lost_instance_go_on_in_its_replacement(scene: Scene) -> None:
    name = scene.first()
    scene.kill(name)
    new, handed = replaced(scene, name, TWO)
    activations = [scene.heard(new, rank, m.Activate) for rank in (0, 1)]
    assert activations == [[m.Activate((), (), ())], [m.Activate((), (), (STATE,))]]
    assert handed.ranks == {"a": 1}
    assert not scene.manager.is_lost()
    assert scene.heard(new, 0, m.Run) == [], "it runs once its requests are sent"
    scene.manager.start_serving(new)
    scene.manager.start_serving(new)
    assert [scene.heard(new, rank, m.Run) for rank in (0, 1)] == [[m.Run()], [m.Run()]]
    scene.manager.retire(name)
    assert scene.names() == {new}


def test_an_instance_that_does_not_freeze_is_lost_and_the_scale_goes_on(scene: Scene) -> None:
    name = scene.first()
    scene.ranks[name][1].mutes = {m.Frozen}
    began = time.monotonic()
    new, handed = replaced(scene, name, ONE)
    assert time.monotonic() - began < 5
    assert scene.lost == [name]
    activations = scene.heard(new, 0, m.Activate)
    assert [each.requests for each in activations] == [(STATE,)]
    assert handed.ranks == {"a": 0}


def test_a_scale_that_is_rolled_back_without_its_old_instance(scene: Scene) -> None:
    """The old one hangs, then the new one fails: recovery takes over, and nothing else is left."""
    name = scene.first()
    scene.ranks[name][0].mutes = {m.Frozen}
    new = scene.manager.prepare(ONE)
    frozen = scene.manager.freeze(name)
    scene.ranks[new][0].mutes = {m.Activate, m.Detach}
    with pytest.raises(EngineFailedError):
        scene.manager.activate(new, frozen, {1: 0})
    scene.manager.resume(name)
    scene.manager.cancel(new)
    assert scene.names() == {name}
    assert scene.manager.is_lost()
    newest, _ = replaced(scene, name, TWO)
    assert scene.heard(newest, 1, m.Activate) == [m.Activate((), (), (STATE,))]


def test_kv_does_not_shrink_in_an_instance_that_is_lost(scene: Scene) -> None:
    name = scene.first()
    scene.ranks[name][0].mutes = {m.Frozen}
    with pytest.raises(EngineFailedError, match=f"instance {name} is lost"):
        scene.manager.resize_kv(0, 50)
    assert scene.manager.serving() == (name, TWO)


def test_a_late_answer_is_not_taken_for_another(scene: Scene) -> None:
    name = scene.first()
    scene.ranks[name][0].mutes = {m.ResizeKv}
    with pytest.raises(EngineFailedError, match="no RankDone in time"):
        scene.manager.resize_kv(0, 120)
    rank = scene.ranks[name][0]
    late = rank._number
    rank.mutes = set()
    rank.channel.send(m.RankDone(number=late))
    scene.manager.freeze(name)
    rank.channel.send(m.Failed("E", "even later", late))
    scene.manager.resume(name)
    assert scene.state_of(name) is InstanceState.ACTIVE


def test_everything_is_as_before_after_ten_losses(scene: Scene) -> None:
    """No process, descriptor or thread is left over."""

    def left() -> tuple[int, int, int]:
        return count_fds(), threading.active_count(), len(scene.names())

    def lose_and_replace(name: str) -> str:
        scene.kill(name)
        new, _ = replaced(scene, name, ONE)
        scene.manager.retire(name)
        for rank in scene.ranks.pop(name):
            rank.channel.close()
            rank.join(2)
        return new

    name = lose_and_replace(lose_and_replace(scene.first(ONE)))
    before = settle(left)
    for _ in range(8):
        name = lose_and_replace(name)

    def is_as_before() -> bool:
        """At most so many: what tests before this one left to the collector may end meanwhile."""
        return all(now <= then for now, then in zip(left(), before, strict=True))

    assert comes_to(is_as_before, True), (left(), before)


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_rank_that_may_still_be_copying_ends_before_the_old_instance_goes_on(
    scene: Scene, is_answered: bool
) -> None:
    """It would write KV into slots that are free again. Ranks that have all answered are parked."""
    old = scene.first(ONE)
    scene.park((0, 1))
    new = scene.manager.prepare(TWO)
    frozen, pid = scene.manager.freeze(old), scene.pid_of(new)
    failing, slow = scene.ranks[new]
    failing.fails, slow.mutes = {m.Activate}, {m.Activate}
    if is_answered:
        number = 1 + len(slow.heard)  # of the Activate that comes next
        threading.Timer(0.1, slow.channel.send, (m.RankDone(number=number),)).start()
    with pytest.raises(EngineFailedError, match="no bytes came"):
        scene.manager.activate(new, frozen, {})
    assert Path(f"/proc/{pid}").exists() is is_answered
    scene.manager.resume(old)
    scene.manager.cancel(new)
    assert scene.names() == ({old, new} if is_answered else {old})
    assert scene.state_of(old) is InstanceState.ACTIVE
    assert not is_answered or scene.state_of(new) is InstanceState.PARKED
