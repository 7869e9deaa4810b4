"""What a server prints, from its start to its end, where it has no terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import requests

from sgl_esft.ports import pick_free_port
from tests.server.ending import ELASTIC
from tests.support.servers import ROOT, START_TIMEOUT_S, TP2_EP2

MOST_LINES = 15  # until it is ready
END_TIMEOUT_S = 60.0
BAR = re.compile(r"loading.*shards|%\|")  # tqdm's, and SGLang's names for them

pytestmark = [pytest.mark.server, pytest.mark.full]


class Printed(NamedTuple):
    """Both streams, in the order in which they were written."""

    start: list[str]
    end: list[str]
    status: int


def printed_by(folder: Path, *args: str) -> Printed:
    """Started; once it has said all of its start asked for its models, and to end by SIGINT."""
    port = str(pick_free_port())
    command = [sys.executable, "-m", "sgl_esft.launch_server", "--port", port]
    environment = {**os.environ, "TMPDIR": str(folder)}  # not another server's remains
    log = folder / "log"
    with log.open("wb") as to:
        process = subprocess.Popen(
            [*command, *args],
            cwd=ROOT,
            stdout=to,
            stderr=to,
            start_new_session=True,
            env=environment,
        )
    try:
        start = wait_for_start(log, process)
        models = requests.get(f"http://127.0.0.1:{port}/v1/models", timeout=END_TIMEOUT_S)
        assert models.status_code == 200, models.text
        process.send_signal(signal.SIGINT)
        status = process.wait(END_TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Printed(start, log.read_text().splitlines()[len(start) :], status)


def wait_for_start(log: Path, process: subprocess.Popen[bytes]) -> list[str]:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if "curl http" in log.read_text() and log.read_text().endswith("\n"):
            return log.read_text().splitlines()
        time.sleep(0.1)
    raise AssertionError(f"{process.poll()} after:\n{log.read_text()}")


@pytest.mark.parametrize("args", [(), TP2_EP2, ELASTIC], ids=["plain", "two-ranks", "elastic"])
def test_a_start_is_a_dozen_lines_and_an_end_is_one(args: tuple[str, ...], tmp_path: Path) -> None:
    printed = printed_by(tmp_path, *args)
    assert len(printed.start) <= MOST_LINES, printed.start
    said = [line.split()[0] for line in printed.start if line.startswith("  ")]
    devices = ["devices"] if args == ELASTIC else []
    assert not [line for line in printed.start if BAR.search(line)], printed.start
    assert said == ["model", "adapters", "memory", *devices, "address", "try"]
    assert len(printed.end) == 1, printed.end
    assert printed.end[0].endswith("health: SIGINT, stopping...")
    assert printed.status == 0


def test_with_json_every_line_is_an_object(tmp_path: Path) -> None:
    printed = printed_by(tmp_path, "--log-format", "json")
    lines = [json.loads(line) for line in (*printed.start, *printed.end)]
    assert {"time", "level", "logger", "message", "process"} <= set.intersection(*map(set, lines))
    messages = [line["message"] for line in lines]
    assert [m[:3] for m in messages if m[1:3] == "/3"] == ["1/3", "2/3", "3/3"]
    ending = {"GET /v1/models 200", "health: SIGINT, stopping..."}  # the access log is JSON's
    assert ending <= set(messages[len(printed.start) :])
