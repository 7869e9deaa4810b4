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


SAMPLES = {"figure5": figure5, "figure6": figure6, "figure7": figure7, "figure8": sweep}
