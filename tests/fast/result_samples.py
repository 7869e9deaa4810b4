"""Small made-up results in the layouts that the benches' docstrings give."""

from __future__ import annotations

from typing import Any

ORIGIN: dict[str, Any] = {
    "machine": {"cpu": "Some CPU", "cores": 2, "device": "none"},
    "command": "python -m b",
    "commit": "0123456789",
}


def spread(median: float) -> dict[str, float]:
    return {
        "min": median - 0.2,
        "q1": median - 0.1,
        "median": median,
        "q3": median + 0.1,
        "max": median + 0.2,
    }


def served() -> dict[str, Any]:
    metrics = ("ttft", "tpot", "prefill_throughput", "decode_throughput")
    return {metric: spread(1 + place / 10) for place, metric in enumerate(metrics)}


def figure5() -> dict[str, Any]:
    rows = [
        {
            "adapters": adapters,
            "alpha": alpha,
            "rate": rate,
            "requests_per_second": 2.0,
            **served(),
            "decode_batch": 3.0,
            "tpot_floor": 1.05,
            "tpot_over_floor": spread(0.05),
        }
        for adapters in (5, 20)
        for alpha in (1.0, 0.1)
        for rate in (0.3, 0.6)
    ]
    return {**ORIGIN, "rows": rows}


def figure6() -> dict[str, Any]:
    rows = [
        {"setting": setting, "alpha": alpha, "hot_share": share, "rate": 0.9, **served()}
        for setting in ("half", "equal")
        for alpha, share in ((0.32, 0.8), (0.1, 0.93))
    ]
    return {**ORIGIN, "rows": rows}


def sweep() -> dict[str, Any]:
    figures = {**spread(1.2), "low": 1.15, "high": 1.25, "num_turns": 20, "by_fleet": [1.2]}
    row = {"over": "merged", "wall": figures, "cpu": figures, "same_tokens": 1.0}
    systems = ("merged again", "fused", "unfused")
    axes = (("ttft", "prompt_tokens", (128, 256)), ("tpot", "batch_size", (1, 64)))
    traffics = ("adapter", "base")
    return {
        **ORIGIN,
        "complete": True,
        "goals": {"fused over merged": 1.01, "fused over merged, TTFT": 1.03},
        "summary": [
            {"traffic": traffic, "metric": metric, "system": system, **row}
            for traffic in traffics
            for metric, _, _ in axes
            for system in systems
        ],
        "rows": [
            {"traffic": t, "metric": metric, "axis": axis, "value": value, "system": system, **row}
            for t in traffics
            for metric, axis, values in axes
            for value in values
            for system in systems
        ],
    }


def figure7() -> dict[str, Any]:
    found = sweep()
    shares = {"rerouting": 0.003, "tagging": 0.001}
    for row in found["rows"]:
        if not row["system"].endswith(" again"):
            row["estimate"] = shares
    return found


def clocks(median: float) -> dict[str, Any]:
    quartiles = {"q1": 0.9 * median, "median": median, "q3": 1.1 * median}
    return {"wall": quartiles, "cpu": quartiles}


def reroute() -> dict[str, Any]:
    rows = [
        {
            "num_tokens": num_tokens,
            "fused_over_unfused": clocks(0.1),
            "fused_out_over_unfused": clocks(0.08),
            "fused_over_unfused_bare": clocks(0.15),
            "fused_over_gather": clocks(0.9),
        }
        for num_tokens in (1, 4096)
    ]
    layer = {"fused_over_layer": clocks(0.001), "unfused_over_layer": clocks(0.01)}
    counted = {"num_tokens": 64, "id_bits": 32, "instructions": 960, "instructions_per_id": 2.5}
    return {
        **ORIGIN,
        "goals": {"fused_over_unfused": 0.2, "fused_over_layer": 0.005},
        "rows": rows,
        "layer_rows": [{"num_tokens": num_tokens, **layer} for num_tokens in (1, 256)],
        "callgrind": {"rows": [counted]},
    }


