"""Operations and their journal: snapshots, keys, a process killed, a file damaged, a full disk."""

from __future__ import annotations

import json
import os
import resource
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sgl_elastic import options
from sgl_elastic.coordinator.operations import (
    ErrorRecord,
    Journal,
    Operation,
    PhaseRecord,
    StepRecord,
    StepState,
)
from sgl_elastic.errors import (
    ElasticConfigError,
    KeyReusedError,
    StepFailedError,
    UnknownOperationError,
)
from sgl_elastic.types import OperationState, ScaleRequest, Step, StepKind

STEP = Step(StepKind.COPY_EXPERTS, 2, source_id=1, expert_ids=(3, 4), num_bytes=99)
REQUEST = ScaleRequest(dp_size=3, device_ids=(0, 1, 2), key="k")
OPERATION = Operation(
    "op",
    REQUEST,
    plan={"copied_bytes": 99, "links": [{"source_id": 1}]},
    steps=(StepRecord.of(STEP), StepRecord.of(STEP)),
    created_s=5.0,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


def life() -> Iterator[Operation]:
    """The snapshots of one operation that succeeds."""
    operation = OPERATION
    yield operation
    for phase in ("memory", "prepare", "switch", "retire", "after"):
        operation = replace(operation.with_phase(phase), state=OperationState.RUNNING)
        operation = replace(operation, switched=phase in ("retire", "after"))
        yield operation
        operation = operation.with_phase_ended(0.5)
    yield replace(operation, state=OperationState.SUCCEEDED, finished_s=9.0)


def test_snapshots_are_new_values_and_their_json_has_only_what_json_has() -> None:
    later = OPERATION.with_step(1, StepState.DONE, 0.25).with_phase("memory").with_phase_ended(2.0)
    assert OPERATION.steps[1].state is StepState.PENDING
    assert later.steps[0] == OPERATION.steps[0]
    assert later.steps[1] == replace(StepRecord.of(STEP), state=StepState.DONE, seconds=0.25)
    assert later.phases == (PhaseRecord("memory", 2.0),)
    assert (OPERATION.phase, later.phase) == ("pending", "memory")
    failed = replace(OPERATION, error=ErrorRecord.of(StepFailedError("no page")))
    shown = json.loads(json.dumps(failed.to_json()))
    assert shown["id"] == "op"
    assert shown["state"] == "pending"
    assert shown["error"] == {"type": "StepFailedError", "message": "no page"}
    assert shown["steps"][0]["num_experts"] == 2
    assert shown["request"]["device_ids"] == [0, 1, 2]


def test_only_ended_states_are_finished() -> None:
    ended = [s for s in OperationState if replace(OPERATION, state=s).finished]
    assert ended == [
        OperationState.SUCCEEDED,
        OperationState.ROLLED_BACK,
        OperationState.DEGRADED,
    ]


def test_a_file_gives_the_same_operations_again(path: Path) -> None:
    journal = Journal(path)
    for operation in life():
        journal.record(operation)
    again = Journal(path)
    assert again.last(9) == journal.last(9)
    assert again.recover(0.0) is None
    assert path.stat().st_mode & 0o777 == 0o600
    assert again.last(9) == (list(life())[-1],)


_RECORDING = """
import sys
from pathlib import Path
from sgl_elastic.coordinator.operations import Journal, Operation
from sgl_elastic.types import ScaleRequest
journal = Journal(Path(sys.argv[1]))
for number in range(100_000):
    journal.record(Operation(f"op{number % 7}", ScaleRequest(dp_size=2), created_s=float(number)))
    print(number, flush=True)
"""


@pytest.mark.parametrize("num_recorded", [1, 2, 30])
def test_what_was_recorded_survives_a_kill(path: Path, num_recorded: int) -> None:
    command = [sys.executable, "-c", _RECORDING, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        told = [int(process.stdout.readline()) for _ in range(num_recorded)]
        process.kill()
        told += [int(line) for line in process.stdout]
    newest = max(each.created_s for each in Journal(path).last(9))
    assert newest in (told[-1], told[-1] + 1)  # it may not have come to telling


@pytest.mark.parametrize("count", range(1, 8))
def test_recover_closes_what_was_cut_off(path: Path, count: int) -> None:
    snapshots = list(life())[:count]
    journal = Journal(path)
    for operation in snapshots:
        journal.record(operation)
    closed = Journal(path).recover(77.0)
    if snapshots[-1].finished:
        assert closed is None
        return
    switched = snapshots[-1].switched
    assert closed.state is (OperationState.DEGRADED if switched else OperationState.ROLLED_BACK)
    assert closed.finished_s == 77.0
    assert f"phase {snapshots[-1].phase} " in closed.error.message
    assert Journal(path).get("op") == closed
    assert Journal(path).recover(78.0) is None


def test_a_damaged_file_is_named_and_left_as_it_is(path: Path) -> None:
    Journal(path).record(replace(OPERATION, plan={"links": ["x" * 20_000]}))
    whole = path.read_bytes()
    old = b'{"operation_id":"op"}\n'
    for damaged in (old, b"\xff\xfe" * 5000, whole[:100], whole[:9000], b"x" + whole[1:]):
        path.write_bytes(damaged)
        with pytest.raises(ElasticConfigError, match=f"{path}.*move away"):
            Journal(path)
        assert path.read_bytes() == damaged


@pytest.mark.parametrize("snapshot", [b"\xff\xfe", b"[]", b"{}", b'{"operation_id": 3}'])
def test_snapshots_of_another_version_are_passed_over(path: Path, snapshot: bytes) -> None:
    Journal(path).record(OPERATION)
    with sqlite3.connect(path) as file:
        file.execute("INSERT INTO operations (id, snapshot) VALUES ('other', ?)", (snapshot,))
    file.close()
    assert Journal(path).last(9) == (OPERATION,)


def test_a_full_disk_is_logged_and_stops_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(path)
    journal.record(OPERATION)
    large = replace(OPERATION, operation_id="large", plan={"links": ["x" * 1_000_000]})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
    try:
        journal.record(large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{path} could not be written" in caplog.text
    assert journal.get("large") == large
    journal.record(replace(OPERATION, operation_id="op2"))
    assert [each.operation_id for each in Journal(path).last(9)] == ["op2", "op"]


def test_a_path_that_cannot_be_used_is_named_at_the_start(tmp_path: Path) -> None:
    for bad in (tmp_path, tmp_path / "missing" / "journal"):
        with pytest.raises(ElasticConfigError, match=str(bad)):
            Journal(bad)


@pytest.mark.parametrize("kind", ["folder", "device", "link to a device", "pipe", "no folder"])
def test_only_a_regular_file_can_be_one(tmp_path: Path, kind: str) -> None:
    """Nothing of another kind is opened: a pipe waits, and /dev/full can be read without end."""
    bad = tmp_path / "journal"
    if kind == "folder":
        bad.mkdir()
    elif kind == "device":
        bad = Path("/dev/full")
    elif kind == "link to a device":
        bad.symlink_to("/dev/full")
    elif kind == "pipe":
        os.mkfifo(bad)
    else:
        bad = bad / "journal"
    with pytest.raises(ElasticConfigError, match=f"{bad}.*name a"):
        options.parse(["--elastic", "--scale-journal", str(bad)])


def test_a_file_that_is_not_there_yet_can(tmp_path: Path) -> None:
    found, _ = options.parse(["--elastic", "--scale-journal", str(tmp_path / "journal")])
    assert found.journal == str(tmp_path / "journal")
    assert not (tmp_path / "journal").exists()


def test_only_the_last_operations_are_kept(path: Path) -> None:
    journal = Journal(path, max_operations=3)
    for number in range(70):
        journal.record(replace(OPERATION, operation_id=f"op{number}"))
        journal.record(replace(OPERATION, operation_id=f"op{number}", finished_s=1.0))
    assert [each.operation_id for each in journal.last(9)] == ["op69", "op68", "op67"]
    assert [each.operation_id for each in journal.last(2)] == ["op69", "op68"]
    with sqlite3.connect(path) as file:
        assert file.execute("SELECT count(*) FROM operations").fetchone() == (3,)
    file.close()
    assert Journal(path, max_operations=3).last(9) == journal.last(9)
    with pytest.raises(UnknownOperationError, match="op0"):
        journal.get("op0")


def test_keys(path: Path) -> None:
    journal = Journal(path)
    assert journal.find_key(REQUEST) is None
    journal.record(replace(OPERATION, operation_id="keyless", request=replace(REQUEST, key="")))
    journal.record(OPERATION)
    for each in (journal, Journal(path)):
        assert each.find_key(REQUEST) == OPERATION
        assert each.find_key(replace(REQUEST, key="")) is None
        assert each.find_key(replace(REQUEST, key="other")) is None
        with pytest.raises(KeyReusedError, match="op"):
            each.find_key(replace(REQUEST, dp_size=4))


def test_wait_wakes_up_at_the_end_and_at_the_time_out() -> None:
    journal = Journal()
    journal.record(OPERATION)
    assert not journal.wait("op", 0.01).finished
    ended = replace(OPERATION, state=OperationState.SUCCEEDED)
    timer = threading.Timer(0.02, journal.record, [ended])
    timer.start()
    assert journal.wait("op", 10.0) == ended
    timer.join()
    with pytest.raises(UnknownOperationError):
        journal.wait("nobody", 0.0)
