"""Does `sgl-esft plan` say how fast a server will be? Predicted and served tokens a second.

    a server that records --[a workload]--> trace: what is asked
    three servers --[windows of other prompts]--> SpeedPoints --[fit]--> StepCosts
    trace + costs --[a server's decisions, offload/speed.py]--> predicted, with its interval
    four servers that nothing was fitted to, windows in rounds --> measured
    both --[rows_of]--> finemoe_speed.json: median and worst error

Every point of the grid differs from what was calibrated in its rows or its link, and most in the
batch size too. Windows of both kinds are taken in the same rounds, forth and back, each beside a
window of one calibrated server, so that drift of a shared machine can be taken out (reference.py;
errors without that are in the result too); a point's speed is the median of its rounds. They ask
what the trace is of, each of its requests about as often, at temperature 1: what is predicted is
how fast a server of other rows, links and batches is with that. Streams end after so many tokens,
whatever the speed: later tokens repeat more, so windows by time would not ask the same.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bench.common.load import ServerCommand, end_on_sigterm, servers
from bench.common.record import RESULTS, spread, write_result
from bench.finemoe.reference import Reference, TimedWindows, at_usual_speed, usual_s
from bench.finemoe.served import calibrated
from bench.finemoe.tier_servers import NONE, ZooModel, link_of, tier_command
from sgl_esft import zoo
from sgl_esft.offload.policies import policy_of
from sgl_esft.offload.speed import Speed, SpeedPoint, StepCosts, fit
from sgl_esft.offload.step_work import (
    BASE,
    MIN_TOKENS,
    StepWork,
    TracedRequests,
    counted_work,
    requests_of,
    step_of,
)
from sgl_esft.offload.trace import read_header_of, read_trace
from sgl_esft.tools import decode_windows
from sgl_esft.tools.decode_windows import DecodeAsk, ServedRows
from sgl_esft.tools.server_client import ServerAddress

ALL = 0.0  # a share of rows: one for every slot
WANTED = {"median_error": 0.06, "worst_error": 0.15}
PAPER = "MoE-Lens predicts throughput 94 % right, on average over its systems and models"
_T = TypeVar("_T")
_PROMPTS = 32  # whose words are shuffled
_SEED = 5000
_PROMPT_WORDS = 12
_REFERENCE_BATCH = 4
_REFERENCE_TOKENS = 48  # of a stream
_REPLAYS = 2  # of each answer in the trace, in other company each time
_FLUSHED_S = 3.0  # until a trace has its last steps
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class SpeedServer:
    """`share`: rows, of the base's experts; r: tier_servers.py's, of the link."""

    share: float
    r: float


@dataclass(frozen=True)
class GridPoint:
    """What is predicted and measured."""

    server: SpeedServer
    batch: int
    with_adapters: bool


@dataclass(frozen=True)
class SpeedBench:
    """How much is asked."""

    model: str = "deep"
    reference: SpeedServer = SpeedServer(ALL, 0.3)  # one of:
    calibrated: tuple[SpeedServer, ...] = (
        SpeedServer(ALL, 0.3),
        SpeedServer(0.5, 0.3),
        SpeedServer(0.5, 3.0),
    )
    calibrated_batches: tuple[int, ...] = (1, 2, 4, 8)
    slow_batches: tuple[int, ...] = (1, 2, 4)  # where r > 1, whose steps are long
    grid: tuple[SpeedServer, ...] = (
        SpeedServer(0.375, 0.3),
        SpeedServer(0.75, 0.3),
        SpeedServer(0.5, 1.0),
        SpeedServer(0.75, 3.0),
    )
    grid_batches: tuple[int, ...] = (1, 3, 6)
    rounds: int = 3
    num_tokens: int = 64  # of a stream
    window_s: float = 60.0  # at most
    num_requests: int = 12  # of the trace, of the base and of all
    recorded_batch: int = 4
    recorded_times: int = 4  # each of the trace's requests

    @property
    def window_end(self) -> int:
        """Tokens of a stream until its window ends."""
        return self.num_tokens - decode_windows.SPARE_TOKENS

    def windows_of(self, batch: int) -> int:
        """In a round: in all rounds together each request of the trace is asked."""
        return -(-self.num_requests // (batch * self.rounds))

    def calibrated_points(self, server: SpeedServer) -> list[GridPoint]:
        """Of one of `calibrated`."""
        batches = self.slow_batches if server.r > 1 else self.calibrated_batches
        return self.points([server], batches)

    def points(self, which: Sequence[SpeedServer], batches: Sequence[int]) -> list[GridPoint]:
        """Server after server."""
        return [
            GridPoint(server, batch, with_adapters)
            for server in which
            for batch in batches
            for with_adapters in (False, True)
        ]


@dataclass
class SpeedRounds:
    """Windows of all rounds so far."""

    calibration: list[TimedWindows] = field(default_factory=list)
    measured: dict[GridPoint, list[TimedWindows]] = field(default_factory=dict)  # by round

    def usual_s(self) -> float:
        """Of the reference, in all of it."""
        timed = [each for rounds in self.measured.values() for each in rounds]
        return usual_s([*self.calibration, *timed])

    def calibrated(self, usual: float | None) -> list[SpeedPoint]:
        """Windows for `fit`. None: as they were."""
        return [window for each in self.calibration for window in _put_right(each, usual)]


def _put_right(timed: TimedWindows, usual: float | None) -> Sequence[SpeedPoint]:
    return timed.windows if usual is None else at_usual_speed(timed, usual)


def forth_or_back(items: Sequence[_T], number: int) -> list[_T]:
    """The other way round in every second round."""
    return list(reversed(items)) if number % 2 else list(items)


def workload(model: ZooModel, count: int, with_adapters: bool) -> list[DecodeAsk]:
    """What the trace is of, and windows are. Adapters and the base in turns, where they are asked.

    Words of held-out prompts, shuffled: after a task's own prompt tokens soon repeat.
    """
    rng = random.Random(_SEED + with_adapters)
    words = [word for ask in model.asks(_PROMPTS, _SEED) for word in ask.text.split()]
    names = itertools.cycle([None, *model.adapters] if with_adapters else [None])
    return [
        DecodeAsk(" ".join(rng.choices(words, k=_PROMPT_WORDS)), next(names)) for _ in range(count)
    ]


def recorded(model: ZooModel, bench: SpeedBench, folder: Path) -> TracedRequests:
    """The routing of both workloads, the base's first, each request a few times: no two answers
    to it are the same.
    """
    enough = model.spec.num_experts * (1 + len(model.adapters))
    command = tier_command(model, NONE, link_of(model, 1.0, 1e-6), enough)
    command = ServerCommand([*command.arguments, "--record-routing", str(folder)])
    with servers({NONE: command}) as urls:
        address = ServerAddress(urls[NONE], _TIMEOUT_S)
        rows = decode_windows.served_rows(address)
        for with_adapters in (False, True):
            asks = bench.recorded_times * workload(model, bench.num_requests, with_adapters)
            for first in range(0, len(asks), bench.recorded_batch):
                some = asks[first : first + bench.recorded_batch]
                decode_windows.measure(address, rows, some, bench.window_s, bench.num_tokens)
        time.sleep(_FLUSHED_S)
    return long_enough(requests_of(read_header_of(folder), read_trace(folder)), bench)


def long_enough(traced: TracedRequests, bench: SpeedBench) -> TracedRequests:
    """For a window: without what a server asks itself at its start."""
    long = [each for each in traced.requests if len(each.topk_ids) >= bench.window_end]
    return replace(traced, requests=tuple(long))


def window_work(
    traced: TracedRequests, batch: int, num_rows: int, bench: SpeedBench, seed: int = 0
) -> StepWork:
    """As `step_work.work_of`, of requests that begin together, and of those tokens of them that
    windows have: what a request's first tokens read is read by then.
    """
    turn = in_turns(traced.requests, lambda each: each.adapter_slot, random.Random(seed))
    length, warm = bench.window_end, decode_windows.WARM_TOKENS
    of_tokens = -(-MIN_TOKENS // (batch * (length - warm)))
    of_requests = -(-_REPLAYS * len(traced.requests) // batch)
    steps = []
    for _ in range(1 + max(of_tokens, of_requests)):  # the first fills the rows
        group = [next(turn) for _ in range(batch)]
        steps += [
            step_of(traced.header, [(each.adapter_slot, each.topk_ids[token]) for each in group])
            for token in range(length)
        ]

    def is_counted(step: int) -> bool:
        return step >= length and step % length >= warm

    return counted_work(traced, steps, num_rows, policy_of(NONE), is_counted)


def in_turns(items: Sequence[_T], kind: Callable[[_T], object], rng: random.Random) -> Iterator[_T]:
    """Each once, kinds by turns, then again in another order: groups are mixed alike."""
    kinds: dict[object, list[_T]] = {}
    for item in items:
        kinds.setdefault(kind(item), []).append(item)
    while True:
        shuffled = [rng.sample(each, len(each)) for each in kinds.values()]
        for together in itertools.zip_longest(*shuffled):
            yield from (item for item in together if item is not None)


def workload_of(traced: TracedRequests, with_adapters: bool) -> TracedRequests:
    """One of the two: of the mixed one the base has as many requests as an adapter, and they came
    last.
    """
    of_adapters = [each for each in traced.requests if each.adapter_slot != BASE]
    of_base = [each for each in traced.requests if each.adapter_slot == BASE]
    num_adapters = len({each.adapter_slot for each in of_adapters})
    last = len(of_base) - round(len(of_adapters) / max(1, num_adapters))
    own = (*of_adapters, *of_base[last:]) if with_adapters else tuple(of_base[:last])
    return replace(traced, requests=own)


def rows_of_server(server: SpeedServer, traced: TracedRequests) -> int:
    """Of each layer."""
    if server.share == ALL:
        return traced.header.num_slots
    return max(traced.header.top_k, round(server.share * traced.header.num_base))


def reference_of(url: str, model: ZooModel, bench: SpeedBench) -> Reference:
    """Of the base alone."""
    address = ServerAddress(url, _TIMEOUT_S)
    rows = decode_windows.served_rows(address)
    asks = workload(model, _REFERENCE_BATCH, False)
    return Reference(
        lambda: decode_windows.measure(address, rows, asks, bench.window_s, _REFERENCE_TOKENS)
    )


def take_round(
    urls: Mapping[SpeedServer, str],
    reference: Reference,
    model: ZooModel,
    bench: SpeedBench,
    number: int,
    so: SpeedRounds,
) -> None:
    """Windows of everything, by servers in turns. Calibration asks what a server itself says."""
    for server in forth_or_back([*bench.calibrated, *bench.grid], number):
        address = ServerAddress(urls[server], _TIMEOUT_S)
        rows = decode_windows.served_rows(address)
        if server in bench.calibrated:
            points = bench.calibrated_points(server)
            for ask in calibration(address, rows, model, points, bench, number):
                so.calibration.append(reference.beside(ask))
            continue
        warm = workload(model, max(bench.grid_batches), True)
        decode_windows.measure(address, rows, warm, bench.window_s, bench.num_tokens)
        for point in forth_or_back(bench.points([server], bench.grid_batches), number):
            ask = partial(grid_windows, address, rows, model, point, bench, number)
            so.measured.setdefault(point, []).append(reference.beside(ask))


def calibration(
    address: ServerAddress,
    rows: ServedRows,
    model: ZooModel,
    points: Sequence[GridPoint],
    bench: SpeedBench,
    number: int,
) -> Iterator[Callable[[], list[SpeedPoint]]]:
    """As `sgl-esft offload calibrate`, one window of each setting, to be called in turns."""
    words, adapters = decode_windows.own_words(address), list(model.adapters)

    def window(turn: int, point: GridPoint) -> list[SpeedPoint]:
        of = adapters if point.with_adapters else []
        asks = decode_windows.make_asks(words, of, point.batch, 100 * number + turn)
        return [decode_windows.measure(address, rows, asks, bench.window_s, bench.num_tokens)]

    window(0, points[-1])  # fills the rows
    for turn, point in enumerate(points, 1):
        yield partial(window, turn, point)


def grid_windows(
    address: ServerAddress,
    rows: ServedRows,
    model: ZooModel,
    point: GridPoint,
    bench: SpeedBench,
    number: int,
) -> list[SpeedPoint]:
    """Of few requests several: one request's experts are not everyone's."""
    every = workload(model, bench.num_requests, point.with_adapters)
    return [
        decode_windows.measure(address, rows, asks, bench.window_s, bench.num_tokens)
        for asks in asks_of(every, point, bench)[number]
    ]


def asks_of(
    every: Sequence[DecodeAsk], point: GridPoint, bench: SpeedBench
) -> list[list[list[DecodeAsk]]]:
    """By round, the requests of each window: all of them, before one comes again."""
    turn = in_turns(every, lambda ask: ask.adapter, random.Random(point.batch))
    num_windows = bench.windows_of(point.batch)
    return [
        [[next(turn) for _ in range(point.batch)] for _ in range(num_windows)]
        for _ in range(bench.rounds)
    ]


# ---- what came of it ----


def tokens_per_s(windows: Sequence[SpeedPoint]) -> float:
    """Of one round's windows of a point."""
    return windows[0].num_tokens / statistics.fmean(each.step_s for each in windows)


