"""TTFT by prompt length and TPOT by batch size of several systems, as figures 7 and 8 have them.

    Systems, Traffics, Plan -> [run]: fleet after fleet, place after place -> rows -> results

Rows, one for each traffic, metric, place and system:

- `traffic`: "adapter" (all requests one adapter's) or "base" (none has one).
- `metric` "ttft" with `axis` "prompt_tokens", or "tpot" with "batch_size"; `value`: the place.
- `system`, `over`: whose time over whose. A system that ends in " again" is `over` itself, in
  another process: the noise floor.
- `wall`, `cpu`: of those ratios, turn by turn, by the wall clock and by the scheduler's processor
  time: `min`, `q1`, `median`, `q3`, `max`, the 95% bootstrap interval of the median `low`, `high`,
  `num_turns`, and `by_fleet`, the median of each start of the servers.
- `same_tokens`: the share of requests that all systems answered with the same tokens.

`summary` has the same rows without `axis` and `value`: all turns of a metric together.
Partial results are written after every place; `complete` says whether the last was reached.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bench.common.record import RESULTS, spread, write_result
from bench.expertweave.steps import (
    ENVIRONMENT,
    WEIGHTS_ROUTE,
    Batch,
    Lane,
    Lanes,
    Point,
    Server,
    StepError,
    System,
    fleet,
    make_batch,
    measure_tpot,
    measure_ttft,
    with_positions,
)
from sgl_esft import zoo
from sgl_esft.formats.model_spec import MoeSpec, read_moe_spec
from sgl_esft.tools.merge import merge_adapter
from sgl_esft.zoo import serving

Metric = Literal["ttft", "tpot"]
AXES: Mapping[Metric, str] = {"ttft": "prompt_tokens", "tpot": "batch_size"}
CLOCKS = ("wall", "cpu")
NUM_RESAMPLES = 2000
LEAST_EQUAL = 0.5  # of the requests

ZOO_ADAPTER = "reverse"
MAX_POSITIONS = 4096
VOCABULARY = 98  # of both models: tokens that have text
SERVER_FLAGS = ("--disable-radix-cache",)


# ---- what to measure ----


@dataclass(frozen=True)
class Plan:
    """Places of both axes, and how much time each gets."""

    prompt_lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    decode_prompt_length: int = 32
    num_new_tokens: int = 80
    steps_per_turn: int = 5
    rounds: int = 5  # of a place of TTFT, for each fleet, at least
    seconds: float = 9.0  # of each place and fleet; one batch may take longer
    num_fleets: int = 2

    def places(self) -> Iterator[tuple[Metric, int]]:
        yield from (("ttft", length) for length in self.prompt_lengths)
        yield from (("tpot", size) for size in self.batch_sizes)


QUICK = Plan((128,), (2,), num_new_tokens=48, rounds=3, seconds=1.0, num_fleets=1)


@dataclass(frozen=True)
class Model:
    """Checkpoints with room for long prompts, and one adapter."""

    name: str
    base: Path
    merged: Path
    adapter: str
    adapter_path: Path

    @property
    def spec(self) -> MoeSpec:
        return read_moe_spec(self.base)

    def woven(self, name: str, *flags: str) -> System:
        adapters = {self.adapter: self.adapter_path}
        return System(name, (*serving.woven_arguments(self.base, adapters), *SERVER_FLAGS, *flags))

    def plain(self, name: str) -> System:
        enabled = ("--enable-route", WEIGHTS_ROUTE)
        return System(name, (*serving.merged_arguments(self.base), *SERVER_FLAGS, *enabled))


@dataclass(frozen=True)
class Traffic:
    """Who asks what: system's name -> (server's name, adapter or None); ratios are over `over`.

    weights: checkpoint by server, for plain servers that must become another model first.
    """

    name: str
    over: str
    lanes: Mapping[str, tuple[str, str | None]]
    weights: Mapping[str, Path] = field(default_factory=dict)

    @property
    def compared(self) -> list[str]:
        return [system for system in self.lanes if system != self.over]

    def open(self, servers: Mapping[str, Server]) -> Lanes:
        for name, checkpoint in self.weights.items():
            servers[name].use_weights(checkpoint)
        return {
            system: Lane(servers[server], adapter)
            for system, (server, adapter) in self.lanes.items()
        }


@dataclass(frozen=True)
class Place:
    """A traffic and a place on an axis."""

    traffic: str
    metric: Metric
    value: int


Points = dict[Place, list[Point]]  # one Point for each fleet
Extra = Callable[[Place, str, float], Mapping[str, object]]  # place, system, seconds of a step


def no_extra(*_: object) -> Mapping[str, object]:
    """Nothing beside a row's ratios."""
    return {}


