"""The arithmetic of the elastic benches: operations, ratios, windows, rows; no server."""

from __future__ import annotations

import os
from typing import Any

import pytest

from bench.elasticmoe import ablation, after, gap, scales, slo, table1, traffic
from bench.elasticmoe import rounds as elastic_bench
from bench.elasticmoe.load import Ask, Stream
from bench.elasticmoe.rounds import Scaled
from bench.elasticmoe.traffic import Calibration, Targets, Window

ASK = Ask("p", None, 3)
TARGETS = Targets(ttft_s=1.0, tpot_s=0.1)


def operation(*phases: tuple[str, float], state: str = "succeeded") -> dict[str, Any]:
    return {
        "state": state,
        "phases": [{"name": name, "seconds": seconds} for name, seconds in phases],
        "steps": [
            {"kind": "map_kv", "seconds": 0.5, "num_bytes": 0, "copied_bytes": 0},
            {"kind": "copy_trunk", "seconds": 0.25, "num_bytes": 31, "copied_bytes": 30},
            {"kind": "copy_trunk", "seconds": 0.5, "num_bytes": 13, "copied_bytes": 12},
        ],
        "gap_s": 0.1,
        "created_s": 100.0,
        "finished_s": 109.0,
    }


def scaled(old: int, new: int, ready_s: float, gap_s: float = 1.0, peak: int = 100) -> Scaled:
    phases = {"prepare": ready_s / 4, "switch": 3 * ready_s / 4}
    return Scaled(old, new, ready_s, ready_s + 1, gap_s, peak, 0, phases, {"map_kv": 0.1})


def stream(sent_s: float, *token_s: float, error: str = "") -> Stream:
    return Stream(ASK, sent_s, list(token_s), tuple(range(len(token_s))), error)


def test_ready_ends_with_the_last_switch() -> None:
    elastic = operation(("plan", 1), ("memory", 2), ("switch", 3), ("retire", 50), ("after", 9))
    found = elastic_bench.scaled_of(elastic, 1, 2, peak=7)
    assert (found.ready_s, found.total_s, found.gap_s, found.peak_bytes) == (6, 9.0, 0.1, 7)
    assert found.step == "1 -> 2"
    assert found.steps == {"map_kv": 0.5, "copy_trunk": 0.75}
    assert found.copied_bytes == 42
    cold = operation(("plan", 1), ("switch", 2), ("retire", 4), ("prepare", 8), ("switch", 16))
    found = elastic_bench.scaled_of(cold, 1, 2, peak=0)
    assert found.ready_s == 31
    assert found.phases == {"plan": 1, "switch": 18, "retire": 4, "prepare": 8}


def test_a_scale_that_did_not_succeed_is_no_figure() -> None:
    with pytest.raises(ValueError, match="rolled_back"):
        elastic_bench.scaled_of(operation(("switch", 1), state="rolled_back"), 1, 2, 0)
    with pytest.raises(ValueError, match="DoesNotFitError"):
        elastic_bench.scaled_of({"error": {"type": "DoesNotFitError"}}, 1, 2, 0)
    with pytest.raises(ValueError, match="zip"):
        elastic_bench.over([1.0], [1.0, 2.0])


def test_memory_files_are_counted_once_and_a_gone_process_as_nothing() -> None:
    def num_bytes() -> int:
        return sum(elastic_bench.memory_files(os.getpid()).values())

    before = num_bytes()
    fd = os.memfd_create("elastic-bench")
    copy = os.dup(fd)
    try:
        os.truncate(fd, 1 << 20)
        os.pwrite(fd, b"x" * 8192, 0)
        assert num_bytes() - before == 8192
    finally:
        os.close(fd)
        os.close(copy)
    assert elastic_bench.memory_files(-1) == {}
    assert elastic_bench.worker_devices(os.getpid()) == {}


