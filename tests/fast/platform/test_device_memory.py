"""The books of a device with a byte budget, and the file in which servers share one."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_esft import env, platform
from sgl_esft.errors import ConfigError, DeviceMemoryError
from sgl_esft.platform import cpu_hooks, device_memory
from sgl_esft.platform.device_ledger import DeviceLedger, start_time_of
from sgl_esft.weave import expert_tensor
from sgl_esft.weave.expert_memory import open_arena
from tests.support.servers import ROOT

BUDGET = 1 << 20
PAGE = 4096

_RECORD_AND_WAIT = """
import sys
from pathlib import Path
from sgl_esft.platform.device_ledger import DeviceLedger
path, device_id, num_bytes, budget = sys.argv[1:]
print(DeviceLedger(Path(path)).record(int(device_id), int(num_bytes), int(budget)), flush=True)
sys.stdin.read()
"""


class OtherProcess:
    """A process that has its record in the ledger and waits."""

    def __init__(self, path: Path, device_id: int, num_bytes: int) -> None:
        argv = [str(path), str(device_id), str(num_bytes), str(BUDGET)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _RECORD_AND_WAIT, *argv],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.seen = int(self.process.stdout.readline())

    def __enter__(self) -> OtherProcess:
        return self

    def kill(self) -> None:
        """It ends; nobody has asked for its exit status yet."""
        self.process.kill()
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def ledger(tmp_path: Path) -> DeviceLedger:
    return DeviceLedger(tmp_path / "ledger")


@pytest.fixture
def device(ledger: DeviceLedger, monkeypatch: pytest.MonkeyPatch, runner: Any) -> DeviceLedger:
    """This process as a rank on device 3 of the ledger's."""
    monkeypatch.setattr(platform, "is_active", lambda: True)
    monkeypatch.setenv(env.DEVICE_MEMORY, f"{BUDGET}B")
    monkeypatch.setenv(env.DEVICE_LEDGER, str(ledger.path))
    monkeypatch.setattr(device_memory, "_runners", {runner})
    return ledger


@pytest.fixture
def runner() -> Any:
    class Runner(SimpleNamespace):
        __hash__ = object.__hash__

    return Runner(gpu_id=3, device="cpu")


def test_processes_see_each_other_until_they_end(ledger: DeviceLedger) -> None:
    with OtherProcess(ledger.path, 0, 100) as first:
        assert first.seen == 0
        assert ledger.record(0, 1000, BUDGET) == 100
        with OtherProcess(ledger.path, 0, 10) as second:
            assert second.seen == 1100
            assert ledger.record(0, 500, BUDGET) == 110
            assert ledger.record(1, 500, BUDGET) == 0, "another device"
            first.kill()
            assert ledger.record(0, 500, BUDGET) == 10
        with OtherProcess(ledger.path, 0, 1):
            assert ledger.record(0, 500, BUDGET) == 1
    size = ledger.path.stat().st_size
    for _ in range(3):
        with OtherProcess(ledger.path, 0, 1):
            assert ledger.record(0, 500, BUDGET) == 1
    assert ledger.path.stat().st_size == size, "the records of the dead are used again"


def test_who_only_looks_leaves_no_record(ledger: DeviceLedger) -> None:
    assert ledger.record(0, 0, BUDGET) == 0
    assert ledger.path.read_bytes() == b"ESFTDEV1"
    assert ledger.path.stat().st_mode & 0o777 == 0o600


def test_a_pid_that_was_given_again_is_another_process(ledger: DeviceLedger) -> None:
    ledger.record(0, 7, BUDGET)
    with OtherProcess(ledger.path, 0, 5) as other:
        content = bytearray(ledger.path.read_bytes())
        record = struct.pack("<2Q", other.process.pid, start_time_of(other.process.pid) or 0)
        at = content.index(record) + 8
        content[at : at + 8] = struct.pack("<Q", 1)
        ledger.path.write_bytes(content)
        assert ledger.record(0, 7, BUDGET) == 0


def test_start_time() -> None:
    assert start_time_of(os.getpid()) == start_time_of(os.getpid())
    assert start_time_of((1 << 22) + 1) is None


def test_servers_must_agree_on_the_size(ledger: DeviceLedger) -> None:
    with OtherProcess(ledger.path, 0, 5):
        ledger.check(BUDGET)
        for call in (lambda: ledger.check(7), lambda: ledger.record(0, 1, 7)):
            with pytest.raises(ConfigError, match=f"was given {BUDGET}B"):
                call()
    ledger.check(7)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{}", "begins with something else"),
        (b"ESFTDEV1" + bytes(39), "whole number of records"),
        (b"ESFTDEV1" + bytes(40 * 5000), "whole number of records"),
        (b"ESFTDEV1" + struct.pack("<5Q", 0, 0, 0, 1, 1), "cannot be"),
        (b"ESFTDEV1" + struct.pack("<5Q", 1 << 40, 0, 0, 1, 1), "cannot be"),
        (b"ESFTDEV1" + struct.pack("<5Q", 1, 0, 0, 1 << 60, 1), "cannot be"),
    ],
)
def test_a_corrupt_ledger(ledger: DeviceLedger, content: bytes, reason: str) -> None:
    ledger.path.write_bytes(content)
    for call in (lambda: ledger.check(BUDGET), lambda: ledger.record(0, 1, BUDGET)):
        with pytest.raises(ConfigError, match=f"is not a ledger: .*{reason}"):
            call()
    assert ledger.path.read_bytes() == content


