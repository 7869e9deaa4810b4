"""`sgl-esft offload`: a trace replayed, a machine measured."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_esft.errors import ConfigError
from sgl_esft.formats.model_spec import read_moe_spec
from sgl_esft.memory.report import ExpertTiers, MemoryReport
from sgl_esft.offload.advise import Machine, advise
from sgl_esft.offload.decisions import Decisions
from sgl_esft.offload.policies import POLICIES
from sgl_esft.offload.simulate import replay
from sgl_esft.offload.speed import fit, read_points
from sgl_esft.offload.trace import (
    SlotChange,
    TraceHeader,
    TraceStep,
    TraceWriter,
    read_header_of,
    read_trace,
)
from sgl_esft.tools import decode_windows
from sgl_esft.tools.cli import EXIT_OK, EXIT_USER, main
from tests.support import memory_reports
from tests.support.loopback import JsonHandler, served, url_of

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
    assert rows["lru", 4]["recall"] == []
    recall = {(each["layer"], each["distance"]): each for each in rows["finemoe", 4]["recall"]}
    assert set(recall) == {(0, 1), (1, 2), (2, 3)}, "--prefetch-distance 3: by the embedding"
    for each in recall.values():
        assert each["recall"] == each["num_found"] / each["num_asked"] > 0.9
    best = rows["lru", 4]["belady_hit_rate"]
    assert rows["lru", 4]["num_hits"] / rows["lru", 4]["num_asked"] <= best


def test_simulate_keeps_maps_by_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture, root: Path
) -> None:
    """Two adapters whose tokens begin alike and go on differently, one after the other."""
    argv = ["offload", "simulate", "--cache", "4", "--policy", "finemoe", "--json"]
    maps = np.broadcast_to(np.arange(8), (3, 3, 8))
    found = {}
    for owners in ((7, 5), ()):
        folder = tmp_path / f"trace-{len(owners)}"
        writer = TraceWriter(folder, HEADER, 1 << 30)
        writer.add(SlotChange(maps, (), owners))
        for number in range(60):
            slot = number % 2
            ids = np.array([[[0, 1]], [[2 + 2 * slot, 3 + 2 * slot]], [[2 * slot, 7]]])
            probs = np.full((3, 1, 8), 0.01, np.float32)
            np.put_along_axis(probs, ids, 0.47, axis=2)
            one = np.zeros((1, 64), np.float32)
            writer.add(TraceStep((slot,), np.array([slot]), ids, probs, one))
        writer.flush()
        for by in ("all", "adapter"):
            code = main([*argv, str(folder), "--store-by", by, "--prefetch-distance", "1"])
            said = capsys.readouterr()
            found[by, owners] = (code, said.out if code == EXIT_OK else said.err)
    assert found["adapter", ()][0] == EXIT_USER
    assert "record the trace again" in found["adapter", ()][1]
    recall = {
        by: next(row["recall"] for row in json.loads(text)[0]["recall"] if row["layer"] == 1)
        for (by, owners), (code, text) in found.items()
        if owners
    }
    assert recall["all"] < 0.6
    assert recall["adapter"] > 0.9


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


# ---- calibrate ----

NEEDED, LOADS, LOAD_BYTES, STALL_S = 6, 2, 1000, 0.001  # of a token, of the server below
MAX_BYTES_PER_S = 5_000_000
TIERS = ExpertTiers("lfu", 8, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, MAX_BYTES_PER_S)


@dataclass
class Decoding:
    """A server of tiers that answers with a token every `step_s`, and counts."""

    tiers: ExpertTiers | None = TIERS
    adapters: tuple[str, ...] = ("law", "math")
    has_metrics: bool = True
    prefetches: int = 0
    failures: int = 0
    error_at: int = 1 << 30  # of a stream's tokens
    step_s: float = 0.003
    asked: list[dict[str, Any]] = field(default_factory=list)
    num_tokens: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def report(self) -> bytes:
        device = replace(memory_reports.virtual_device(), tiers=self.tiers)
        return json.dumps(MemoryReport((device,)).to_json()).encode()

    def listing(self) -> dict[str, Any]:
        loaded = [{"name": name, "state": "on_device"} for name in self.adapters]
        return {"adapters": [*loaded, {"name": "idle", "state": "on_disk"}]}

    def metrics(self) -> str:
        """Rank 1 has counted something else, and prompts are no decoded tokens."""
        counted = {
            'expert_requests_total{rank="0"}': NEEDED * self.num_tokens,
            'expert_requests_total{rank="1"}': 7777 * self.num_tokens,
            'expert_loads_total{rank="0",why="demand"}': LOADS * self.num_tokens,
            'expert_loads_total{rank="0",why="prefetch"}': self.prefetches * self.num_tokens,
            'expert_read_bytes_total{rank="0"}': LOADS * LOAD_BYTES * self.num_tokens,
            'expert_read_failures_total{rank="0"}': self.failures * self.num_tokens,
            'expert_stall_seconds_total{rank="0"}': STALL_S * self.num_tokens,
        }
        tokens = {"decode": self.num_tokens, "prefill_compute": 9 * self.num_tokens}
        of_sglang = 'sglang:realtime_tokens_total{tp_rank="0",mode="%s"} %d\n'
        return "".join(
            [
                *(f"sgl_esft:{name} {value}\n" for name, value in counted.items()),
                *(of_sglang % each for each in tokens.items()),
            ]
        )

    def events(self) -> Iterator[dict[str, Any]]:
        for number in itertools.count(1):
            time.sleep(self.step_s)
            if number == self.error_at:
                yield {"error": {"message": "no more"}}
                return
            with self.lock:
                self.num_tokens += 1
            yield {"text": "w" * number, "meta_info": {"completion_tokens": number}}


@contextmanager
def decoding(server: Decoding) -> Iterator[str]:
    class Handler(JsonHandler):
        def do_GET(self) -> None:
            if self.path == "/v1/memory":
                self.send_bytes(200, server.report())
            elif self.path == "/v1/adapters":
                self.send_json(200, server.listing())
            else:
                self.send_bytes(200 if server.has_metrics else 404, server.metrics().encode())

        def do_POST(self) -> None:
            body = self.read_json()
            server.asked.append(body)
            if not body.get("stream"):
                self.send_json(200, {"text": f"{body['text']} cat hat"})
                return
            with suppress(ConnectionError):  # a window does not wait for a stream's end
                self.send_events(server.events())

    with served(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as http:
        yield url_of(http)


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_windows, "NEW_TOKENS", 32)
    monkeypatch.setattr(decode_windows, "WARM_TOKENS", 4)


def _calibrate(url: str, out: Path, *more: str) -> int:
    argv = ["offload", "calibrate", "--url", url, "--out", str(out), "--seconds", "6"]
    return main([*argv, "--batch-sizes", "1", "2", "3", *more])


@pytest.mark.usefixtures("_short")
def test_calibrate_writes_what_windows_count(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out, server = tmp_path / "speed.json", Decoding()
    with decoding(server) as url:
        assert _calibrate(url, out) == EXIT_OK
    points = read_points(out)
    settings = [(p.num_tokens, p.with_adapters) for p in points]
    forth = [(size, adapters) for adapters in (False, True) for size in (1, 2, 3)]
    assert settings == [*forth, *reversed(forth), *forth]
    for point in points:
        assert (point.num_rows, point.num_layers) == (8, 2)
        assert point.max_bytes_per_s == MAX_BYTES_PER_S
        assert point.step_s > 0.003
        assert point.num_needed == pytest.approx(NEEDED * point.num_tokens)
        assert point.num_loads / point.num_needed == pytest.approx(LOADS / NEEDED)
        assert point.read_bytes / point.num_loads == pytest.approx(LOAD_BYTES)
        assert point.stall_s == pytest.approx(STALL_S * point.num_tokens)
    streams = [each for each in server.asked if each.get("stream")]
    assert {each.get("adapter") for each in streams} == {None, "law", "math"}
    assert all(each["sampling_params"]["temperature"] == 1.0 for each in streams)
    assert len({each["text"] for each in streams}) == len(streams), "prompts do not repeat"
    assert {"cat", "hat"} <= {word for each in streams for word in each["text"].split()}
    told = json.loads(out.read_text())
    assert told["costs"]["fixed_s"] == fit(points).fixed_s
    assert told["machine"]["cores"] >= 1
    lines = capsys.readouterr().out.splitlines()
    assert "8 rows in each of 2 layers, lfu; adapters: law, math" in lines[0]
    assert len(lines) == 1 + len(points) + 2
    assert _calibrate(url, out) == EXIT_USER
    assert "speed.json exists: name another --out" in capsys.readouterr().err


@pytest.mark.usefixtures("_short")
def test_calibrate_of_the_base_asks_no_adapter(tmp_path: Path) -> None:
    server = Decoding()
    with decoding(server) as url:
        assert _calibrate(url, tmp_path / "speed.json", "--base-only") == EXIT_OK
    assert not any("adapter" in each for each in server.asked)
    assert not any(point.with_adapters for point in read_points(tmp_path / "speed.json"))


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize(
    ("server", "words"),
    [
        (Decoding(tiers=None), "has all experts on the device: start --expert-cache"),
        (Decoding(has_metrics=False), "start the server with --enable-metrics"),
        (Decoding(prefetches=1), "fetches ahead (lfu)"),
        (Decoding(failures=1), "experts could not be read"),
        (Decoding(error_at=12), "no more"),
    ],
)
def test_calibrate_names_what_it_cannot_measure(
    server: Decoding, words: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with decoding(server) as url:
        assert _calibrate(url, tmp_path / "speed.json") == EXIT_USER
    assert words in capsys.readouterr().err
    assert not (tmp_path / "speed.json").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--batch-sizes", "1", "2", "2"], "--batch-sizes [1, 2, 2]: give 3 different ones"),
        (["--batch-sizes", "0", "1", "2"], "--batch-sizes [0, 1, 2]"),
        (["--seconds", "0"], "--seconds is 0.0"),
        ([], "nothing answers at"),
    ],
)
def test_bad_calibrations_are_named_at_once(
    argv: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert _calibrate("http://127.0.0.1:1", tmp_path / "speed.json", *argv) == EXIT_USER
    assert words in capsys.readouterr().err


def test_counters_that_are_missing_are_named() -> None:
    text = Decoding(num_tokens=3).metrics()
    assert decode_windows.counters_in(text)["needed"] == 3 * NEEDED
    without = text.replace("expert_stall", "expert_other")
    with pytest.raises(ConfigError, match="does not have stall_s of rank 0"):
        decode_windows.counters_in(without)
