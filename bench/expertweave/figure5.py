"""Figure 5, served: 5, 10 and 20 adapters woven, against the base alone, by skew and arrival rate.

    base-only server (plain SGLang) and a woven one, by turns, the same trace -> ratios by round
    - the floor that the adapters' bytes set (bench/expertweave/floor.py) ->
    bench/results/expertweave_figure5.json

ExpertWeave 5.2, scaled down: one CPU core a server instead of 8 NPUs, the model of
bench/common/scaled_model.py, the load of bench/common/load.py, traces of some seconds. Base-only
serves every
request of the trace with the base model, as the paper does. A round runs base-only once and each
alpha once, in an order that turns about. Two servers are alive, and the one not asked sleeps.

`rows` of the result, one for each (adapters, alpha, rate):

    adapters, alpha          as above
    rate                     arrival rate as a share of what base-only serves at saturation
    requests_per_second      the same in requests
    ttft, ttft_p99, tpot, tpot_p99, prefill_throughput, decode_throughput
                             woven / base-only: min, q1, median, q3, max over rounds
    decode_batch             requests decoded together in the woven server, median
    tpot_floor               what tpot would be if a decode step took the time of its weight bytes
    tpot_over_floor          tpot - tpot_floor, spread over rounds

TPOT also counts steps that prefill other requests, and slower answers overlap more: both add to
what is over the floor.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.common.load import (
    Arrival,
    LoadFigures,
    ServerCommand,
    Target,
    Workload,
    all_to_base,
    make_trace,
    play,
    power_law_shares,
    ratio_spreads,
    saturated_rate,
    servers,
    take_turns,
)
from bench.common.record import spread
from bench.common.scaled_model import ScaledModel, ScaledShape
from bench.common.served_figure import run, write_rows
from bench.expertweave import floor
from sgl_esft.zoo import serving

WHAT = "woven adapters over base-only, served: TTFT, TPOT, throughput as ratios"
BASE, WOVEN = "base", "woven"
NUM_EXPERTS, TOP_K = 64, 6


@dataclass(frozen=True)
class Plan:
    """What is measured. Rates are shares of base-only's throughput at saturation."""

    adapters: tuple[int, ...] = (5, 10, 20)
    alphas: tuple[float, ...] = (1.0, 0.3, 0.1)
    rates: tuple[float, ...] = (0.3, 0.6)
    rounds: int = 5
    horizon_seconds: float = 4.0  # of a trace; each run takes a little longer
    shape: ScaledShape = field(default_factory=ScaledShape)
    workload: Workload = field(default_factory=Workload)


WARM_UP = Workload(num_requests=2, mean_prompt_tokens=8, mean_output_tokens=4)
QUICK = Plan(
    adapters=(5,),
    alphas=(0.3,),
    rates=(0.5,),
    rounds=2,
    horizon_seconds=0.5,
    shape=ScaledShape(hidden_size=128, expert_width=64, num_moe_layers=2),
    workload=Workload(num_requests=5, mean_prompt_tokens=8, mean_output_tokens=8),
)


