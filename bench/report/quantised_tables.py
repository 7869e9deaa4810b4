"""Tables of quantised experts: accuracy by scheme, memory of a large model, time of a token.

bench/results/quantised_*.json --> [a function each] --> readme_tables.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.report.markdown import percent, ratio, result_table


def zoo(result: Any) -> str:
    """A row a scheme and task; below it how many answers differ, and whether all are ties."""
    columns = ("base", "merged", "woven", "same", "as_bf16")
    rows = [
        [row["scheme"], row["task"], *(percent(row[name]) for name in columns)]
        for row in result["rows"]
    ]
    header = ["experts", "task", "base", "merged", "woven", "same answer", "as in bf16"]
    return result_table(result, header, rows, _differences(result))


def _differences(result: Any) -> str:
    rows, count = result["rows"], result["examples_per_task"]
    differ, clear = (sum(row[name] for row in rows) for name in ("differ", "clear"))
    answers = (
        f"Of {count * len(rows)} answers ({count} a row) {differ} differ between woven and merged"
    )
    largest = max(row["largest_gap"] for row in rows)
    ties = (
        f", {clear} of them clearly; in the others the log-probabilities of the best two tokens "
        f"were within {result['tie_logprob']:g} (at most {largest:.3f})"
    )
    return f"{answers}{ties if differ else ''}. "


def large(result: Any) -> str:
    """A row a system, in GB of 10^9 bytes; one that does not fit has only what it would need."""
    rows = [_large_row(row) for row in result["rows"]]
    header = ["experts", "checkpoint", "adapters", "rows for experts", "peak", "files not counted"]
    header += ["once it serves", "page cache grew", "different answers"]
    note = (
        f"GB; {len(result['adapters'])} adapters: {', '.join(result['adapters'])}. The goal is a "
        f"peak below {_gigabytes(result['memory_bytes'])}. "
    )
    return result_table(result, header, rows, note)


def _large_row(row: Mapping[str, Any]) -> list[str]:
    found = [row["system"], *map(_gigabytes, (row["checkpoint_bytes"], row["adapter_bytes"]))]
    found.append(_gigabytes(row["cache_bytes"]))
    if not row["is_served"]:
        return [*found, f"needs about {_gigabytes(row['needed_bytes'])}", *["-"] * 4]
    names = ("peak_bytes", "peak_own_bytes", "serving_bytes", "peak_cached_bytes")
    return [*found, *(_gigabytes(row[name]) for name in names), str(row["distinct_answers"])]


def _gigabytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e9:.1f}"


def decode(result: Any) -> str:
    """A row for each number of tokens in a layer, and one for a served token."""
    rows = [
        [f"a MoE layer, {row['num_tokens']} tokens", *_speeds(row["speed"])]
        for row in result["layers"]
    ]
    served = result["served"]
    layers = result["shape"]["num_layers"]
    rows.append([f"a served token, {layers} layers", ratio(served["speed"]), "-"])
    note = (
        f"{result['threads']} thread(s) in a layer by itself; layers' own time is "
        f"{percent(served['experts_share'])}% of a served bf16 token's. "
    )
    header = ["time of", "by the wall clock", "by processor time"]
    return result_table(result, header, rows, note)


def _speeds(speed: Mapping[str, Mapping[str, float]]) -> list[str]:
    return [ratio(speed["wall"]), ratio(speed["cpu"])]


TABLES = {
    "quantised_zoo": (
        "The demo by scheme of its experts (in bfloat16, 256 wide), exact match on held-out\n"
        "prompts in percent; then how often woven and merged gave the same answer, and how often\n"
        "the woven answer is that of woven bf16 experts:",
        zoo,
    ),
    "quantised_large": (
        "DeepSeek-V2-Lite's shape with quantised experts and four adapters, weights random:\n"
        "memory of all of the server's processes as the operating system counts it:",
        large,
    ),
    "quantised_decode": (
        "Speed of int8 experts over bf16 experts, of V2-Lite's size, median and quartiles; for a\n"
        "layer at one token 1.8 is the goal:",
        decode,
    ),
}
