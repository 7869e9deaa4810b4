"""Memory of base and adapters: merged, padded and virtual (the paper's figure 9), and F_mem.

    config.json, counts of experts -> sgl_esft/memory/plan.py, which maps them and counts the pages
    -> bench/results/expert_memory.json

Adapters: the paper's table 1 (E_max 13 for all ten), and the published expert configs. No timing:
the numbers are the same on every machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.common.record import write_result
from sgl_esft.formats.adapter_shapes import AdapterShape, profile_shapes, read_adapter_shape
from sgl_esft.memory.model_sizes import ModelSizes, read_model_sizes
from sgl_esft.memory.plan import Device, plan_memory

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
MODEL_CONFIG = DATA / "deepseek-v2-lite.json"
PUBLISHED = ("gate-intent", "gate-law", "token-intent", "token-law")
COUNTS = (1, 2, 3, 10, 20)
# The paper's device; its reserve is what leaves the merged model's 810K tokens of KV cache.
PAPER_DEVICE = Device(64 << 30, 0.9, int(4.88 * (1 << 30)), 2 << 20)


def rows_of(
    name: str, sizes: ModelSizes, shapes: Sequence[AdapterShape], counts: Sequence[int]
) -> list[dict[str, Any]]:
    """A row for each number of adapters, which repeat where more are asked than there are."""
    plan = plan_memory(
        sizes, shapes, PAPER_DEVICE, counts, kv_bytes_per_token=sizes.kv_bytes_per_token()
    )
    rows = plan.as_json()["rows"]
    assert isinstance(rows, list)
    return [{"adapters": name, **row} for row in rows]


def measure(
    counts: Sequence[int] = COUNTS, published: Sequence[str] = PUBLISHED
) -> list[dict[str, Any]]:
    """Rows of the profile, then of the published configs."""
    sizes = read_model_sizes(MODEL_CONFIG)
    configs = [read_adapter_shape(DATA / "esft" / f"{n}.json", sizes.spec) for n in published]
    return [
        *rows_of("table1", sizes, profile_shapes("table1", sizes.spec), counts),
        *rows_of("published", sizes, configs, [len(configs)]),
    ]


def main() -> None:
    """Count and write bench/results/expert_memory.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS))
    rows = measure(parser.parse_args().counts)
    for row in rows:
        print(
            f"{row['adapters']:9} {row['num_adapters']:2} adapters, E_max {row['max_experts']}: "
            f"F_mem padded {row['padded']['fragmentation']:.3f}, "
            f"virtual {row['virtual']['fragmentation']:.3f}"
        )
    device = PAPER_DEVICE
    path = write_result(
        "expert_memory",
        {
            "what": "bytes of weights, tokens of KV cache, F_mem; merged, padded and virtual",
            "model": MODEL_CONFIG.name,
            "published": list(PUBLISHED),
            "planned_device": {
                "memory_bytes": device.memory_bytes,
                "memory_fraction": device.memory_fraction,
                "reserve_bytes": device.reserve_bytes,
                "page_bytes": device.page_bytes,
            },
            "rows": rows,
        },
    )
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
