"""Each process of a server is killed, stopped or told to end, with keys and requests: a table.

    cell (layout, process, signal) --> how it must end: status, time, what its clients see

Nothing may be left, neither a process nor anything in shared memory (Mortal.ends_with).
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

from sgl_esft.health.faults import STOPPED_S
from sgl_esft.health.phases import EXIT_CUT, EXIT_FAILED
from tests.server.ending import ELASTIC, Mortal, Stream, mortal
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.server, pytest.mark.alone]

KEY = "client-key-0123456789"
KEYS = ("--api-key", KEY, "--admin-api-key", "admin-key-0123456789", "--enable-metrics")
LAYOUTS = {
    "plain": (),
    "two ranks": ("--tp-size", "2", "--ep-size", "2"),  # they share a queue of 25 MB
    "elastic": (*ELASTIC, "--hang-timeout", "10"),
}
ENDS_S = 7.0  # docs/health.md
DRAIN_S = 45.0  # --drain-timeout is 30
LONG = 480  # tokens, a second or two
PROCESSES = {  # words of their titles
    "rank": "sglang::scheduler",
    "detokenizer": "sglang::detokenizer",
    "supervisor": "sgl_elastic.instance.process",
    "memory worker": "sgl_elastic.memory.worker",
}


@dataclass(frozen=True)
class Cell:
    """`error` of its streams: "" if they end well, "broken" where nobody is left to say so.

    `status` None: the server goes on, and ends with 0 when it is told to.
    """

    layout: str
    process: str
    signal: str
    error: str
    status: int | None
    after_s: float = 0.0  # so long until it is noticed
    in_each_run: bool = False


LOST, KILLED = "EngineLostError", -signal.SIGKILL
CELLS = (
    Cell("plain", "rank", "SIGKILL", LOST, EXIT_FAILED),
    Cell("plain", "rank", "SIGSTOP", LOST, EXIT_FAILED, STOPPED_S),
    Cell("plain", "detokenizer", "SIGKILL", LOST, EXIT_FAILED),
    Cell("plain", "detokenizer", "SIGSTOP", LOST, EXIT_FAILED, STOPPED_S),
    Cell("plain", "front", "SIGKILL", "broken", KILLED),
    Cell("plain", "front", "SIGSTOP", "", None),
    Cell("plain", "front", "SIGTERM", "", 0),
    Cell("two ranks", "rank", "SIGKILL", LOST, EXIT_FAILED, in_each_run=True),
    Cell("two ranks", "rank", "SIGSTOP", LOST, EXIT_FAILED, STOPPED_S),
    Cell("two ranks", "front", "SIGKILL", "broken", KILLED),
    Cell("two ranks", "front", "SIGTERM", "", 0),
    Cell("elastic", "rank", "SIGKILL", "", None),
    Cell("elastic", "rank", "SIGSTOP", "", None),
    Cell("elastic", "supervisor", "SIGKILL", "", None),
    Cell("elastic", "supervisor", "SIGSTOP", "", None),
    Cell("elastic", "memory worker", "SIGKILL", "", None),
    Cell("elastic", "memory worker", "SIGSTOP", "", None),
    Cell("elastic", "detokenizer", "SIGKILL", LOST, EXIT_FAILED),
    Cell("elastic", "detokenizer", "SIGSTOP", LOST, EXIT_FAILED, STOPPED_S),
    Cell("elastic", "front", "SIGKILL", "broken", KILLED),
    Cell("elastic", "front", "SIGSTOP", "", None),
    Cell("elastic", "front", "SIGTERM", "", 0),
)


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(
            cell,
            marks=() if cell.in_each_run else pytest.mark.full,
            id=f"{cell.layout}-{cell.process}-{cell.signal}",
        )
        for cell in CELLS
    ],
)
def test_a_process_ends(cell: Cell, tmp_path: Path) -> None:
    with mortal(tmp_path, *KEYS, *LAYOUTS[cell.layout]) as server:
        streams = [Stream(server.server.url, LONG, KEY) for _ in range(4)]
        for stream in streams:
            stream.wait_for_tokens()
        hit(server, cell)
        began = time.monotonic()
        if cell.status is None:
            if cell.process == "front":
                time.sleep(3.0)
                os.kill(server.pid, signal.SIGCONT)
            _goes_on(server, streams)
        status = server.ends_with(cell.after_s + DRAIN_S)
        seconds = time.monotonic() - began
        print(f"{cell}: {status} after {seconds:.2f} s")  # noqa: T201
        assert status == (cell.status or 0)
        if cell.status == EXIT_FAILED:
            assert cell.after_s <= seconds < cell.after_s + ENDS_S
        for stream in streams:
            stream.join()
            assert ("broken" if stream.broken else stream.error) == cell.error
            assert stream.is_done or cell.error
        if cell.layout == "two ranks":
            assert any(path.name.startswith("sgl_shm_mq") for path in server.shared)


def hit(server: Mortal, cell: Cell) -> None:
    if cell.process == "front":
        os.kill(server.pid, getattr(signal, cell.signal))
    else:
        os.kill(server.named(PROCESSES[cell.process])[0], getattr(signal, cell.signal))


def _goes_on(server: Mortal, streams: list[Stream]) -> None:
    for stream in streams:
        stream.join(90.0)
    server.wait_until_ready(60.0)
    os.kill(server.pid, signal.SIGTERM)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_takes_too_long_is_cut(layout: str, tmp_path: Path) -> None:
    with mortal(tmp_path, *KEYS, *LAYOUTS[layout], "--drain-timeout", "0.1") as server:
        streams = [Stream(server.server.url, LONG, KEY) for _ in range(4)]
        for stream in streams:
            stream.wait_for_tokens()
        os.kill(server.pid, signal.SIGTERM)
        assert server.ends_with(2 * ENDS_S) == EXIT_CUT
        for stream in streams:
            stream.end()
        assert "DrainTimeoutError" in {stream.error for stream in streams}


@pytest.mark.full
def test_a_server_that_was_scaled_leaves_nothing(tmp_path: Path) -> None:
    """The instances that served before have gone, and what they shared; then the last one."""
    sizes = ("--max-devices", "2", "--device-memory", "64MiB", "--standby-ranks", "0")
    with mortal(tmp_path, "--elastic", *sizes) as server:
        for size in (2, 1):
            answer = requests.post(
                f"{server.server.url}/v1/scale", json={"dp_size": size}, timeout=60
            )
            assert answer.status_code == 202, answer.text
            operation = f"/v1/scale/{answer.json()['id']}"
            wait_until(lambda at=operation: server.get(at).json()["state"] == "succeeded", 120.0)  # type: ignore[misc]
            server.note_shared()
        assert server.shared
        os.kill(server.pid, signal.SIGTERM)
        assert server.ends_with(DRAIN_S) == 0