@contextmanager
def open_model(name: str) -> Iterator[Model]:
    """The demo ("demo") or the scaled V2-Lite ("scaled"), in a folder that goes away again."""
    base, adapter, adapter_path = _sources(name)
    with tempfile.TemporaryDirectory(prefix="bench-steps-") as scratch:
        long = with_positions(base, Path(scratch) / "base", MAX_POSITIONS)
        merged = Path(scratch) / "merged"
        merge_adapter(long, adapter_path, merged)
        yield Model(name, long, merged, adapter, adapter_path)


def _sources(name: str) -> tuple[Path, str, Path]:
    if name == "demo":
        return zoo.base_path(), ZOO_ADAPTER, zoo.adapter_paths()[ZOO_ADAPTER]
    from bench.common.scaled_model import ScaledModel, ScaledShape

    model = ScaledModel.of(ScaledShape())
    [(adapter, path)] = model.adapters(1).items()
    return model.base(), adapter, path


# ---- measuring ----


@dataclass
class Sweep:
    """Measures, and keeps the result file up to date."""

    name: str
    plan: Plan
    traffics: Sequence[Traffic]
    header: Mapping[str, object]
    folder: Path = RESULTS
    extra: Extra = no_extra
    points: Points = field(default_factory=dict)

    def run(self, systems: Sequence[System]) -> Path:
        """All fleets. Raises StepError or ServerError; what was measured by then is written."""
        start = time.monotonic()
        for fleet_idx in range(self.plan.num_fleets):
            with fleet(systems) as servers:
                self._say(f"fleet {fleet_idx + 1} of {self.plan.num_fleets} is up", start)
                for traffic in self.traffics:
                    lanes = traffic.open(servers)
                    for metric, value in self.plan.places():
                        place = Place(traffic.name, metric, value)
                        self._measure(place, lanes, fleet_idx)
                        self.write(complete=False)
                        self._say(self._progress(traffic, place), start)
        return self.write(complete=True)

    def _measure(self, place: Place, lanes: Lanes, fleet_idx: int) -> None:
        point = measure(place, lanes, self.plan, first_seed=10_000 * fleet_idx)
        check_same_work(place, point)
        self.points.setdefault(place, []).append(point)

    def rows(self) -> list[dict[str, object]]:
        """What is measured so far, place by place."""
        return [
            {
                "traffic": place.traffic,
                "metric": place.metric,
                "axis": AXES[place.metric],
                "value": place.value,
                **row(points, system, traffic.over),
                **self.extra(place, system, seconds_of(points, traffic.over)),
            }
            for traffic in self.traffics
            for place, points in self.points.items()
            if place.traffic == traffic.name
            for system in traffic.compared
        ]

    def summary(self) -> list[dict[str, object]]:
        """All turns of a traffic and metric together, for each system."""
        return [
            {"traffic": traffic.name, "metric": metric, **pooled(axis, system, traffic.over)}
            for traffic in self.traffics
            for metric in AXES
            if (axis := self._axis(traffic.name, metric))
            for system in traffic.compared
        ]

    def write(self, *, complete: bool) -> Path:
        figures = {
            **self.header,
            "complete": complete,
            "fleets": self.plan.num_fleets,
            "decode_prompt_tokens": self.plan.decode_prompt_length,
            "decode_steps": self.plan.num_new_tokens,
            "steps_per_turn": self.plan.steps_per_turn,
            "server_environment": ENVIRONMENT,
            "summary": self.summary(),
            "rows": self.rows(),
        }
        return write_result(self.name, figures, folder=self.folder)

    def _axis(self, traffic: str, metric: Metric) -> list[list[Point]]:
        return [
            points
            for place, points in self.points.items()
            if (place.traffic, place.metric) == (traffic, metric)
        ]

    def _progress(self, traffic: Traffic, place: Place) -> str:
        points = self.points[place][-1:]
        found = [f"{s} {describe(row(points, s, traffic.over))}" for s in traffic.compared]
        where = f"{place.traffic} {place.metric} {AXES[place.metric]} {place.value}"
        return f"{where}, over {traffic.over}: {'; '.join(found)}"

    def _say(self, line: str, start: float) -> None:
        print(f"[{time.monotonic() - start:4.0f} s] {line}", flush=True)


