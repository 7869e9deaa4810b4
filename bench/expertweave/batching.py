"""What composing batches by adapter saves, simulated: distinct experts and adapters of a step.

    Workload -> [arrivals] -> [simulate] with sgl_esft/plugin/adapter_batching.py -> compositions
    of steps
    compositions, Routing -> distinct experts, expected (bench/expertweave/floor.py's formula) and
    drawn

Continuous batching, counted in decode steps: a request that is admitted gives a token in each step
until its answer is complete. Prefill takes no step. Nothing is timed, so that the figures are the
same on every machine; `--served` (bench/expertweave/batching_served.py) asks real servers.

`rows` of the result, one for each (experts, popularity, max_running, load, max_overtakes):
    load                 arrivals over what max_running requests at once can answer; 1 and above
                         lets the queue grow, which `queue` says: waiting over max_running, mean
    experts_over_fcfs    distinct experts of a step and layer over first come, first served
    drawn_over_fcfs      the same with each token's experts drawn, not expected
    adapters_over_fcfs   distinct adapters of a step
    delay_over_fcfs, delay_p99_over_fcfs    steps from arrival to admission
    most_overtakes       seen by any request
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.common.load import power_law_shares
from bench.common.record import spread, write_result
from bench.expertweave import batching_served
from bench.expertweave.expert_memory import DATA, MODEL_CONFIG, PUBLISHED
from bench.expertweave.floor import selection_from_scores
from sgl_esft.formats.adapter_config import read_expert_config
from sgl_esft.formats.adapter_shapes import profile_shapes
from sgl_esft.memory.model_sizes import read_model_sizes
from sgl_esft.plugin.adapter_batching import AdapterId, ArrivalBook, Waiting, plan_order
from sgl_esft.tools.select import read_scores

NUM_ADAPTERS = 20
NUM_EXPERTS, TOP_K = 64, 6
OVERTAKES = (0, 16, 32, 64, 128)
SEEDS = (1, 2, 3)
SERVED_BOUNDS = (0, 2, 4, 8, 16, 32)
LOADS = {16: (0.9, 1.0, 1.2), 32: (0.9, 1.0, 1.2), 64: (0.7, 0.9, 1.0, 1.2), 256: (1.2,)}
WARM_UP = 0.25  # of a trace; its steps do not count
EXPECTED_EVERY, DRAWN_EVERY = 5, 50  # steps

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Routing:
    """How owners select experts; the base is owner 0. Arrays are [1 + N, layers, experts]."""

    scores: Array  # shares of selections, a row sums to 1
    selection: Array  # chance that one token selects the expert
    is_tuned: NDArray[np.bool_]  # the owner has its own copy

    def expected_touched(self, num_tokens: NDArray[np.int64]) -> float:
        """Distinct experts of a layer, as `bench.expertweave.floor.expected_touched`, mean over
        layers.
        """
        owners = np.flatnonzero(num_tokens)
        tuned = self.is_tuned[owners]
        missed = (1 - self.selection[owners]) ** num_tokens[owners, None, None]
        base = 1 - np.where(tuned, 1.0, missed).prod(axis=0)
        return float((base.sum() + np.where(tuned, 1 - missed, 0).sum()) / base.shape[0])

    def drawn_touched(self, num_tokens: NDArray[np.int64], rng: np.random.Generator) -> float:
        """As `expected_touched`, with top-k experts drawn without replacement for each token."""
        owners = np.repeat(np.arange(len(num_tokens)), num_tokens)
        keys = rng.exponential(size=self.scores[owners].shape) / self.scores[owners]
        chosen = np.argpartition(keys, TOP_K, axis=2)[:, :, :TOP_K]
        is_chosen = np.zeros(keys.shape, dtype=np.bool_)
        np.put_along_axis(is_chosen, chosen, True, axis=2)
        tuned = self.is_tuned[owners]
        touched = (is_chosen & ~tuned).any(axis=0).sum()
        for owner in np.unique(owners):
            touched += (is_chosen & tuned)[owners == owner].any(axis=0).sum()
        return float(touched / keys.shape[1])


def make_routing(scores: Array, domains: Sequence[int], is_tuned: NDArray[np.bool_]) -> Routing:
    """scores: [domains, layers, experts]; the base answers all domains. is_tuned: of adapters."""
    scores = np.maximum(scores, 1e-6)
    scores = scores / scores.sum(axis=2, keepdims=True)
    own = np.concatenate([scores.mean(axis=0)[None], scores[list(domains)]])
    selection = [
        [selection_from_scores(dict(enumerate(row)), NUM_EXPERTS, TOP_K) for row in owner]
        for owner in own
    ]
    none = np.zeros_like(is_tuned[:1])
    return Routing(own, np.array(selection), np.concatenate([none, is_tuned]))


@cache
def published_routing() -> Routing:
    """The four published expert configs in turn, with the published token scores of their tasks."""
    layers = read_model_sizes(MODEL_CONFIG).spec.moe_layer_ids
    tasks = ("intent", "law")
    found = [read_scores(DATA / "esft" / f"{task}-scores.json", "token") for task in tasks]
    scores = np.array([[[s[la][e] for e in range(NUM_EXPERTS)] for la in layers] for s in found])
    names = [PUBLISHED[a % len(PUBLISHED)] for a in range(NUM_ADAPTERS)]
    is_tuned = np.zeros((NUM_ADAPTERS, len(layers), NUM_EXPERTS), dtype=np.bool_)
    for adapter, name in enumerate(names):
        config = read_expert_config(DATA / "esft" / f"{name}.json")
        for row, layer in enumerate(layers):
            is_tuned[adapter, row, list(config[layer])] = True
    return make_routing(scores, [tasks.index(name.split("-")[1]) for name in names], is_tuned)


@cache
def table_1_routing() -> Routing:
    """Table 1's ten adapters twice, their experts the hottest of scores drawn for each task."""
    spec = read_model_sizes(MODEL_CONFIG).spec
    shapes = profile_shapes("table1", spec) * 2
    tasks = sorted({shape.name.split("-")[1] for shape in shapes})
    rng = np.random.default_rng(0)
    # Tuned experts are then as hot as in the published scores: 0.23 of tokens select one.
    scores = rng.lognormal(sigma=0.65, size=(len(tasks), len(spec.moe_layer_ids), NUM_EXPERTS))
    domains = [tasks.index(shape.name.split("-")[1]) for shape in shapes]
    is_tuned = np.zeros((len(shapes), *scores.shape[1:]), dtype=np.bool_)
    for adapter, shape in enumerate(shapes):
        for row, layer in enumerate(spec.moe_layer_ids):
            hottest = np.argsort(scores[domains[adapter], row])[::-1][: shape.experts[layer]]
            is_tuned[adapter, row, hottest] = True
    return make_routing(scores, domains, is_tuned)