def test_a_ledger_that_cannot_be_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "socket"))
    for path in (tmp_path, *(tmp_path / name for name in ("pipe", "link", "socket", "no/file"))):
        with pytest.raises(ConfigError, match="--device-ledger"):
            DeviceLedger(path).check(BUDGET)


def test_each_storage_counts_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.Linear(4, 8))
    model[1].weight = model[0].weight
    model.register_buffer("rows", model[1].bias.data[2:])
    model.derived = torch.zeros(16, dtype=torch.bfloat16)
    model.planned = torch.zeros(1000, device="meta")
    assert device_memory.model_bytes(model) == 4 * (4 * 8 + 8) + 32


def test_expert_pages_count_as_pages(monkeypatch: pytest.MonkeyPatch, runner: Any) -> None:
    arena = open_arena("host", 0, PAGE)
    memory = arena.make_layer(6, [3 * PAGE // 2, PAGE])
    memory.map(range(2))
    arena.pool.preallocate(4)
    model = torch.nn.Linear(2, 2, bias=False)
    model.esft_memory = memory
    model.experts = torch.utils.dlpack.from_dlpack(
        memory.tensors[0].to_dlpack([6, 3 * PAGE // 8], "float32")
    )
    runner.model = model
    monkeypatch.setattr(expert_tensor, "open_arenas", lambda: [arena])
    monkeypatch.setattr(device_memory, "_runners", {runner})
    used = device_memory.usage()
    assert used == device_memory.DeviceUsage(weights=16, expert_pages=(5 + 4) * PAGE, kv_cache=0)


@pytest.mark.parametrize("size", [640, (320, 320)])
def test_a_kv_pool_counts(runner: Any, device: DeviceLedger, size: Any) -> None:
    runner.token_to_kv_pool = SimpleNamespace(get_kv_size_bytes=lambda: size)
    assert device_memory.usage().kv_cache == 640
    assert device_memory.available_bytes() == BUDGET - 640


def test_without_a_budget_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.DEVICE_MEMORY, raising=False)
    assert device_memory.available_bytes() is None
    device_memory.charge()
    device_memory.limit_expert_pools()
    assert cpu_hooks.available_memory(lambda *_: 7.0, "cpu", 0) == 7.0


def test_what_is_left_of_the_device(runner: Any, device: DeviceLedger) -> None:
    runner.model = torch.nn.Linear(64, 64, bias=False)
    own = 4 * 64 * 64
    with OtherProcess(device.path, 3, 1000) as other, OtherProcess(device.path, 0, 50):
        assert device_memory.available_bytes() == BUDGET - own - 1000
        gigabytes = cpu_hooks.available_memory(lambda *_: 7.0, "cpu", 3)
        assert gigabytes == (BUDGET - own - 1000) / (1 << 30)
        assert cpu_hooks.available_memory(lambda *_: 7.0, "cuda", 3) == 7.0
        assert device_memory.available_bytes(0) == BUDGET - own - 50
        other.kill()
        assert device_memory.available_bytes() == BUDGET - own


def test_more_than_the_device_has(runner: Any, device: DeviceLedger) -> None:
    with OtherProcess(device.path, 3, BUDGET - 100):
        runner.model = torch.nn.Linear(5, 5, bias=False)
        device_memory.charge()
        runner.model = torch.nn.Linear(6, 5, bias=False)
        with pytest.raises(DeviceMemoryError, match=r"device 3 has .* needs 120 for weights"):
            device_memory.charge()
        assert device_memory.available_bytes() == 0


def test_expert_pools_end_where_the_device_does(
    runner: Any, device: DeviceLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = open_arena("host", 3, PAGE)
    arena.pool.preallocate(2)
    monkeypatch.setattr(expert_tensor, "open_arenas", lambda: [arena])
    device_memory.limit_expert_pools()
    assert arena.pool.state().max_pages == BUDGET // PAGE
    runner.token_to_kv_pool = SimpleNamespace(get_kv_size_bytes=lambda: BUDGET // 2 + 1)
    device_memory.limit_expert_pools()
    assert arena.pool.state().max_pages == BUDGET // PAGE // 2 - 1
    runner.token_to_kv_pool = None
    device_memory.limit_expert_pools()
    assert arena.pool.state().max_pages == BUDGET // PAGE // 2 - 1, "never wider"


def test_a_budget_is_for_the_cpu_platform(
    device: DeviceLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "is_active", lambda: False)
    with pytest.raises(ConfigError, match="CPU platform"):
        device_memory.available_bytes()


@pytest.mark.parametrize("size", ["512", "64gb", "", "-1GB", "0GB"])
def test_a_size_in_the_environment(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.DEVICE_MEMORY, size)
    if not size:
        assert env.device_memory() is None
        return
    with pytest.raises(ConfigError, match=env.DEVICE_MEMORY):
        env.device_memory()
