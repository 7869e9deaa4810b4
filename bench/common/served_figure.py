"""What figures 5 and 6 have in common: their command line and their result file.

--quick, --reroute, --out -> [run] -> measure(plan, ...) -> rows -> [write_rows] -> <name>.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from bench.common.load import Workload, end_on_sigterm
from bench.common.record import RESULTS, write_result
from bench.common.scaled_model import ScaledShape


class ServedPlan(Protocol):
    """What every plan of a served figure says."""

    @property
    def rounds(self) -> int: ...
    @property
    def horizon_seconds(self) -> float: ...
    @property
    def shape(self) -> ScaledShape: ...
    @property
    def workload(self) -> Workload: ...


PlanT = TypeVar("PlanT", bound=ServedPlan)


def run(
    description: str,
    measure: Callable[[PlanT, Sequence[str], Path], None],
    full: PlanT,
    quick: PlanT,
) -> None:
    """Measure by the plan that the command line asks for."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few requests")
    parser.add_argument("--reroute", help="kind of rerouting of the woven server")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    end_on_sigterm()
    reroute = ["--reroute", options.reroute] if options.reroute else []
    measure(quick if options.quick else full, reroute, options.out)


def write_rows(
    name: str,
    what: str,
    plan: ServedPlan,
    rows: Sequence[dict[str, Any]],
    num_wanted: int,
    out: Path,
    reroute: Sequence[str],
) -> None:
    """Write <out>/<name>.json with the rows so far, of `num_wanted`."""
    path = write_result(
        name,
        {
            "what": what,
            "is_complete": len(rows) == num_wanted,
            "reroute": reroute[-1] if reroute else "default",
            "rounds": plan.rounds,
            "horizon_seconds": plan.horizon_seconds,
            "workload": vars(plan.workload),
            "model": vars(plan.shape),
            "rows": rows,
        },
        folder=out,
    )
    print(f"wrote {path.name}: {len(rows)} of {num_wanted} rows", flush=True)