@dataclass(frozen=True)
class Stand:
    """Two servers over one scaled model."""

    plan: Plan
    model: ScaledModel
    base_url: str
    woven_url: str
    num_adapters: int

    def base_run(self, requests_per_second: float, seed: int) -> LoadFigures:
        trace = all_to_base(self._trace(requests_per_second, 1.0, seed))
        return play(trace, {None: Target(self.base_url)}, self.model.base())

    def woven_run(self, requests_per_second: float, alpha: float, seed: int) -> LoadFigures:
        trace = self._trace(requests_per_second, alpha, seed)
        return play(trace, self._targets(), self.model.base())

    def warm_up(self) -> float:
        """Requests a second that base-only serves at saturation; every adapter answers once."""
        for target in self._targets().values():
            saturated_rate(WARM_UP, target, self.model.base())
        return saturated_rate(self.plan.workload, Target(self.base_url), self.model.base())

    def rows(self, rate: float, requests_per_second: float) -> list[dict[str, Any]]:
        """A row for each alpha."""
        runs = {
            str(alpha): partial(self.woven_run, requests_per_second, alpha)
            for alpha in self.plan.alphas
        }
        taken = take_turns(
            {BASE: partial(self.base_run, requests_per_second), **runs}, self.plan.rounds
        )
        return [
            {
                "adapters": self.num_adapters,
                "alpha": alpha,
                "rate": rate,
                "requests_per_second": round(requests_per_second, 3),
                **ratio_spreads(taken[str(alpha)], taken[BASE]),
                **self._over_floor(alpha, taken[str(alpha)], taken[BASE]),
            }
            for alpha in self.plan.alphas
        ]

    def _over_floor(
        self, alpha: float, woven: Sequence[LoadFigures], base: Sequence[LoadFigures]
    ) -> dict[str, Any]:
        floors = [tpot_floor(self.model, self.num_adapters, alpha, w.decode_batch) for w in woven]
        measured = [w.tpot / b.tpot for w, b in zip(woven, base, strict=True)]
        return {
            "decode_batch": statistics.median(w.decode_batch for w in woven),
            "tpot_floor": statistics.median(floors),
            "tpot_over_floor": spread([m - f for m, f in zip(measured, floors, strict=True)]),
        }

    def _names(self) -> list[str]:
        return list(self.model.adapters(self.num_adapters))

    def _targets(self) -> dict[str | None, Target]:
        return {name: Target(self.woven_url, name) for name in self._names()}

    def _trace(self, requests_per_second: float, alpha: float, seed: int) -> tuple[Arrival, ...]:
        workload = self.plan.workload.lasting(self.plan.horizon_seconds, requests_per_second)
        return make_trace(workload, requests_per_second, self._names(), alpha, seed)


def tpot_floor(model: ScaledModel, num_adapters: int, alpha: float, batch: float) -> float:
    """Weight bytes of a decode step with adapters over those without, for steps of `batch` tokens.

    Each token's adapter is drawn by its share; every expert is as likely as the next.
    """
    config = json.loads((model.base() / "config.json").read_text())
    shares = (0.0, *power_law_shares(num_adapters, alpha))
    tuned = model.tuned(num_adapters)
    num_tokens = max(1, round(batch))
    touched = partial(
        floor.expected_touched_at_random,
        num_tokens=num_tokens,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
    )
    woven = [
        touched([experts.get(layer, ()) for experts in tuned], shares)
        for layer in model.shape.moe_layer_ids
    ]
    return floor.floor_over_base(woven, [touched([], [1.0])], floor.ModelBytes.from_config(config))


def measure(plan: Plan, reroute: Sequence[str], out: Path) -> None:
    """Run the plan; the result file is written after each rate. `reroute`: arguments, or none."""
    model = ScaledModel.of(plan.shape)
    model.adapters(max(plan.adapters))  # written now, not while a server is measured
    rows: list[dict[str, Any]] = []
    num_wanted = len(plan.adapters) * len(plan.alphas) * len(plan.rates)
    saturated = 0.0
    for count in plan.adapters:
        with servers(commands(model, count, reroute)) as urls:
            stand = Stand(plan, model, urls[BASE], urls[WOVEN], count)
            warm = stand.warm_up()
            saturated = saturated or warm  # the same rates for every number of adapters
            for rate in plan.rates:
                rows += _printed(stand.rows(rate, rate * saturated))
                write_rows("expertweave_figure5", WHAT, plan, rows, num_wanted, out, reroute)


def commands(model: ScaledModel, count: int, reroute: Sequence[str]) -> dict[str, ServerCommand]:
    """Plain SGLang with the base, and the base with `count` adapters woven in."""
    woven = serving.woven_arguments(model.base(), model.adapters(count))
    return {
        BASE: ServerCommand(serving.merged_arguments(model.base())),
        WOVEN: ServerCommand([*woven, *reroute]),
    }


def _printed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for row in rows:
        print(_line(row), flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['adapters']:2} adapters, alpha {row['alpha']}, rate {row['rate']}: "
        f"ttft {row['ttft']['median']:.3f}, tpot {row['tpot']['median']:.3f} "
        f"(floor {row['tpot_floor']:.3f}), decode {row['decode_throughput']['median']:.3f}"
    )


def main() -> None:
    """Measure and write bench/results/expertweave_figure5.json."""
    run(__doc__.partition("\n")[0], measure, Plan(), QUICK)


if __name__ == "__main__":
    main()