ROUTINGS = {"published": published_routing, "table1": table_1_routing}


@dataclass(frozen=True)
class Workload:
    """A trace: who asks, how often, and for how much."""

    popularity: str  # uniform, zipf, or the alpha of a power law
    max_running: int
    load: float
    mean_steps: int = 50  # a geometric length of answers
    num_turnovers: int = 20  # requests over max_running
    seed: int = 0

    def shares(self) -> Array:
        """Of the base, then of each adapter; the base has that of an average adapter."""
        shares = {
            "uniform": np.full(NUM_ADAPTERS, 1 / NUM_ADAPTERS),
            "zipf": 1 / np.arange(1, NUM_ADAPTERS + 1),
        }.get(self.popularity)
        if shares is None:
            shares = np.array(power_law_shares(NUM_ADAPTERS, float(self.popularity)))
        weights = np.array([1 / NUM_ADAPTERS, *(shares / shares.sum())])
        found: Array = weights / weights.sum()
        return found


@dataclass(frozen=True)
class Trace:
    """Requests by arrival: the step each comes at, its owner and how many steps it runs."""

    arrivals: Array
    owners: NDArray[np.int64]
    num_steps: NDArray[np.int64]


def make_trace(workload: Workload) -> Trace:
    """Poisson arrivals; the same for every policy."""
    rng = np.random.default_rng(workload.seed)
    num_requests = workload.num_turnovers * workload.max_running
    gap = workload.mean_steps / (workload.load * workload.max_running)
    return Trace(
        np.cumsum(rng.exponential(gap, num_requests)),
        rng.choice(1 + NUM_ADAPTERS, num_requests, p=workload.shares()),
        rng.geometric(1 / workload.mean_steps, num_requests),
    )


