"""bench/soak/call_counter.py: what a step calls, exactly; two servers that do the same, alike."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from bench.soak import call_counter, token_time

STEPS = """
import math, os, signal
def helper(): return math.sqrt(2.0)
def run_batch(extra):
    helper()
    for _ in range(extra): helper()
def process_batch_result(): return [len("x") for _ in range(2)]
def steps(count, extra):
    for _ in range(count):
        helper()  # outside of a step
        run_batch(extra); process_batch_result()
steps(1, 5)
os.kill(os.getpid(), signal.SIGUSR2)
steps(3, {extra})
os.kill(os.getpid(), signal.SIGUSR2)
steps(1, 5)
"""


def counted(folder: Path, extra: int) -> Counter[str]:
    """Calls of a step, by the server's own way: a module that Python imports by itself."""
    folder = folder / "managers"
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(Path(call_counter.__file__).read_text())
    program = folder / "scheduler.py"
    program.write_text(STEPS.replace("{extra}", str(extra)))
    env = {**os.environ, "PYTHONPATH": str(folder), call_counter.FOLDER_VARIABLE: str(folder / "c")}
    subprocess.run([sys.executable, str(program)], env=env, check=True, timeout=60)
    (written,) = folder.glob("c.*")
    found: Counter[str] = Counter()
    for of in json.loads(written.read_text()).values():
        assert of["times"] == 3
        for name, calls in of["calls"].items():
            found[name] += calls / of["times"]
    return found


def test_calls_of_a_step_are_counted_exactly(tmp_path: Path) -> None:
    found = counted(tmp_path / "a", extra=1)
    helpers = [name for name in found if name.endswith("scheduler.py:helper")]
    assert [found[name] for name in helpers] == [2], "those outside of a step do not count"
    assert found["sqrt"] == 2
    assert found["len"] == 2
    assert found == counted(tmp_path / "b", extra=1)


def test_one_call_more_shows(tmp_path: Path) -> None:
    found = token_time.compared(counted(tmp_path / "a", extra=2), counted(tmp_path / "b", extra=1))
    assert sorted(found["differ"].values()) == [1, 1]
    assert found["this / other"] > 1.1
    assert found["this"] == found["other"] + 2


def test_a_mean_over_starts_lies_where_its_values_say() -> None:
    """Student's t of three degrees of freedom is 3.182; a start by itself says nothing."""
    found = token_time._mean([1.01, 1.03, 0.99, 1.01])
    assert found["mean"] == pytest.approx(1.01)
    half = 3.182 * math.sqrt(0.0008 / 3) / 2
    assert found["mean_95"] == pytest.approx([1.01 - half, 1.01 + half], abs=1e-5)
    assert token_time._mean([1.0])["mean_95"] is None
