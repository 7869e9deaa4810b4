"""The commands of the benches of quantised experts, tiny: real servers, every figure there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import ROOT

pytestmark = [pytest.mark.server, pytest.mark.timeout(1200)]


def run_quick(module: str, out: Path, *more: str) -> Any:
    command = [sys.executable, "-m", f"bench.quantised.{module}", "--quick", "--out", str(out)]
    done = subprocess.run(
        [*command, *more], cwd=ROOT, capture_output=True, text=True, timeout=1100, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (path,) = out.glob("*.json")
    return json.loads(path.read_text())


def test_quantised_experts_keep_the_demos_accuracy_merged_and_woven(tmp_path: Path) -> None:
    """The bench ends with an error where an answer differs and is no tie."""
    result = run_quick("zoo_quality", tmp_path, "--schemes", "bf16", "int8", "int4")
    assert result["is_complete"]
    assert [row["scheme"] for row in result["rows"]] == ["bf16"] * 2 + ["int8"] * 2 + ["int4"] * 2
    for row in result["rows"]:
        assert row["base"] < 0.5 < row["woven"], row
        assert row["as_bf16"] > 0.5, row
        assert row["woven"] >= row["merged"] - row["differ"] / result["examples_per_task"], row


def test_a_large_models_memory_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    result = run_quick("large", tmp_path / "out", "--folder", str(folder))
    assert result["is_complete"]
    assert [row["system"] for row in result["rows"]] == ["int8", "int8-tiers", "int4"]
    for row in result["rows"]:
        assert row["answers"] == 5 + 5 + 10, row
        assert row["distinct_answers"] > 1, "adapters change what is generated"
        assert 3e8 < row["serving_bytes"] <= row["peak_bytes"] < result["memory_bytes"], row
        assert row["peak_own_bytes"] < row["peak_bytes"], row


def test_a_token_is_timed_by_itself_and_served(tmp_path: Path) -> None:
    result = run_quick("decode", tmp_path / "out", "--folder", str(tmp_path / "folder"))
    assert [row["num_tokens"] for row in result["layers"]] == [1, 4]
    assert result["served"]["speed"]["runs"] == 2
    assert 0 < result["served"]["experts_share"] < 1