class Engine:
    """Continuous batching with a policy of its own in front of it."""

    def __init__(
        self, trace: Trace, max_running: int, max_overtakes: int, most: int | None = None
    ) -> None:
        """most: count no adapter's running requests beyond it; 1 only asks whether it runs."""
        self.trace = trace
        self.most = most
        self.max_running = max_running
        self.max_overtakes = max_overtakes
        self.book = ArrivalBook()
        self.queue: list[int] = []
        self.num_arrived = 0
        self.num_running = np.zeros(1 + NUM_ADAPTERS, dtype=np.int64)  # by owner
        self.ends: list[tuple[int, int]] = []  # (step, owner)
        self.admitted_at: dict[int, int] = {}
        self.most_overtakes = 0

    def step(self, now: int) -> None:
        """Answers end, requests arrive, the queue is put in order and its front admitted."""
        while self.ends and self.ends[0][0] <= now:
            self.num_running[heapq.heappop(self.ends)[1]] -= 1
        stop = int(np.searchsorted(self.trace.arrivals, now, side="right"))
        self.queue += range(self.num_arrived, stop)
        self.num_arrived = stop
        room = self.max_running - int(self.num_running.sum())
        if room and self.queue:
            self._order()
            for request in self.queue[:room]:
                self._admit(request, now)
            del self.queue[:room]

    def _order(self) -> None:
        self.book.observe(self.queue)
        by_arrival = self.book.by_arrival()
        self.most_overtakes = max(self.most_overtakes, by_arrival[0][1])
        waiting = [Waiting(self._adapter(number), count) for number, count in by_arrival]
        counts = self.num_running if self.most is None else self.num_running.clip(max=self.most)
        running = {_name(owner): int(n) for owner, n in enumerate(counts) if n}
        order = plan_order(waiting, running, self.max_overtakes)
        self.queue = [by_arrival[index][0] for index in order]

    def _adapter(self, request: int) -> AdapterId:
        return _name(int(self.trace.owners[request]))

    def _admit(self, request: int, now: int) -> None:
        owner = int(self.trace.owners[request])
        self.num_running[owner] += 1
        self.admitted_at[request] = now
        heapq.heappush(self.ends, (now + int(self.trace.num_steps[request]), owner))


def _name(owner: int) -> AdapterId:
    return None if owner == 0 else str(owner)


@dataclass(frozen=True)
class Figures:
    """Of one run: means over steps, then over requests that arrived after the warm-up."""

    experts: float
    drawn: float
    adapters: float
    queue: float  # waiting over max_running
    delay: float  # over the mean length of an answer
    delay_p99: float
    most_overtakes: int


def simulate(
    workload: Workload, routing: Routing, max_overtakes: int, most: int | None = None
) -> Figures:
    """Run a trace to its last admission; steps count from the warm-up to the last arrival."""
    trace = make_trace(workload)
    engine = Engine(trace, workload.max_running, max_overtakes, most)
    first = int(WARM_UP * len(trace.arrivals))
    rng = np.random.default_rng(workload.seed)
    experts, drawn, adapters, queue = [], [], [], []
    now = 0
    while len(engine.admitted_at) < len(trace.arrivals):
        engine.step(now)
        if first < engine.num_arrived < len(trace.arrivals):
            queue.append(len(engine.queue) / workload.max_running)
            adapters.append(np.count_nonzero(engine.num_running[1:]))
            if now % EXPECTED_EVERY == 0:
                experts.append(routing.expected_touched(engine.num_running))
            if now % DRAWN_EVERY == 0:
                drawn.append(routing.drawn_touched(engine.num_running, rng))
        now += 1
    late = range(first, len(trace.arrivals))
    delays = [(engine.admitted_at[n] - trace.arrivals[n]) / workload.mean_steps for n in late]
    return Figures(
        *(float(np.mean(seen)) for seen in (experts, drawn, adapters, queue, delays)),
        float(np.percentile(delays, 99)),
        engine.most_overtakes,
    )


