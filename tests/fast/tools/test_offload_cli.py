"""`sgl-esft offload`: a trace replayed, a machine measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sgl_esft.formats.model_spec import read_moe_spec
from sgl_esft.offload.advise import Machine, advise
from sgl_esft.offload.decisions import Decisions
from sgl_esft.offload.policies import POLICIES
from sgl_esft.offload.simulate import replay
from sgl_esft.offload.trace import TraceHeader, TraceStep, TraceWriter, read_header_of, read_trace
from sgl_esft.tools.cli import EXIT_OK, EXIT_USER, main

HEADER = TraceHeader(
    num_layers=3, num_experts=8, top_k=2, num_slots=16, num_base=8, embedding_size=64
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Tokens that come back: three kinds of them, by turns."""
    writer = TraceWriter(tmp_path / "trace", HEADER, 1 << 30)
    for number in range(90):
        kind = number % 3
        ids = np.array([[[(2 * kind + layer + k) % 8 for k in range(2)]] for layer in range(3)])
        probs = np.full((3, 1, 8), 0.01, np.float32)
        for layer in range(3):
            probs[layer, 0, ids[layer, 0]] = 0.47
        embedding = np.zeros((1, 64), np.float32)
        embedding[0, kind] = 1.0
        writer.add(TraceStep((kind,), np.array([-1]), ids, probs, embedding))
    writer.flush()
    return tmp_path / "trace"


def test_simulate_says_what_a_replay_counts(trace: Path, capsys: pytest.CaptureFixture) -> None:
    argv = ["offload", "simulate", str(trace), "--cache", "3", "4", "--policy", "lru", "finemoe"]
    assert main([*argv, "--loads-per-layer", "4", "--json"]) == EXIT_OK
    rows = {(row["policy"], row["rows"]): row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == {(p, c) for p in ("lru", "finemoe") for c in (3, 4)}
    header = read_header_of(trace)
    decisions = Decisions(3, 16, 4, POLICIES["lru"], num_base=8, loads_per_layer=4.0)
    expected = replay(header, read_trace(trace), decisions).counts
    assert rows["lru", 4]["num_hits"] == expected.num_hits
    assert rows["finemoe", 4]["num_useful"] > 0
    assert rows["finemoe", 4]["stall_layers"] < rows["lru", 4]["stall_layers"]
    best = rows["lru", 4]["belady_hit_rate"]
    assert rows["lru", 4]["num_hits"] / rows["lru", 4]["num_asked"] <= best


def test_simulate_prints_a_table(trace: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["offload", "simulate", str(trace), "--cache", "4"]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["policy", "rows", "hits", "loads", "ahead", "useful", "stall"]
    assert lines[1].split()[0] == "lfu"
    assert lines[2].startswith("(nothing beats)")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--cache", "1"], "--cache 1: one token needs 2 experts of a layer"),
        (["--cache", "4", "--expert-map-memory", "1G", "--policy", "finemoe"], "'1G'"),
    ],
)
def test_bad_values_are_named(
    trace: Path, argv: list[str], words: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(["offload", "simulate", str(trace), *argv]) == EXIT_USER
    assert words in capsys.readouterr().err


def test_what_is_no_trace_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["offload", "simulate", str(tmp_path), "--cache", "4"]) == EXIT_USER
    assert "header.json" in capsys.readouterr().err


def test_advise_measures_and_proposes(root: Path, capsys: pytest.CaptureFixture) -> None:
    base = root / "base"
    spec = read_moe_spec(base)
    room = 5 * spec.expert_bytes * len(spec.moe_layer_ids)
    argv = ["offload", "advise", str(base), "--memory", f"{room}B", "--seconds", "0.2"]
    assert main(argv) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert "is read in" in lines[0]
    assert lines[-1].startswith("proposed: --expert-cache 5 --expert-policy auto")
    assert main([*argv[:4], "1B", *argv[5:]]) == EXIT_OK
    assert "nothing fits" in capsys.readouterr().out


def test_a_trace_says_more_than_uniform_routing(root: Path, trace: Path) -> None:
    spec = read_moe_spec(root / "base")
    machine = Machine(read_s=1e-3, compute_s=1e-3, num_threads=2, read_bytes=spec.expert_bytes)
    events = list(read_trace(trace))
    routed = advise(spec, 2, machine, 1 << 30, (HEADER, events))
    uniform = advise(spec, 2, machine, 1 << 30)
    half = next(i for i, each in enumerate(uniform) if each.num_rows == 6)
    assert routed[half].hit_rate > uniform[half].hit_rate
    # A layer takes the longer of computing and reading.
    slow = advise(spec, 2, replace(machine, read_s=1.0), 1 << 30)
    assert slow[0].seconds_per_token == pytest.approx(slow[0].loads_per_token * 1.0)
    assert slow[-1].seconds_per_token == pytest.approx(3 * 2 * 1e-3)