def batching() -> dict[str, Any]:
    names = ("experts", "drawn", "adapters", "delay", "delay_p99")
    rows = [
        {
            "experts": experts,
            "popularity": popularity,
            "max_running": max_running,
            "load": 1.2,
            "preference": "most running",
            "max_overtakes": bound,
            "fcfs": {"experts": 60.0, "adapters": 11.0},
            **{f"{name}_over_fcfs": spread(0.9) for name in names},
            "queue": spread(0.5),
            "most_overtakes": bound,
        }
        for experts, popularity in (("published", "uniform"), ("table1", "zipf"))
        for max_running in (16, 64)
        for bound in (16, 128)
    ]
    return {**ORIGIN, "rows": rows}


def gpu_reroute() -> dict[str, Any]:
    kinds = ("unfused chain", "standalone", "fused router")
    timed = (*kinds, "fused router minus router")
    calls = [
        {
            "num_tokens": num_tokens,
            **{
                cache: {"microseconds_a_call": {kind: spread(2.0) for kind in timed}}
                for cache in ("warm_l2", "cold_l2")
            },
        }
        for num_tokens in (1, 64)
    ]
    steps = [
        {
            "num_tokens": num_tokens,
            "num_adapters": num_adapters,
            "floor": 1.02,
            "over_merged": {kind: spread(1.05) for kind in kinds},
        }
        for num_tokens in (1, 64)
        for num_adapters in (0, 1, 20)
    ]
    kernels = {"plain": 9, "unfused chain": 14, "standalone": 10, "fused router": 9}
    nodes = {name: {"kernel": count, "memset": 1} for name, count in kernels.items()}
    found = {
        "reroute: launches": {"ok": True, "experts": "some", "nodes_a_layer": nodes},
        "reroute: time": {"ok": True, "rows": calls},
        "model step": {"ok": True, "rows": steps},
    }
    return {**ORIGIN, "evidence": "ran on hardware", "complete": True, "steps": found}


def gpu_serve() -> dict[str, Any]:
    rows: list[dict[str, Any]] = [
        {
            "batch_size": batch_size,
            "num_adapters": num_adapters,
            "floor": 1.15,
            "rounds": 4,
            "ttft_over_plain": spread(1.1),
            "tpot_over_plain": spread(1.2),
            "tpot_points_over_floor": 0.05,
        }
        for batch_size in (1, 64)
        for num_adapters in (1, 20)
    ]
    rows.append(
        {"batch_size": 256, "num_adapters": 20, "floor": 1.6, "reason": "1 rounds: too few"}
    )
    steps = {"serve": {"ok": True, "rows": rows}}
    return {**ORIGIN, "evidence": "ran on hardware", "complete": True, "steps": steps}


STRATEGIES = ("elastic", "cold_restart", "extravagant", "colocated")


def elastic_scales() -> dict[str, Any]:
    """elastic_figure7, 8 and 12."""
    rows = [
        {
            "strategy": strategy,
            "step": step,
            **{f"{name}_over_cold": spread(1.5) for name in ("ready", "gap", "peak")},
            "ready_s": spread(12.0),
            "gap_s": spread(0.5),
            "peak_bytes": spread(2e8),
        }
        for step in ("1 -> 2", "2 -> 3")
        for strategy in STRATEGIES
    ]
    return {**ORIGIN, "is_complete": True, "rows": rows}


def elastic_breakdown() -> dict[str, Any]:
    shares = {"memory": spread(0.5), "prepare": spread(0.3), "switch": spread(0.25)}
    rows = [
        {"step": step, "ready_s": spread(0.6), "phases": shares, "steps": {}}
        for step in ("1 -> 2", "2 -> 1")
    ]
    return {**ORIGIN, "is_complete": True, "rows": rows}


def elastic_over_time() -> dict[str, Any]:
    rows = [
        {
            "strategy": strategy,
            "step": step,
            "at_s": at_s,
            "requests": 10,
            "share": share,
            "share_per_device": share / 2,
        }
        for step in ("up", "down")
        for strategy in STRATEGIES
        for at_s, share in ((-2.5, 1.0), (2.5, 0.5), (27.5, 0.7), (32.5, 0.9))
    ]
    return {**ORIGIN, "is_complete": True, "goal": 0.9, "rows": rows}


