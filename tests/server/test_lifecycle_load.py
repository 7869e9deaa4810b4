"""The load test of the adapters' life, short; its ten minutes are a soak test."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.elasticmoe.load import scale
from bench.elasticmoe.rounds import wait_until_parked
from bench.soak.lifecycle_checks import wrong_answers
from bench.soak.lifecycle_load import (
    ELASTIC_SIZES,
    PATTERNS,
    QUICK,
    Ground,
    ask,
    client_command,
    measure,
    prepare,
    server_arguments,
)
from bench.soak.lifecycle_operator import History
from sgl_esft import zoo
from sgl_esft.zoo import serving
from tests.support.servers import ROOT, ServerPool, ServerSpec

pytestmark = pytest.mark.server


def check_row(row: dict[str, Any]) -> None:
    assert (row["failed"], row["wrong"], row["failed_operations"]) == (0, 0, 0)
    assert row["requests"] > 50
    assert len(row["longest_wait_s"]) == 8, "every adapter was answered"


@pytest.fixture(scope="module")
def ground(server_pool: ServerPool, tmp_path_factory: pytest.TempPathFactory) -> Ground:
    plain = server_pool.get(ServerSpec(zoo.base_path(), weave=False))
    return prepare(tmp_path_factory.mktemp("lifecycle"), QUICK, plain.url)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((), id="plain"),
        pytest.param(ELASTIC_SIZES, id="elastic", marks=pytest.mark.full),
    ],
)
def test_answers_are_right_while_adapters_change(sizes: tuple[int, ...], ground: Ground) -> None:
    """Elastic loads wait for adapters in use, so the operations take longer there."""
    found: dict[str, Any] = {}
    plan = replace(QUICK, sizes=sizes, pattern_s=60 if sizes else QUICK.pattern_s)
    measure(ground, plan, found.update)
    (row,) = found["rows"]
    check_row(row)
    kinds = {"load", "replace", "pin", "unload_live", "load_live"}
    assert kinds <= set(row["operations"])


@pytest.mark.full
@pytest.mark.alone  # it counts requests of a time
def test_scales_while_adapters_take_turns(ground: Ground) -> None:
    """Each begins with a load on its way: the ranks that take over must know that adapter too."""
    plan = replace(QUICK, sizes=ELASTIC_SIZES, pattern_s=45.0)
    record = ground.work / "turns.jsonl"
    traffic = ["--lora-name", *ground.live, *PATTERNS["round_robin"]]
    with serving.server(server_arguments(ground, plan)) as url:
        wait_until_parked(url, max(ELASTIC_SIZES))
        command = client_command(ground, plan, url, plan.pattern_s, record, traffic)

        async def scale_on() -> None:
            end_s = time.monotonic() + plan.pattern_s - 5
            for size in itertools.cycle(ELASTIC_SIZES):
                if time.monotonic() > end_s:
                    return
                operation = await scale(url, {"dp_size": size})
                assert operation["state"] == "succeeded", operation

        requests = asyncio.run(ask(command, record, scale_on))
    assert not [request.error for request in requests if request.error]
    assert not wrong_answers(requests, History.of(ground.live, []), ground.texts)
    assert len(requests) > 50


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("more", [[], ["--elastic"]], ids=["plain", "elastic"])
def test_ten_minutes(more: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.soak.lifecycle_load", *more]
    command += ["--turns", "0", "--out", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=1700, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (file,) = tmp_path.glob("*.json")
    rows = json.loads(file.read_text())["rows"]
    assert [row["pattern"] for row in rows] == list(PATTERNS)
    for row in rows:
        check_row(row)