def rows_of(
    workload: Workload,
    experts: str,
    overtakes: Sequence[int],
    seeds: Sequence[int] = SEEDS,
    most: int | None = None,
) -> list[dict[str, object]]:
    """A row for each bound but 0, which is what the others are divided by, seed by seed."""
    runs = {
        bound: [
            simulate(replace(workload, seed=seed), ROUTINGS[experts](), bound, most)
            for seed in seeds
        ]
        for bound in (0, *overtakes)
    }
    return [
        {
            "experts": experts,
            "popularity": workload.popularity,
            "max_running": workload.max_running,
            "load": workload.load,
            "preference": "most running" if most is None else "any running",
            "max_overtakes": bound,
            "fcfs": asdict(runs[0][0]),
            **_over_fcfs(runs[bound], runs[0]),
        }
        for bound in overtakes
    ]


def _over_fcfs(runs: Sequence[Figures], plain: Sequence[Figures]) -> dict[str, object]:
    def over(name: str) -> dict[str, float]:
        pairs = zip(runs, plain, strict=True)
        return spread([getattr(run, name) / getattr(base, name) for run, base in pairs])

    names = ("experts", "drawn", "adapters", "delay", "delay_p99")
    return {
        **{f"{name}_over_fcfs": over(name) for name in names},
        "delay_p99_more": spread(
            [r.delay_p99 - b.delay_p99 for r, b in zip(runs, plain, strict=True)]
        ),
        "queue": spread([run.queue for run in runs]),
        "most_overtakes": max(run.most_overtakes for run in runs),
    }


def plan() -> list[tuple[Workload, str, Sequence[int], int | None]]:
    """Every workload, with the bounds to try: by size and load, by popularity, and otherwise."""
    bounds = OVERTAKES[1:]
    by_size = [
        (Workload("uniform", size, load), "published", bounds, None)
        for size, loads in LOADS.items()
        for load in loads
    ]
    by_popularity = [
        (Workload(popularity, 64, 1.2), "published", bounds, None)
        for popularity in ("zipf", "0.3", "0.1")
    ]
    otherwise = [
        (Workload("uniform", 64, 1.2), "table1", bounds, None),
        *((Workload("uniform", size, 1.2), "published", bounds, 1) for size in (16, 64)),
    ]
    return [*by_popularity, *otherwise, *by_size]


def main() -> None:
    """Simulate and write bench/results/batching.json, or serve and write batching_served.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--served", action="store_true", help="real servers instead")
    parser.add_argument("--rounds", type=int, default=8, help="of --served")
    parser.add_argument("--bounds", type=int, nargs="+", default=SERVED_BOUNDS, help="of --served")
    options = parser.parse_args()
    path = _serve(options.rounds, options.bounds) if options.served else _simulate(options.seeds)
    print(f"wrote {path.name}")


def _serve(rounds: int, bounds: Sequence[int]) -> Path:
    setting, rows = batching_served.Setting(), []
    for row in batching_served.measure(setting, rounds, bounds):
        rows.append(row)
        path = write_result(
            "batching_served",
            {
                "what": "adapters that run at once, on over off",
                "is_complete": len(rows) == len(bounds),
                **asdict(setting),
                "rows": rows,
            },
        )
    return path


def _simulate(seeds: Sequence[int]) -> Path:
    rows = []
    for workload, experts, overtakes, most in plan():
        for row in rows_of(workload, experts, overtakes, seeds, most):
            rows.append(row)
            print(_line(row), flush=True)
    return write_result(
        "batching",
        {
            "what": "distinct experts and adapters of a decode step, by --max-overtakes, over FCFS",
            "adapters": NUM_ADAPTERS,
            "mean_steps": Workload.mean_steps,
            "num_turnovers": Workload.num_turnovers,
            "seeds": seeds,
            "rows": rows,
        },
    )


def _line(row: Mapping[str, Any]) -> str:
    cells = [row[f"{name}_over_fcfs"]["median"] for name in ("experts", "drawn", "adapters")]
    return (
        f"{row['experts']} {row['popularity']} R {row['max_running']} load {row['load']} "
        f"{row['preference']} B {row['max_overtakes']}: experts, drawn, adapters "
        f"{', '.join(f'{cell:.3f}' for cell in cells)}; p99 delay "
        f"{row['delay_p99_over_fcfs']['median']:.2f}, queue {row['queue']['median']:.2f}, "
        f"most {row['most_overtakes']}"
    )


if __name__ == "__main__":
    main()
