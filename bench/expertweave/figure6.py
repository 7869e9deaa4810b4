"""Figure 6, served: two adapters woven on half the cores, against a merged server for each.

    woven server, and two merged ones with a core each, by turns, the same trace
    -> ratios by round, by skew -> bench/results/expertweave_figure6.json

ExpertWeave 5.2, scaled down: a core where the paper has two NPUs, the model of
bench/common/scaled_model.py, the load of bench/common/load.py. Merged models cannot share: as the
load goes to
one of them, the other's core is idle. Two settings:

    half    woven on one core, as the paper has it: half of what the merged servers have
    equal   woven on both cores, two ranks (DP2 attention, EP2): what the merged servers have

A server's HTTP and tokenizer processes share its cores, and the client takes what is left: in
`half` that is the other core for woven, and nobody's own for the merged servers. Three servers are
alive at once; those that are not asked sleep. The rate is a share of what one
merged server serves at saturation, and high enough that the busy one is at its limit.

`rows` of the result, one for each (setting, alpha):

    setting, alpha           as above
    hot_share                share of requests for the first adapter: 0.80, 0.87, 0.93
    rate                     arrival rate as a share of one merged server's saturated throughput
    requests_per_second      the same in requests
    ttft, ttft_p99, tpot, tpot_p99, prefill_throughput, decode_throughput
                             woven / merged: min, q1, median, q3, max over rounds
    decode_batch             requests decoded together in the woven server, median
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.common.load import (
    LoadFigures,
    ServerCommand,
    Target,
    Workload,
    make_trace,
    play,
    power_law_shares,
    ratio_spreads,
    saturated_rate,
    servers,
    take_turns,
)
from bench.common.scaled_model import ScaledModel, ScaledShape
from bench.common.served_figure import run, write_rows
from sgl_esft.zoo import serving

WHAT = "two adapters woven over two merged servers: TTFT, TPOT, throughput as ratios"
WOVEN = "woven"
DP2_EP2 = ("--tp-size", "2", "--ep-size", "2", "--attn-dp-size", "2")

Targets = Mapping[str | None, Target]


class TooFewCoresError(Exception):
    """Two merged servers need a core each."""


@dataclass(frozen=True)
class Setting:
    """How the woven server runs: on how many cores, by which arguments."""

    num_cores: int
    arguments: tuple[str, ...] = ()


SETTINGS: Mapping[str, Setting] = {"half": Setting(1), "equal": Setting(2, DP2_EP2)}


@dataclass(frozen=True)
class Plan:
    """What is measured. The rate is a share of one merged server's throughput at saturation."""

    settings: tuple[str, ...] = tuple(SETTINGS)
    alphas: tuple[float, ...] = (0.32, 0.2, 0.1)
    rate: float = 1.0
    rounds: int = 4
    horizon_seconds: float = 3.5  # of a trace; a run takes longer, as servers are at their limit
    shape: ScaledShape = field(default_factory=ScaledShape)
    workload: Workload = field(default_factory=Workload)


QUICK = Plan(
    settings=("half",),
    alphas=(0.32,),
    rounds=2,
    horizon_seconds=0.5,
    shape=ScaledShape(hidden_size=128, expert_width=64, num_moe_layers=2),
    workload=Workload(num_requests=5, mean_prompt_tokens=8, mean_output_tokens=8),
)


@dataclass(frozen=True)
class Stand:
    """The merged servers and a woven one, over two adapters of one scaled model."""

    plan: Plan
    model: ScaledModel
    merged: Targets
    woven: Targets

    def warm_up(self) -> float:
        """Requests a second that a merged server serves at most; every target answers once."""
        targets = (*self.woven.values(), *self.merged.values())
        return [saturated_rate(self.plan.workload, s, self.model.base()) for s in targets][-1]

    def rows(self, setting: str, requests_per_second: float) -> list[dict[str, Any]]:
        """A row for each alpha."""
        runs = {
            f"{name} {alpha}": partial(self._run, targets, requests_per_second, alpha)
            for alpha in self.plan.alphas
            for name, targets in (("merged", self.merged), ("woven", self.woven))
        }
        taken = take_turns(runs, self.plan.rounds)
        return [
            {
                "setting": setting,
                "alpha": alpha,
                "hot_share": round(power_law_shares(2, alpha)[0], 3),
                "rate": self.plan.rate,
                "requests_per_second": round(requests_per_second, 3),
                **ratio_spreads(taken[f"woven {alpha}"], taken[f"merged {alpha}"]),
                "decode_batch": statistics.median(w.decode_batch for w in taken[f"woven {alpha}"]),
            }
            for alpha in self.plan.alphas
        ]

    def _run(
        self, targets: Targets, requests_per_second: float, alpha: float, seed: int
    ) -> LoadFigures:
        names = list(self.model.adapters(2))
        workload = self.plan.workload.lasting(self.plan.horizon_seconds, requests_per_second)
        trace = make_trace(workload, requests_per_second, names, alpha, seed)
        return play(trace, targets, self.model.base())


def commands(
    model: ScaledModel, setting: Setting, cores: Sequence[int], reroute: Sequence[str]
) -> dict[str, ServerCommand]:
    """A merged server for each adapter with a core each, and a woven one for both."""
    adapters = model.adapters(2)
    woven = [*serving.woven_arguments(model.base(), adapters), *setting.arguments, *reroute]
    return {
        name: ServerCommand(serving.merged_arguments(model.merged(index)), [cores[index]])
        for index, name in enumerate(adapters)
    } | {WOVEN: ServerCommand(woven, cores[: setting.num_cores])}


def measure(plan: Plan, reroute: Sequence[str], out: Path) -> None:
    """Run the plan; the result file is written after each setting. `reroute`: arguments, or none.

    Raises TooFewCoresError.
    """
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise TooFewCoresError("figure 6 needs two cores: start it without taskset.")
    model = ScaledModel.of(plan.shape)
    rows: list[dict[str, Any]] = []
    num_wanted = len(plan.settings) * len(plan.alphas)
    saturated = 0.0
    for name in plan.settings:
        with servers(commands(model, SETTINGS[name], cores, reroute)) as urls:
            stand = stand_of(plan, model, urls)
            warm = stand.warm_up()
            saturated = saturated or warm  # the same rate in both settings
            rows += _printed(stand.rows(name, plan.rate * saturated))
        write_rows("expertweave_figure6", WHAT, plan, rows, num_wanted, out, reroute)


def stand_of(plan: Plan, model: ScaledModel, urls: Mapping[str, str]) -> Stand:
    """Which server each adapter's requests go to, in either system."""
    names = list(model.adapters(2))
    merged: Targets = {name: Target(urls[name]) for name in names}
    return Stand(plan, model, merged, {name: Target(urls[WOVEN], name) for name in names})


def _printed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for row in rows:
        print(
            f"{row['setting']:5}, alpha {row['alpha']}: "
            f"prefill {row['prefill_throughput']['median']:.3f}, "
            f"decode {row['decode_throughput']['median']:.3f}, "
            f"ttft {row['ttft']['median']:.3f}, tpot {row['tpot']['median']:.3f}",
            flush=True,
        )
    return rows


def main() -> None:
    """Measure and write bench/results/expertweave_figure6.json."""
    run(__doc__.partition("\n")[0], measure, Plan(), QUICK)


if __name__ == "__main__":
    main()