def works_of(traced: TracedRequests, bench: SpeedBench) -> dict[GridPoint, StepWork]:
    """Of each point of the grid, what its steps do."""
    return {
        point: window_work(
            workload_of(traced, point.with_adapters),
            point.batch,
            rows_of_server(point.server, traced),
            bench,
        )
        for point in bench.points(bench.grid, bench.grid_batches)
    }


def rows_of(
    so: SpeedRounds,
    works: Mapping[GridPoint, StepWork],
    bytes_per_s: Mapping[float, int],
    usual: float | None,
) -> list[dict[str, Any]]:
    """A row for each point of the grid. bytes_per_s: of a link, by r. usual: None = as it was."""
    costs = fit(so.calibrated(usual))
    return [
        _row(
            costs.with_bandwidth(bytes_per_s[point.server.r]),
            point,
            works[point],
            [_put_right(each, usual) for each in rounds],
        )
        for point, rounds in so.measured.items()
    ]


def _row(
    costs: StepCosts, point: GridPoint, work: StepWork, rounds: Sequence[Sequence[SpeedPoint]]
) -> dict[str, Any]:
    """costs: on the point's link."""
    speed = costs.speed(work, with_adapters=point.with_adapters)
    measured = [tokens_per_s(windows) for windows in rounds]
    served = statistics.median(measured)
    return {
        "rows": rounds[0][0].num_rows,
        "r": point.server.r,
        "batch": point.batch,
        "with_adapters": point.with_adapters,
        "predicted_tokens_per_s": asdict(speed),
        "tokens_per_s": spread(measured),
        "error": speed.expected / served - 1,
        "is_inside": speed.low <= served <= speed.high,
        "of_which": _parts(costs, work, speed, [each for windows in rounds for each in windows]),
    }