def test_a_file_is_its_first_owners_and_peaks_are_of_one_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = {7: {(1, 10): 100}, 8: {}}
    monkeypatch.setattr(elastic_bench, "worker_devices", lambda _: {7: 0, 8: 1})
    monkeypatch.setattr(elastic_bench, "memory_files", lambda pid: files[pid])
    memory = elastic_bench.DeviceMemory()
    assert memory.now() == {0: 100}
    files[8] = {(1, 10): 100, (1, 11): 40}  # the first is open to be copied from
    assert memory.now() == {0: 100, 1: 40}
    sampler = elastic_bench.MemorySampler(memory)
    for now in ({0: 100, 1: 40}, {0: 60, 1: 70}):
        sampler.take(now)
    assert sampler.peak_bytes == 140
    assert sampler.device_peak_bytes == {0: 100, 1: 70}


def test_a_devices_peak_is_over_the_configuration_that_needs_more_of_it() -> None:
    assert gap.device_ratio({0: 100, 1: 90}, {0: 100}, {0: 50, 1: 60}) == 1.5
    with pytest.raises(ValueError, match="in no configuration"):
        gap.device_ratio({0: 100, 2: 1}, {0: 100}, {0: 50})


def test_rows_of_scales_go_up_and_down_over_cold_restart() -> None:
    rounds = scales.Rounds()
    for ready_s in (2.0, 4.0):
        again = scaled(1, 2, 99.0)
        rounds.add("elastic", [scaled(1, 2, ready_s, 0.5, 150), scaled(2, 1, 1.0), again])
        rounds.add("cold_restart", [scaled(1, 2, 20.0), scaled(2, 1, 10.0)])
    rounds.add("extravagant", [scaled(1, 2, 40.0)])  # a round less
    up = rounds.rows(scales.is_up)
    assert [(row["strategy"], row["step"]) for row in up] == [
        ("elastic", "1 -> 2"),
        ("cold_restart", "1 -> 2"),
    ]
    assert up[0]["ready_over_cold"]["median"] == pytest.approx(0.15)
    assert up[0]["gap_over_cold"]["median"] == 0.5
    assert up[0]["peak_over_cold"]["median"] == 1.5
    down = rounds.rows(lambda each: not scales.is_up(each))
    assert [row["ready_over_cold"]["median"] for row in down] == [0.1, 1.0]
    breakdown = rounds.breakdown()  # in the order of the walk
    assert [row["step"] for row in breakdown] == ["1 -> 2", "2 -> 1"]
    assert breakdown[0]["phases"]["switch"]["median"] == 0.75


def test_ablation_rows_are_over_all_parts() -> None:
    found = {
        "all parts": [scaled(3, 4, 1.0, 0.1, 100)],
        "- no_standby": [scaled(3, 4, 20.0, 0.1, 110)],
    }
    first, second = ablation.rows_of(found)
    assert first["ready_over_all"]["median"] == 1.0
    assert second["ready_over_all"]["median"] == 20.0
    assert second["peak_over_all"]["median"] == 1.1
    assert next(iter(elastic_bench.ABLATIONS)) == ablation.ALL


def test_arrivals_have_the_rates_of_their_spans() -> None:
    times = traffic.arrivals([(100.0, 2.0), (50.0, 20.0), (10.0, 0.0)], seed=3)
    assert times == sorted(times)
    early = [at for at in times if at < 100]
    assert len(early) == pytest.approx(200, rel=0.25)
    assert len(times) - len(early) == pytest.approx(1000, rel=0.1)
    assert max(times) < 150
    assert traffic.arrivals([(100.0, 2.0)], seed=3) == early


def test_a_request_is_in_time_when_both_targets_are_met() -> None:
    assert traffic.met(stream(0.0, 0.9, 0.95, 1.0), TARGETS)
    assert not traffic.met(stream(0.0, 1.1, 1.15, 1.2), TARGETS)
    assert not traffic.met(stream(0.0, 0.5, 0.6, 0.9), TARGETS)
    assert not traffic.met(stream(0.0, 0.5, 0.6, error="broke"), TARGETS)
    assert not traffic.met(stream(0.0), TARGETS)
    assert traffic.share_met([], TARGETS) == 0


