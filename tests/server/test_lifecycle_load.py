"""The load test of the adapters' life, short; its ten minutes are a soak test."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.lifecycle_load import ELASTIC_SIZES, PATTERNS, QUICK, Ground, measure, prepare
from sgl_esft import zoo
from tests.servers import ROOT, ServerPool, ServerSpec

pytestmark = pytest.mark.server


def check_row(row: dict[str, Any]) -> None:
    assert (row["failed"], row["wrong"], row["failed_operations"]) == (0, 0, 0)
    assert row["requests"] > 50
    assert len(row["longest_wait_s"]) == 8, "every adapter was answered"


@pytest.fixture(scope="module")
def ground(server_pool: ServerPool, tmp_path_factory: pytest.TempPathFactory) -> Ground:
    plain = server_pool.get(ServerSpec(zoo.base_path(), weave=False))
    return prepare(tmp_path_factory.mktemp("lifecycle"), QUICK, plain.url)


@pytest.mark.parametrize("sizes", [(), ELASTIC_SIZES], ids=["plain", "elastic"])
def test_answers_are_right_while_adapters_change(sizes: tuple[int, ...], ground: Ground) -> None:
    """Elastic loads wait for adapters in use, so the operations take longer there."""
    found: dict[str, Any] = {}
    plan = replace(QUICK, sizes=sizes, pattern_s=30 if sizes else QUICK.pattern_s)
    measure(ground, plan, found.update)
    (row,) = found["rows"]
    check_row(row)
    kinds = {"load", "replace", "pin", "unload_live", "load_live"}
    assert kinds <= set(row["operations"])


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("more", [[], ["--elastic"]], ids=["plain", "elastic"])
def test_ten_minutes(more: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.lifecycle_load", *more]
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
