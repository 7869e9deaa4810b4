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

import msgspec
import pytest

from sgl_elastic import wire
from sgl_elastic.errors import EngineFailedError, MemoryWorkerError
from sgl_elastic.instance import rank_messages as m
from sgl_elastic.instance import supervise
from sgl_elastic.instance.handover import FrozenInstance, HandedOver
from sgl_elastic.instance.manager import InstanceManager
from sgl_elastic.instance.running import Timeouts
from sgl_elastic.instance.state import InstanceState
from sgl_elastic.instance.supervise import EngineSettings
from sgl_elastic.processes import LocalProcess
from sgl_elastic.types import Placement
from tests.fast.elastic.memory_workers import comes_to, count_fds, settle
from tests.fast.elastic.scale_fakes import SHAPE

TO_RANK: msgspec.msgpack.Decoder[m.Told] = msgspec.msgpack.Decoder(m.Told)
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
        self.channel = wire.Channel(
            wire.connect(path, EngineFailedError, 2.0),
            TO_RANK,
            peer="the manager",
            failure=EngineFailedError,
            timeout_s=5.0,
        )
        self.channel.send(m.RankHello(instance, rank, 1))
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

    def client(self, device_id: int) -> None:
        if device_id in self.dead:
            raise MemoryWorkerError(f"the memory worker of device {device_id} ended")

    def define(self, shape: object) -> None: ...
    def map_placement(self, placement: Placement) -> None: ...
    def execute(self, step: object) -> None: ...
    def commit(self) -> None: ...
    def adapters(self) -> tuple[()]:
        return ()

    def socket_path(self, device_id: int, seen_from: int) -> str:
        return f"device-{device_id}"

    def are_apart(self, one: int, other: int) -> bool:
        return False


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
        began = time.monotonic()
        while name not in self.manager.check(time.monotonic(), HANG_S):
            assert time.monotonic() - began < timeout_s
            time.sleep(0.01)
        return time.monotonic() - began

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
    scene.manager.keep_standbys(threading.Event())
    deadline = time.monotonic() + 3 * HANG_S
    while time.monotonic() < deadline:
        assert scene.manager.check(time.monotonic(), HANG_S) == ()
        time.sleep(0.02)
    assert scene.heard(name, 1, m.Ping)
    assert not scene.manager.is_lost()


def test_a_supervisor_that_died(scene: Scene) -> None:
    name = scene.first()
    os.kill(scene.pid_of(name), signal.SIGKILL)
    assert scene.check_until_lost(name) < 1.0
    assert scene.manager.is_lost()
    assert scene.lost == [name]
    assert scene.state_of(name) is InstanceState.FAILED
    assert scene.manager.serving() == (name, TWO), "what its replacement gets"
    assert scene.manager.check(time.monotonic(), HANG_S) == (), "once is enough"


def test_a_rank_whose_connection_ended(scene: Scene) -> None:
    name = scene.first()
    pid = scene.pid_of(name)
    scene.ranks[name][1].channel.close()
    os.kill(pid, 0)
    socket_end = scene.ranks[name][1]
    socket_end.join(1)
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
    scene.ranks[name][0].mutes = {m.Ping, m.ResizeKv}
    told = threading.Thread(target=scene.manager.resize_kv, args=(0, 120))
    told.start()
    deadline = time.monotonic() + 3 * HANG_S
    while time.monotonic() < deadline:
        assert scene.manager.check(time.monotonic(), HANG_S) == ()
        time.sleep(0.02)
    rank = scene.ranks[name][0]
    rank.channel.send(m.RankDone())
    told.join(5)
    scene.check_until_lost(name)


def test_a_drain_ends_with_its_instance(scene: Scene) -> None:
    name = scene.first()
    scene.num_running = lambda: 1  # type: ignore[method-assign]
    os.kill(scene.pid_of(name), signal.SIGKILL)
    scene.check_until_lost(name)
    with pytest.raises(EngineFailedError, match="is lost"):
        scene.manager.drain(name, 30)


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


def test_standbys_include_a_spare_of_the_present_one(scene: Scene) -> None:
    scene.first(ONE)
    scene.manager.keep_standbys(threading.Event())
    parked = [e.device_ids for e in scene.manager.instances() if e.state is InstanceState.PARKED]
    assert sorted(parked) == [(0,), (0, 1), (0, 1, 2)]


def test_a_standby_that_dies_or_hangs_is_replaced(scene: Scene) -> None:
    scene.first(ONE)
    stop = threading.Event()
    scene.manager.keep_standbys(stop)
    parked = {e.device_ids: e.instance_id for e in scene.manager.instances()[1:]}
    os.kill(scene.pid_of(parked[(0,)]), signal.SIGKILL)
    scene.check_until_lost(parked[(0,)])
    scene.ranks[parked[(0, 1)]][0].mutes = {m.Ping}
    scene.check_until_lost(parked[(0, 1)])
    assert scene.names() == {"i1", parked[(0, 1, 2)]}
    assert scene.lost == [], "the one that serves is fine"
    scene.manager.keep_standbys(stop)
    fresh = {e.device_ids: e.instance_id for e in scene.manager.instances()[1:]}
    assert set(fresh) == set(parked)