def _parts(
    link: StepCosts, work: StepWork, speed: Speed, windows: Sequence[SpeedPoint]
) -> dict[str, Any]:
    """A step's parts, predicted and measured: where an error comes from."""

    def measured(name: str) -> float:
        return statistics.fmean(getattr(each, name) for each in windows)

    step_s = work.num_tokens / speed.expected
    compute_s = link.compute_s(work)
    return {
        "experts": [work.num_needed, measured("num_needed")],
        "loads": [work.num_loads, measured("num_loads")],
        "compute_s": [compute_s, measured("step_s") - measured("stall_s")],
        "stall_s": [step_s - compute_s, measured("stall_s")],
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of all points together."""
    errors = [abs(row["error"]) for row in rows]
    return {
        "points": len(rows),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "share_inside": sum(row["is_inside"] for row in rows) / len(rows),
    }


def write(
    so: SpeedRounds,
    works: Mapping[GridPoint, StepWork],
    bytes_per_s: Mapping[float, int],
    bench: SpeedBench,
    out: Path,
) -> list[dict[str, Any]]:
    """The result, with the rounds so far. Returns its rows."""
    usual = so.usual_s()
    rows = rows_of(so, works, bytes_per_s, usual)
    found = summary(rows)
    as_it_was = summary(rows_of(so, works, bytes_per_s, None))
    print(f"  {found}; with the machine's drift: {as_it_was}", flush=True)
    calibrated = so.calibrated(usual)
    figures = {
        "what": "Tokens a second as `sgl-esft plan --speed` predicts them, and as served",
        "paper": PAPER,
        "wanted": WANTED,
        "plan": asdict(bench),
        "rounds": len(next(iter(so.measured.values()))),
        **found,
        "with_drift": as_it_was,
        "reference_compute_s": spread([each.compute_s for each in so.calibration]),
        "costs": asdict(fit(calibrated)),
        "rows": rows,
        "calibration": [asdict(point) for point in calibrated],
    }
    write_result("finemoe_speed", figures, folder=out)
    return rows


def said(row: Mapping[str, Any]) -> str:
    """A row, to be read."""
    of = "with adapters" if row["with_adapters"] else "base only"
    speed = row["predicted_tokens_per_s"]
    return (
        f"  {row['rows']:3} rows, r {row['r']:g}, batch {row['batch']}, {of:13}: "
        f"{speed['expected']:.1f} ({speed['low']:.1f} - {speed['high']:.1f}) predicted, "
        f"{row['tokens_per_s']['median']:.1f} served, {row['error']:+.1%}"
    )


def run(bench: SpeedBench, out: Path) -> None:
    """Record, then rounds, each written."""
    so = SpeedRounds()
    with tempfile.TemporaryDirectory(prefix="finemoe-speed-") as work:
        model = ZooModel.of(bench.model, Path(work))
        layer_s = calibrated(model)
        traced = recorded(model, bench, Path(work) / "trace")
        every = [*bench.calibrated, *bench.grid]
        links = {server.r: link_of(model, server.r, layer_s) for server in every}
        commands = {
            f"{number}": tier_command(model, NONE, links[s.r], rows_of_server(s, traced))
            for number, s in enumerate(every)
        }
        works = works_of(traced, bench)
        bytes_per_s = {r: link.bytes_per_s for r, link in links.items()}
        with servers(commands) as named:
            urls = dict(zip(every, named.values(), strict=True))
            reference = reference_of(urls[bench.reference], model, bench)
            for number in range(bench.rounds):
                print(f"round {number + 1} of {bench.rounds}", flush=True)
                take_round(urls, reference, model, bench, number, so)
                for row in write(so, works, bytes_per_s, bench, out):
                    print(said(row), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write bench/results/finemoe_speed.json, after each round."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=list(zoo.MODELS), default="deep")
    parser.add_argument("--rounds", type=int, default=SpeedBench.rounds)
    parser.add_argument(
        "--quick", action="store_true", help="one round, of short windows and two servers"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    end_on_sigterm()
    bench = SpeedBench(model=options.model, rounds=options.rounds)
    if options.quick:
        bench = replace(bench, grid=bench.grid[:2], rounds=1, num_tokens=48, num_requests=8)
    run(bench, options.out)


if __name__ == "__main__":
    main()
