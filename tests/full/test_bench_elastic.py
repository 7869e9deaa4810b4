"""The commands of the elastic benches, tiny: real servers, real load, every result there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import ROOT

# Minutes of scaling by the slow baselines: with the soak tests, out of `make test`.
pytestmark = [pytest.mark.server, pytest.mark.soak, pytest.mark.timeout(1200)]


def run_quick(module: str, out: Path, *more: str) -> None:
    command = [sys.executable, "-m", f"bench.{module}", "--quick", "--out", str(out), *more]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=1100, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def result(out: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    assert found["is_complete"]
    return found


def test_scales_are_timed_over_a_cold_restart(tmp_path: Path) -> None:
    run_quick("elasticmoe.scales", tmp_path)
    for name, step in (("elasticmoe_figure7", "1 -> 2"), ("elasticmoe_figure12", "2 -> 1")):
        rows = {row["strategy"]: row for row in result(tmp_path, name)["rows"]}
        assert set(rows) == {"elastic", "cold_restart"}
        assert {row["step"] for row in rows.values()} == {step}
        assert rows["cold_restart"]["ready_over_cold"]["median"] == 1
        # The paper's claim, with much room: on this machine it is about a thirtieth.
        assert rows["elastic"]["ready_over_cold"]["median"] < 0.5
        assert rows["elastic"]["gap_over_cold"]["median"] < 0.5
    (row, _) = result(tmp_path, "elasticmoe_figure8")["rows"]
    assert row["peak_bytes"]["median"] > 10e6
    breakdown = result(tmp_path, "elasticmoe_figure11")["rows"]
    assert {"memory", "prepare", "switch"} <= set(breakdown[0]["phases"])
