"""A route that works on a text: in a process of its own, ended at its time, while others go on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psutil
import pytest
from fastapi import FastAPI, HTTPException, Request
from starlette.middleware import Middleware

from sgl_esft.health.faults import ProcessState
from sgl_esft.health.processes import state_of
from sgl_esft.http import text_jobs
from sgl_esft.http.text_jobs import SMALL_BYTES, TextJobs
from tests.support.servers import ROOT
from tests.support.waiting import wait_until

pytestmark = pytest.mark.anyio

LIMIT_S = 1.0
LARGE = "a" * (SMALL_BYTES + 1)
ROUTE = "/parse_function_call"


def served(timeout_s: float = LIMIT_S) -> FastAPI:
    app = FastAPI()

    @app.post(ROUTE)
    async def parse(body: dict[str, Any], request: Request) -> dict[str, Any]:
        if body.get("spins"):
            while True:
                pass
        if body.get("grows"):
            bytearray(text_jobs.MEMORY_BYTES + (64 << 20))
        if body.get("dies"):
            os._exit(3)
        if body.get("fails"):
            raise HTTPException(400, "not a parser")
        return {"pid": os.getpid(), "length": len(body["text"]), "app": request.app is app}

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {}

    jobs = Middleware(TextJobs, fastapi=app, routes={ROUTE}, timeout_s=timeout_s)
    app.user_middleware.append(jobs)
    return app


def fork_servers() -> list[psutil.Process]:
    """Children that are forks of this process, which other tests' are not."""
    own = psutil.Process()
    return [child for child in own.children() if child.cmdline() == own.cmdline()]


@asynccontextmanager
async def client(timeout_s: float = LIMIT_S) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(served(timeout_s), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as found:
        yield found
    for child in fork_servers():
        child.kill()
        child.wait()


async def test_a_large_text_is_another_processs_and_a_small_one_is_not() -> None:
    async with client() as http:
        small = (await http.post(ROUTE, json={"text": "a"})).json()
        assert not fork_servers()  # none before it is needed
        large = [(await http.post(ROUTE, json={"text": LARGE})).json() for _ in range(2)]
    assert small == {"pid": os.getpid(), "length": 1, "app": True}
    assert {found["pid"] for found in large}.isdisjoint({os.getpid()})
    assert large[0]["pid"] != large[1]["pid"]
    assert all(found["length"] == len(LARGE) and found["app"] for found in large)


async def test_a_job_past_its_time_is_killed_and_the_event_loop_goes_on() -> None:
    async with client() as http:
        started = time.monotonic()
        spinning = asyncio.ensure_future(http.post(ROUTE, json={"text": LARGE, "spins": 1}))
        slowest = 0.0
        while not spinning.done():
            before = time.monotonic()
            assert (await http.get("/healthz")).status_code == 200
            slowest = max(slowest, time.monotonic() - before)
            await asyncio.sleep(0.02)
        answer = spinning.result()
        assert answer.status_code == 413
        assert answer.json()["error"]["type"] == "TextTimeoutError", answer.text
        assert "--text-timeout" in answer.text
        assert LIMIT_S <= time.monotonic() - started < LIMIT_S + 1
        assert slowest < 0.5
        [fork_server] = fork_servers()
        assert not fork_server.children()


@pytest.mark.parametrize(("how", "status"), [("fails", 400), ("dies", 500), ("grows", 413)])
async def test_what_fails_in_a_job_is_answered(how: str, status: int) -> None:
    async with client() as http:
        answer = await http.post(ROUTE, json={"text": LARGE, how: 1})
        assert answer.status_code == status
        assert how != "grows" or "takes more than 1024 MiB" in answer.text
        assert (await http.post(ROUTE, json={"text": LARGE})).status_code == 200


async def test_a_killed_fork_server_is_replaced() -> None:
    async with client() as http:
        await http.post(ROUTE, json={"text": LARGE})
        [first] = fork_servers()
        first.kill()
        while first.status() != psutil.STATUS_ZOMBIE:  # its connections are closed by then
            await asyncio.sleep(0.01)
        again = await http.post(ROUTE, json={"text": LARGE})
        assert again.status_code == 200, again.text
        assert [child.pid for child in fork_servers()] != [first.pid]


async def test_jobs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_jobs, "MAX_JOBS", 1)
    async with client() as http:
        body = {"text": LARGE, "spins": 1}
        found = await asyncio.gather(*(http.post(ROUTE, json=body) for _ in range(4)))
    statuses = sorted(answer.status_code for answer in found)
    assert statuses.count(503) >= 2, statuses
    assert set(statuses) == {413, 503}


# The job spins for longer than the test waits: only the front's end can be what ends it.
FRONT = """
import asyncio
from tests.fast.http.test_text_jobs import LARGE, ROUTE, client, fork_servers

async def front():
    async with client(timeout_s=600) as http:
        await http.post(ROUTE, json={"text": LARGE})
        [fork_server] = fork_servers()
        while fork_server.children():  # the job that has answered may still be ending
            await asyncio.sleep(0.01)
        job = asyncio.ensure_future(http.post(ROUTE, json={"text": LARGE, "spins": 1}))
        while not (jobs := fork_server.children()):
            await asyncio.sleep(0.01)
        print(fork_server.pid, jobs[0].pid, flush=True)
        await job

asyncio.run(front())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_processes_end_with_the_front(how: signal.Signals) -> None:
    command = [sys.executable, "-c", FRONT]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as front:
        try:
            assert front.stdout is not None
            pids = [int(pid) for pid in front.stdout.readline().split()]
            assert len(pids) == 2
            assert not any(state_of(pid) is ProcessState.ENDED for pid in pids)
            front.send_signal(how)
            wait_until(lambda: all(state_of(pid) is ProcessState.ENDED for pid in pids))
        finally:
            front.kill()
