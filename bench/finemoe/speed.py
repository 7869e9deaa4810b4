"""Does `sgl-esft plan` say how fast a server will be? Predicted and served tokens a second.

    a server that records --[a workload]--> trace: what is asked
    three servers --[windows of other prompts]--> SpeedPoints --[fit]--> StepCosts
    trace + costs --[a server's decisions, offload/speed.py]--> predicted, with its interval
    four servers that nothing was fitted to, windows in rounds --> measured
    both --[rows_of]--> finemoe_speed.json: median and worst error

Every point of the grid differs from what was calibrated in its rows or its link, and most in the
batch size too. Windows of both kinds are taken in the same rounds, forth and back, each beside a
window of one calibrated server, so that drift of a shared machine can be taken out (reference.py;
errors without that are in the result too). What is asked is what the trace is of (speed_plan.py).
Streams end after so many tokens, whatever the speed: windows by time would not ask the same.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.common.load import ServerCommand, end_on_sigterm, servers
from bench.common.record import RESULTS, spread, write_result
from bench.finemoe.reference import Reference, TimedWindows, at_usual_speed, usual_s
from bench.finemoe.served import calibrated
from bench.finemoe.speed_plan import (
    SAMPLING,
    GridPoint,
    Recorded,
    SpeedBench,
    SpeedServer,
    round_of,
    workload,
    works_of,
)
from bench.finemoe.tier_servers import NONE, ZooModel, in_turns, link_of, tier_command
from sgl_esft import zoo
from sgl_esft.offload.speed import Speed, SpeedPoint, StepCosts, fit
from sgl_esft.offload.step_work import StepWork
from sgl_esft.offload.trace import read_header_of, read_trace
from sgl_esft.tools import decode_windows
from sgl_esft.tools.decode_windows import DecodeAsk, ServedRows
from sgl_esft.tools.server_client import ServerAddress

WANTED = {"median_error": 0.06, "worst_error": 0.15}
PAPER = "MoE-Lens predicts throughput 94 % right, on average over its systems and models"
_REFERENCE_BATCH = 4
_REFERENCE_TOKENS = 48  # of a stream
_FLUSHED_S = 3.0  # until a trace has its last steps
_TIMEOUT_S = 300.0


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


def recorded(model: ZooModel, bench: SpeedBench, folder: Path) -> Recorded:
    """The routing of both workloads, each request by itself."""
    enough = model.spec.num_experts * (1 + len(model.adapters))
    command = tier_command(model, NONE, link_of(model, 1.0, 1e-6), enough)
    command = ServerCommand([*command.arguments, "--record-routing", str(folder)])
    with servers({NONE: command}) as urls:
        window = Asking.of(urls[NONE], bench)
        for with_adapters in (False, True):
            for ask in workload(model, bench.num_requests, with_adapters):
                window([ask])
        time.sleep(_FLUSHED_S)
    return Recorded.of(read_header_of(folder), list(read_trace(folder)), bench)


@dataclass(frozen=True)
class Asking:
    """Takes windows of a server."""

    address: ServerAddress
    rows: ServedRows
    window_s: float
    num_tokens: int

    @classmethod
    def of(cls, url: str, bench: SpeedBench) -> Asking:
        address = ServerAddress(url, _TIMEOUT_S)
        rows = decode_windows.served_rows(address)
        return cls(address, rows, bench.window_s, bench.num_tokens)

    def __call__(self, asks: Sequence[DecodeAsk]) -> SpeedPoint:
        return decode_windows.measure(
            self.address, self.rows, asks, self.window_s, self.num_tokens, SAMPLING
        )


def reference_of(url: str, model: ZooModel, bench: SpeedBench) -> Reference:
    """Of the base alone."""
    window = Asking.of(url, replace(bench, num_tokens=_REFERENCE_TOKENS))
    asks = workload(model, _REFERENCE_BATCH, False)
    return Reference(lambda: window(asks))


def take_round(
    urls: Mapping[SpeedServer, str],
    reference: Reference,
    model: ZooModel,
    bench: SpeedBench,
    number: int,
    so: SpeedRounds,
) -> None:
    """Windows of everything, by servers in turns. Calibration asks what a server itself says."""
    every = {of: workload(model, bench.num_requests, of) for of in (False, True)}
    for server in in_turns([*bench.calibrated, *bench.grid], number):
        window = Asking.of(urls[server], bench)
        if server in bench.calibrated:
            points = bench.calibrated_points(server)
            for ask in calibration(window, list(model.adapters), points, number):
                so.calibration.append(reference.beside(ask))
            continue
        for windows in round_of(server, number, bench, 1 + len(model.adapters)):
            asks = every[windows.point.with_adapters]
            groups = [[asks[n] for n in group] for group in windows.groups]
            if windows.is_measured:
                timed = reference.beside(partial(list, map(window, groups)))
                so.measured.setdefault(windows.point, []).append(timed)
            else:
                list(map(window, groups))


def calibration(
    window: Asking, adapters: Sequence[str], points: Sequence[GridPoint], number: int
) -> Iterator[Callable[[], list[SpeedPoint]]]:
    """As `sgl-esft offload calibrate`, one window of each setting, to be called in turns."""
    words = decode_windows.own_words(window.address)

    def of(turn: int, point: GridPoint) -> list[SpeedPoint]:
        names = adapters if point.with_adapters else []
        return [window(decode_windows.make_asks(words, names, point.batch, 100 * number + turn))]

    of(0, points[-1])  # fills the rows
    for turn, point in enumerate(points, 1):
        yield partial(of, turn, point)


# ---- what came of it ----


def tokens_per_s(windows: Sequence[SpeedPoint]) -> float:
    """Of some windows of a point: what is predicted is an average step, so theirs is."""
    return windows[0].num_tokens / statistics.fmean(each.step_s for each in windows)


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
    served = tokens_per_s([each for windows in rounds for each in windows])
    return {
        "rows": rounds[0][0].num_rows,
        "r": point.server.r,
        "batch": point.batch,
        "with_adapters": point.with_adapters,
        "predicted_tokens_per_s": asdict(speed),
        "served_tokens_per_s": served,
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
        f"{row['served_tokens_per_s']:.1f} served, {row['error']:+.1%}"
    )


def run(bench: SpeedBench, out: Path) -> None:
    """Record, then rounds, each written."""
    so = SpeedRounds()
    with tempfile.TemporaryDirectory(prefix="finemoe-speed-") as work:
        model = ZooModel.of(bench.model, Path(work))
        layer_s = calibrated(model)
        found = recorded(model, bench, Path(work) / "trace")
        every = [*bench.calibrated, *bench.grid]
        links = {server.r: link_of(model, server.r, layer_s) for server in every}
        commands = {
            f"{number}": tier_command(model, NONE, links[s.r], s.num_rows(found.traced))
            for number, s in enumerate(every)
        }
        works = works_of(found, bench, 1 + len(model.adapters))
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