def test_windows_are_by_when_a_request_was_sent() -> None:
    good, bad = (0.1, 0.15, 0.2), (5.0, 5.1, 5.2)
    streams = [
        stream(98.0, *(98 + t for t in good)),
        stream(101.0, *(101 + t for t in bad)),
        stream(104.0, *(104 + t for t in good)),
        stream(111.0, *(111 + t for t in good)),
    ]
    found = traffic.windows(streams, TARGETS, zero_s=100.0, width_s=5.0)
    assert found == [Window(-2.5, 1, 1), Window(2.5, 2, 1), Window(12.5, 1, 1)]
    assert [each.share for each in found] == [1.0, 0.5, 1.0]


def test_figure_9_counts_the_devices_that_are_held() -> None:
    step = slo.Step("down", 2, 1, 1.0, 0.4)
    sent = (98.0, 101.0, 111.0)
    streams = [stream(at, at + 0.1, at + 0.15, at + 0.2) for at in sent]
    played = slo.Played(streams, scale_s=100.0, ready_s=6.0)
    known = Calibration(TARGETS, 1.0)
    rows = slo.figure9_rows("extravagant", step, played, known)
    assert [row["share_per_device"] for row in rows] == [1 / 2, 1 / 3, 1.0]
    rows = slo.figure9_rows("elastic", step, played, known)
    assert [row["share_per_device"] for row in rows] == [1 / 2, 1 / 2, 1.0]


def run_of(ends: list[float], ready_s: float) -> table1.Run:
    streams = [stream(0.0, end) for end in ends]
    return table1.Run(streams, 100.0, -20.0, 60.0, ready_s)


def test_throughput_has_the_same_windows_for_all() -> None:
    slow = run_of([90.0, 130.0, 150.0], 20.0)  # during: 95 to 125
    fast = run_of([85.0, 90.0, *[95.0 + i for i in range(30)], 126.0, 200.0], 1.0)
    assert table1.throughputs(fast, 20.0) == (
        pytest.approx(2 / 15),
        pytest.approx(30 / 30),
        pytest.approx(1 / 35),
    )
    rows = table1.rows_of([{"cold_restart": slow, "elastic": fast}])
    assert [row["strategy"] for row in rows] == ["cold_restart", "elastic"]
    assert rows[0]["during"]["median"] == 0
    assert rows[0]["before"]["median"] == pytest.approx(0.5)
    assert rows[1]["during"]["median"] == pytest.approx(7.5)
    with pytest.raises(ValueError, match="longer"):
        table1.throughputs(fast, 60.0)


def test_after_a_scale_is_compared_with_a_fresh_instance_of_that_size() -> None:
    served = traffic.Served
    up = [
        after.Pair(scaled=served(80.0, 0.02), fresh=served(100.0, 0.02)),
        after.Pair(scaled=served(100.0, 0.04), fresh=served(100.0, 0.02)),
    ]
    down = [after.Pair(scaled=served(45.0, 0.03), fresh=served(50.0, 0.02))]
    rows = after.rows_of([{"1 -> 2": up, "2 -> 1": down}])
    assert [row["step"] for row in rows] == ["1 -> 2", "2 -> 1"]
    assert [row["scaled_over_fresh"]["median"] for row in rows] == [0.9, 0.9]
    assert [row["cpu_over_fresh"]["median"] for row in rows] == pytest.approx([1.5, 1.5])
    assert (rows[0]["pairs_over_fresh"]["runs"], rows[0]["pairs_over_fresh"]["min"]) == (2, 0.8)
    assert traffic.tokens_in([stream(0.0, 1.0, 2.0, 3.0), stream(0.0, 2.5)], 2.0, 3.0) == 2


def test_gaps_of_all_streams_around_a_scale() -> None:
    steady = stream(0.0, *(1 + number * 0.02 for number in range(400)))  # until 8.98
    halted = stream(0.0, 8.5, 8.52, 9.0, 9.02, 11.02)
    gaps = gap.gaps_around([steady, halted], began_s=8.8, ended_s=9.1)
    assert gaps.steady_p99_s == pytest.approx(0.02)
    assert gaps.longest_s == pytest.approx(0.48)
    assert gaps.later_s == pytest.approx(2.0), "that is no part of the scale"
    assert gaps.allowed_s == pytest.approx(0.14)
    with pytest.raises(ValueError, match="load"):
        gap.gaps_around([halted], began_s=0.0, ended_s=1.0)
