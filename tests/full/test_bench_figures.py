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


@pytest.mark.parametrize(
    ("module", "keys"),
    [
        ("figure5", {"adapters": 5, "alpha": 0.3, "rate": 0.5}),
        ("figure6", {"setting": "half", "alpha": 0.32, "hot_share": 0.801}),
    ],
)
def test_a_figure_has_a_row_of_ratios(module: str, keys: dict[str, Any], tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"bench.expertweave.{module}", "--quick"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((tmp_path / f"expertweave_{module}.json").read_text())
    assert result["is_complete"]
    (row,) = result["rows"]
    assert row.items() >= keys.items()
    assert row["requests_per_second"] > 0
    for metric in METRICS:
        assert 0 < row[metric]["min"] <= row[metric]["median"] <= row[metric]["max"], metric
    # The floor differs from round to round, so the medians' difference only nearly fits.
    assert row.get("tpot_floor", 1) >= 1
    if module == "figure5":
        assert row["tpot_over_floor"]["min"] <= row["tpot"]["max"] - 1 + 1e-9


def test_a_server_that_cannot_start_is_an_error_and_cores_are_as_before(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    bad = ServerCommand(["--model-path", str(tmp_path / "missing")], sorted(before)[:1])
    with pytest.raises(serving.ServerError, match="missing"), servers({"bad": bad}):
        pytest.fail("there is no server")
    assert os.sched_getaffinity(0) == before
