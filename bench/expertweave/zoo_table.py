"""The paper's table 3 for the demo zoo: exact match of base, merged and woven on held-out prompts.

`sgl_esft.zoo.evaluate` does the work; this records it with machine and commit.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from bench.common.record import write_result
from sgl_esft import zoo
from sgl_esft.zoo.evaluate import evaluate, format_table


def main() -> None:
    """Evaluate and write bench/results/zoo.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", type=int, default=200, help="held-out prompts per task")
    count = parser.parse_args().examples
    adapters = zoo.adapter_paths()
    rows = evaluate(
        zoo.base_path(),
        adapters,
        count,
        url=None,
        merged=True,
        report=lambda line: print(line, flush=True),
    )
    print(format_table(rows, count))
    path = write_result(
        "zoo",
        {
            "what": "exact match on held-out prompts; `same`: woven and merged answered alike",
            "examples_per_task": count,
            "rows": [asdict(row) for row in rows],
        },
    )
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