@pytest.mark.parametrize("fault", ["died", "mute", "failed"])
def test_a_standby_of_no_use_is_replaced_by_a_fresh_one(scene: Scene, fault: str) -> None:
    scene.first(ONE)
    standby = scene.manager._park_new((0, 1))
    rank = scene.ranks[standby][0]
    if fault == "died":
        os.kill(scene.pid_of(standby), signal.SIGKILL)
        rank.channel.close()
    elif fault == "mute":
        rank.mutes = {m.Attach}
    else:
        rank.mutes = {m.Attach}
        threading.Timer(0.05, rank.channel.send, (m.Failed("E", "no"),)).start()
    name = scene.manager.prepare(TWO)
    assert name not in ("i1", standby)
    assert scene.state_of(name) is InstanceState.WARM
    assert standby not in scene.names()


def test_a_standby_whose_memory_worker_hangs_is_not_replaced(scene: Scene) -> None:
    """Another instance would take long to start, and would wait for the same worker in vain."""
    scene.first(ONE)
    standby = scene.manager._park_new((0, 1))
    rank = scene.ranks[standby][0]
    rank.mutes = {m.Attach}
    failed = m.Failed("MemoryWorkerError", "the memory worker hangs")
    threading.Timer(0.05, rank.channel.send, (failed,)).start()
    with pytest.raises(MemoryWorkerError, match="hangs"):
        scene.manager.prepare(TWO)
    assert scene.names() == {"i1"}


def test_a_standby_that_is_being_started_is_waited_for(scene: Scene) -> None:
    scene.first(ONE)
    go_on = threading.Event()
    scene.warm_up = lambda instance, num_ranks, timeout_s: go_on.wait(5)  # type: ignore[method-assign]
    starting = threading.Thread(target=scene.manager._park_new, args=((0, 1),))
    starting.start()
    deadline = time.monotonic() + 5
    while len(scene.names()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
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
    os.kill(scene.pid_of(name), signal.SIGKILL)
    scene.check_until_lost(name)
    new, handed = replaced(scene, name, TWO)
    assert [scene.heard(new, rank, m.Activate) for rank in (0, 1)] == [
        [m.Activate((), (), ())],
        [m.Activate((), (), (STATE,))],
    ]
    assert handed.ranks == {"a": 1}
    assert not scene.manager.is_lost()
    scene.manager.retire(name)
    assert scene.names() == {new}


def test_what_has_taken_over_runs_once_its_requests_are_sent(scene: Scene) -> None:
    new, _ = replaced(scene, scene.first(), TWO)
    assert scene.heard(new, 0, m.Run) == []
    scene.manager.start_serving(new)
    scene.manager.start_serving(new)
    assert [scene.heard(new, rank, m.Run) for rank in (0, 1)] == [[m.Run()], [m.Run()]]


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
        os.kill(scene.pid_of(name), signal.SIGKILL)
        scene.check_until_lost(name)
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


def about_to_take_over(scene: Scene) -> tuple[FrozenInstance, str]:
    """The frozen instance on one device, and the one on two that is to go on with its work."""
    old = scene.first(ONE)
    scene.manager._park_new((0, 1))
    new = scene.manager.prepare(TWO)
    return scene.manager.freeze(old), new


def test_a_rank_that_may_still_be_copying_ends_before_the_old_instance_goes_on(
    scene: Scene,
) -> None:
    """It would write KV into slots that the old instance's books say are free."""
    frozen, new = about_to_take_over(scene)
    old = frozen.instance_id
    pid = scene.pid_of(new)
    scene.ranks[new][0].fails = {m.Activate}
    scene.ranks[new][1].mutes = {m.Activate}
    with pytest.raises(EngineFailedError, match="no bytes came"):
        scene.manager.activate(new, frozen, {})
    assert not Path(f"/proc/{pid}").exists()
    scene.manager.resume(old)
    scene.manager.cancel(new)
    assert scene.names() == {old}
    assert scene.state_of(old) is InstanceState.ACTIVE


def test_an_instance_whose_ranks_have_all_answered_is_parked_again(scene: Scene) -> None:
    frozen, new = about_to_take_over(scene)
    old = frozen.instance_id
    scene.ranks[new][0].fails = {m.Activate}
    slow = scene.ranks[new][1]
    slow.mutes = {m.Activate}
    number = 1 + len(slow.heard)  # of the Activate that comes next
    threading.Timer(0.1, slow.channel.send, (m.RankDone(number=number),)).start()
    with pytest.raises(EngineFailedError, match="no bytes came"):
        scene.manager.activate(new, frozen, {})
    scene.manager.resume(old)
    scene.manager.cancel(new)
    assert scene.state_of(new) is InstanceState.PARKED
    assert scene.state_of(old) is InstanceState.ACTIVE
