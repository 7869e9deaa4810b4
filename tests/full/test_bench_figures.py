"""The commands of figures 5 and 6, tiny: real servers, real client, every row and key there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.common.load import METRICS, ServerCommand, servers
from sgl_esft.zoo import serving
from tests.support.servers import ROOT

pytestmark = pytest.mark.server


def run_quick(module: str, out: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{module}", "--quick", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads((out / f"{module}.json").read_text())
    return result


def check_row(row: dict[str, Any]) -> None:
    for metric in METRICS:
        spread = row[metric]
        assert 0 < spread["min"] <= spread["median"] <= spread["max"], metric
    assert row["requests_per_second"] > 0


def test_figure5_has_a_row_with_measured_and_floor(tmp_path: Path) -> None:
    result = run_quick("figure5", tmp_path)
    assert result["is_complete"]
    (row,) = result["rows"]
    assert (row["adapters"], row["alpha"], row["rate"]) == (5, 0.3, 0.5)
    check_row(row)
    assert row["tpot_floor"] >= 1
    # The floor differs from round to round, so the medians' difference only nearly fits.
    assert row["tpot_over_floor"]["min"] <= row["tpot"]["max"] - 1 + 1e-9


def test_figure6_has_a_row_of_woven_over_merged(tmp_path: Path) -> None:
    result = run_quick("figure6", tmp_path)
    assert result["is_complete"]
    (row,) = result["rows"]
    assert (row["setting"], row["alpha"], row["hot_share"]) == ("half", 0.32, 0.801)
    check_row(row)


def test_a_server_that_cannot_start_is_an_error_and_cores_are_as_before(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    bad = ServerCommand(["--model-path", str(tmp_path / "missing")], sorted(before)[:1])
    with pytest.raises(serving.ServerError, match="missing"), servers({"bad": bad}):
        pytest.fail("there is no server")
    assert os.sched_getaffinity(0) == before