def elastic_by_rate() -> dict[str, Any]:
    rows = [
        {"strategy": strategy, "rate": rate, "requests": 20, "share": 1 / rate}
        for strategy in STRATEGIES
        for rate in (1.0, 1.6)
    ]
    return {**ORIGIN, "is_complete": True, "goal": 0.9, "rows": rows}


def elastic_throughput() -> dict[str, Any]:
    papers = {"elastic": [6.002, 3.943, 7.818], "extravagant": None}
    windows = {name: spread(0.9) for name in ("before", "during", "after")}
    rows = [{"strategy": name, **windows, "paper": paper} for name, paper in papers.items()]
    return {**ORIGIN, "is_complete": True, "rows": rows}


def elastic_ablation() -> dict[str, Any]:
    figures = {name: spread(1.2) for name in ("ready_over_all", "peak_over_all", "peak_bytes")}
    rows = [
        {"parts": parts, **figures, "ready_s": spread(0.6), "gap_s": spread(0.3)}
        for parts in ("all parts", "- no_standby")
    ]
    return {**ORIGIN, "is_complete": True, "rows": rows}


def elastic_gap() -> dict[str, Any]:
    seconds = ("longest_s", "steady_p99_s", "later_s", "held_s")
    row = {name: spread(0.05) for name in seconds}
    ratios = {name: spread(0.5) for name in ("longest_over_allowed", "peak_over_larger")}
    rows = [
        {"step": step, "scales": 2, **row, **ratios, "copied_bytes": spread(9e6)}
        for step in ("1 -> 2", "2 -> 1")
    ]
    return {**ORIGIN, "is_complete": True, "requests": 1234, "failed": 0, "rows": rows}


def lifecycle_load() -> dict[str, Any]:
    grown = {"early": 100.0, "late": 101.0}
    rows = [
        {
            "pattern": pattern,
            "seconds": 300.0,
            "requests": 1000,
            "failed": 0,
            "refused": 1,
            "wrong": 0,
            "operations": {"load": 3, "replace": 9},
            "failed_operations": 0,
            "load_s": spread(0.3),
            "p99_during_loads_s": 0.15,
            "p99_without_s": 0.1,
            "loads_over_none": 1.5,
            "busy_over_quiet": spread(1.2),
            "wait_median_s": 0.2,
            "wait_p99_s": 1.0,
            "longest_wait_s": {"a": 1.25, "b": 2.5},
            "overtakes_p99": 8.0,
            "most_overtakes": 12,
            "memory": dict.fromkeys(("rss_bytes", "num_fds", "num_threads", "mapped_bytes"), grown),
        }
        for pattern in ("zipf", "round_robin")
    ]
    crowding = {"adapters": 8, "all_over_slots": spread(0.8)}
    whole = {"is_complete": True, "slots": 3, "adapters": 8}
    return {**ORIGIN, **whole, "crowding": crowding, "rows": rows}


def lifecycle_load_elastic() -> dict[str, Any]:
    found = lifecycle_load()
    for row in found["rows"]:
        row["operations"]["scale"] = 4
    return found


SAMPLES = {
    "lifecycle_load": lifecycle_load,
    "lifecycle_load_elastic": lifecycle_load_elastic,
    "elasticmoe_gap": elastic_gap,
    "expertweave_figure5": figure5,
    "expertweave_figure6": figure6,
    "expertweave_figure7": figure7,
    "expertweave_figure8": sweep,
    "reroute": reroute,
    "batching": batching,
    "gpu_reroute": gpu_reroute,
    "gpu_serve": gpu_serve,
    "elasticmoe_figure7": elastic_scales,
    "elasticmoe_figure8": elastic_scales,
    "elasticmoe_figure9": elastic_over_time,
    "elasticmoe_figure10": elastic_by_rate,
    "elasticmoe_figure11": elastic_breakdown,
    "elasticmoe_figure12": elastic_scales,
    "elasticmoe_table1": elastic_throughput,
    "elasticmoe_ablation_up": elastic_ablation,
    "elasticmoe_ablation_down": elastic_ablation,
}