def measure(place: Place, lanes: Lanes, plan: Plan, first_seed: int) -> Point:
    """One place with one fleet; round n has the prompts of seed `first_seed` + n."""
    decode = (place.value, plan.decode_prompt_length, plan.num_new_tokens)
    shape = (1, place.value, 1) if place.metric == "ttft" else decode

    def batch_of(number: int) -> Batch:
        return make_batch(*shape, VOCABULARY, first_seed + number)

    if place.metric == "ttft":
        return measure_ttft(lanes, batch_of, plan.seconds, plan.rounds)
    return measure_tpot(lanes, batch_of, plan.seconds, 1, plan.steps_per_turn)


def check_same_work(place: Place, point: Point) -> None:
    """Raises StepError where systems answer differently: such times compare nothing.

    A few may differ: a tie is broken by rounding.
    """
    if point.num_equal < LEAST_EQUAL * point.num_compared:
        raise StepError(
            f"{place}: only {point.num_equal} of {point.num_compared} requests got the same tokens "
            f"from {', '.join(point.turns)}; compare their answers before their times"
        )


# ---- rows ----


def row(points: Sequence[Point], system: str, over: str) -> dict[str, object]:
    """The figures of one system at one place of an axis; `points`: one a fleet."""
    return pooled([points], system, over)


def pooled(axis: Sequence[Sequence[Point]], system: str, over: str) -> dict[str, object]:
    """The figures of one system over several places; each has a Point for each fleet so far."""
    equal = sum(point.num_equal for points in axis for point in points)
    compared = sum(point.num_compared for points in axis for point in points)
    fleets = [
        [points[fleet_idx] for points in axis if fleet_idx < len(points)]
        for fleet_idx in range(max(map(len, axis)))
    ]
    return {
        "system": system,
        "over": over,
        **{
            clock: figures([ratios(points, system, over, clock) for points in fleets])
            for clock in CLOCKS
        },
        "same_tokens": equal / compared,
    }


def ratios(points: Sequence[Point], system: str, over: str, clock: str) -> list[float]:
    """system / over, turn by turn."""
    return [
        getattr(taken, clock) / getattr(other, clock)
        for point in points
        for taken, other in zip(point.turns[system], point.turns[over], strict=True)
    ]


def figures(fleets: Sequence[Sequence[float]]) -> dict[str, object]:
    """Of ratios, each fleet's by themselves: spread, interval of the median, fleets' medians."""
    values = [value for fleet_values in fleets for value in fleet_values]
    low, high = median_interval(values)
    return {
        **spread(values),
        "low": low,
        "high": high,
        "num_turns": len(values),
        "by_fleet": [statistics.median(fleet_values) for fleet_values in fleets],
    }


def median_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The 95% bootstrap confidence interval of the median."""
    array = np.asarray(values)
    draws = np.random.default_rng(seed).integers(len(array), size=(NUM_RESAMPLES, len(array)))
    low, high = np.quantile(np.median(array[draws], axis=1), [0.025, 0.975])
    return float(low), float(high)


def seconds_of(points: Sequence[Point], system: str) -> float:
    """Processor time of a system's median step."""
    return statistics.median(taken.cpu for point in points for taken in point.turns[system])


def describe(found: Mapping[str, Any]) -> str:
    """`1.004 [0.998, 1.011] cpu 1.002 [0.999, 1.005]`."""
    wall, cpu = (
        f"{found[clock]['median']:.4f} [{found[clock]['low']:.4f}, {found[clock]['high']:.4f}]"
        for clock in CLOCKS
    )
    return f"{wall} cpu {cpu}"


# ---- the command line ----


def options_of(description: str) -> argparse.Namespace:
    """--model, --seconds, --fleets, --quick, --out."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", choices=("demo", "scaled"), default="demo")
    parser.add_argument("--seconds", type=float, help="of each place and fleet")
    parser.add_argument("--fleets", type=int, help="times all servers are started")
    parser.add_argument("--quick", action="store_true", help="one place of each axis, one fleet")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON")
    return parser.parse_args()


def plan_of(options: argparse.Namespace, full: Plan) -> Plan:
    """The full plan or the quick one, with what the model and the command line change.

    The scaled model is several times slower: it gets one fleet and fewer rounds.
    """
    plan = QUICK if options.quick else full
    if options.model == "scaled" and not options.quick:
        plan = replace(plan, rounds=3, num_fleets=1)
    changes = {"seconds": options.seconds, "num_fleets": options.fleets}
    return replace(plan, **{name: v for name, v in changes.items() if v is not None})


def report(sweep: Sweep, path: Path) -> None:
    """Print what the whole says."""
    for line in sweep.summary():
        what = f"{line['traffic']} {line['metric']} {line['system']} over {line['over']}"
        print(f"{what}: {describe(line)}, same tokens {line['same_tokens']:.3f}")
    print(f"wrote {path}")
