"""The paper's figure 9: weights and KV tokens of merged, padded and virtual, ours beside theirs.

    config.json, three adapters of table 1 -> bench/expertweave/expert_memory.py ->
    bench/results/expertweave_figure9.json

Counted on one device of 64 GiB, not timed: the numbers are the same on every machine. The paper's
text lists token-math second, but its 36.2 GB for two adapters are gate-math's and gate-intent's
(docs/memory.md), so that is the order here; `bench.expertweave.expert_memory` has the other one.

Rows: `num_adapters`, `max_experts`, and for `merged`, `padded`, `virtual` the `weight_bytes`,
`kv_tokens` (null: no room) and `fragmentation`; `paper` has the figure's own, null where not given.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from bench.common.record import write_result
from bench.expertweave.expert_memory import MODEL_CONFIG, PAPER_DEVICE, rows_of
from sgl_esft.formats.adapter_shapes import profile_shapes
from sgl_esft.memory.model_sizes import read_model_sizes

ADAPTERS = ("gate-math", "gate-intent", "token-math")

# ExpertWeave, section 5.4 and figure 9, for 1, 2 and 3 adapters. The paper's GB are 2^30 bytes.
PAPER: Mapping[str, Mapping[str, tuple[float | None, ...]]] = {
    "merged": {"weight_gib": (29.3, 58.6, 88.0), "kv_tokens": (810e3, 6e3, None)},
    "padded": {"weight_gib": (34.0, 39.0, 44.3), "kv_tokens": (None, None, None)},
    "virtual": {"weight_gib": (32.1, 36.2, 38.7), "kv_tokens": (None, 572e3, 477e3)},
}


def measure() -> list[dict[str, Any]]:
    """A row for 1, 2 and 3 adapters, ours and the paper's."""
    sizes = read_model_sizes(MODEL_CONFIG)
    shapes = profile_shapes(f"table1:{','.join(ADAPTERS)}", sizes.spec)
    rows = rows_of("figure9", sizes, shapes, range(1, len(shapes) + 1))
    return [{**row, "paper": _paper(place)} for place, row in enumerate(rows)]


def _paper(place: int) -> dict[str, dict[str, float | None]]:
    return {
        way: {name: values[place] for name, values in given.items()} for way, given in PAPER.items()
    }


def main() -> None:
    """Count and write bench/results/expertweave_figure9.json."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    rows = measure()
    for row in rows:
        weights = [f"{way} {row[way]['weight_bytes'] / (1 << 30):.1f}" for way in PAPER]
        print(f"{row['num_adapters']} adapters, weights in GiB: {', '.join(weights)}")
    path = write_result(
        "expertweave_figure9",
        {
            "what": "bytes of weights and tokens of KV cache; merged, padded and virtual",
            "model": MODEL_CONFIG.name,
            "adapters": list(ADAPTERS),
            "planned_device": asdict(PAPER_DEVICE),
            "rows": rows,
        },
    )
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
