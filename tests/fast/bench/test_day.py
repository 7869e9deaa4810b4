"""The pure parts of the autoscaler's bench: load, devices held, hindsight, rows, claims."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from bench.elasticmoe import day as bench
from bench.elasticmoe.day_load import Burst, Day, day_of, spans
from bench.elasticmoe.device_time import Holding, device_seconds, devices_over_time, holdings
from bench.elasticmoe.hindsight import best_schedule
from bench.elasticmoe.load import Ask, Stream
from bench.elasticmoe.rounds import Model
from bench.elasticmoe.traffic import Calibration, Targets, arrivals, met, tpot, ttft
from bench.report import plots
from bench.report.readme_tables import TABLES
from sgl_elastic.autoscale.slo import SloTargets, SloWindow
from sgl_elastic.coordinator.operations import Operation
from sgl_elastic.errors import ElasticConfigError
from sgl_elastic.options import parse
from sgl_elastic.types import OperationState, ScaleRequest

ASK = Ask("p", None, 3)
TARGETS = Targets(ttft_s=1.0, tpot_s=0.1)
OFFERED = bench.Offered(Model, [ASK], Calibration(TARGETS, 2.0), {ASK: (0, 1, 2)})  # type: ignore[arg-type]
IN_TIME, LATE = (0.1, 0.15, 0.2), (5.0, 5.1, 5.2)


def stream(*token_s: float, ids: tuple[int, ...] = (0, 1, 2), error: str = "") -> Stream:
    return Stream(ASK, 0.0, list(token_s), ids, error)


def operation(
    old: Sequence[int],
    new: Sequence[int],
    at: tuple[float, float],
    state: str = "succeeded",
    name: str = "scale-0c",
) -> dict[str, Any]:
    """As GET /v1/scale tells it, by the server's own class."""
    plan = {"old": {"device_ids": list(old)}, "new": {"device_ids": list(new)}}
    told = Operation(
        name,
        ScaleRequest(dp_size=max(1, len(new))),
        OperationState(state),
        plan,
        switched=state in ("succeeded", "degraded"),
        created_s=at[0],
        finished_s=at[1],
    )
    return told.to_json()


# --- the load -------------------------------------------------------------------------------------


def summed(day: Day, begin_s: float, end_s: float, steps: int = 60_000) -> float:
    """The integral of `rate`, which knows nothing of the closed form."""
    width = (end_s - begin_s) / steps
    return sum(day.rate(begin_s + (i + 0.5) * width) for i in range(steps)) * width


def test_all_spans_together_offer_what_the_rates_integral_is() -> None:
    day = day_of(600.0, 0.3, 1.5, seed=4)
    whole = summed(day, 0.0, 600.0)
    for width_s in (1.0, 10.0, 7.0):
        made = spans(day, width_s)
        assert sum(seconds for seconds, _ in made) == pytest.approx(600.0)
        assert sum(seconds * rate for seconds, rate in made) == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize(("begin_s", "end_s"), [(0, 150), (100, 250), (250, 350), (470, 600)])
def test_a_part_of_the_day_offers_what_the_rates_integral_is(begin_s: float, end_s: float) -> None:
    """Whole days hide a wrong swing: what it adds in the morning it takes in the evening."""
    day = day_of(600.0, 0.3, 1.5, seed=4)
    assert day.load(begin_s, end_s) == pytest.approx(summed(day, begin_s, end_s), rel=1e-4)


def test_requests_are_as_many_as_the_day_offers() -> None:
    day = day_of(600.0, 3.0, 15.0, seed=4)
    times = arrivals(spans(day), seed=4)
    for begin, end in ((0, 600), (0, 100), (250, 350)):
        wanted = day.load(begin, end)
        came = sum(begin <= at < end for at in times)
        assert abs(came - wanted) < 4 * math.sqrt(wanted)


def test_a_seed_is_a_day_and_another_has_its_bursts_elsewhere() -> None:
    one, again, other = (day_of(600.0, 0.2, 1.0, seed) for seed in (1, 1, 2))
    assert one == again
    assert arrivals(spans(one), 1) == arrivals(spans(again), 1)
    assert [b.at_s for b in one.bursts] != [b.at_s for b in other.bursts]
    assert one.load(0, 600) == pytest.approx(other.load(0, 600)), "as much, at other times"


def test_night_noon_and_a_burst() -> None:
    day = Day(600.0, 0.2, 1.0, (Burst(50.0, 10.0, 3.0),))
    assert (day.rate(0), day.rate(300), day.rate(600)) == pytest.approx((0.2, 1.0, 0.2))
    assert day.rate(50.0) - day.rate(49.999) == pytest.approx(3.0, abs=1e-4)
    assert Day(600.0, 0.2, 1.0).load(45, 55) == pytest.approx(day.load(45, 55) - 15.0)
    assert all(0 <= b.at_s <= 600 - b.seconds for b in day_of(600.0, 0.2, 1.0, 3).bursts)


# --- devices that were held -----------------------------------------------------------------------


def test_device_seconds_are_the_operations_own() -> None:
    """Up: from its beginning; down: until its end; newest first, as the server tells them."""
    told = [operation([0, 1], [0], (160.0, 170.0)), operation([0], [0, 1], (120.0, 125.0))]
    held = holdings(told, 100.0, 1)
    assert device_seconds(held, 100.0, 200.0) == 20 * 1 + 50 * 2 + 30 * 1
    assert device_seconds(held, 110.0, 165.0) == 10 * 1 + 45 * 2, "of a part"
    assert devices_over_time(held, 100.0, 165.0) == [(0, 1), (20, 2), (25, 2), (60, 2)]
    assert device_seconds([Holding(100.0, 3)], 100.0, 200.0) == 300


@pytest.mark.parametrize(
    ("state", "ended", "expected"),
    [
        ("rolled_back", 130.0, 20 * 1 + 10 * 2 + 70 * 1),
        ("running", 0.0, 20 * 1 + 80 * 2),
        ("degraded", 130.0, 20 * 1 + 80 * 2),
    ],
)
def test_an_operation_that_did_not_succeed(state: str, ended: float, expected: float) -> None:
    held = holdings([operation([0], [0, 1], (120.0, ended), state)], 100.0, 1)
    assert device_seconds(held, 100.0, 200.0) == expected


def test_devices_that_are_exchanged_are_held_together_and_a_refusal_holds_none() -> None:
    refused = {**operation([], [], (110.0, 110.0), "rolled_back"), "plan": {}}
    held = holdings([refused, operation([0], [1, 2], (120.0, 130.0))], 100.0, 1)
    assert [each.num_devices for each in held] == [1, 3, 2]


# --- hindsight ------------------------------------------------------------------------------------


def all_schedules(met_by_size: dict[int, list[int]]) -> list[tuple[int, int]]:
    """(devices, in time) of every schedule."""
    windows = range(len(met_by_size[1]))
    return [
        (sum(sizes), sum(met_by_size[size][at] for at, size in enumerate(sizes)))
        for sizes in itertools.product(met_by_size, repeat=len(windows))
    ]


@pytest.mark.parametrize("seed", range(30))
def test_the_best_schedule_is_that_of_trying_all(seed: int) -> None:
    rng = random.Random(seed)
    counts = {size: [rng.randint(0, 6) for _ in range(6)] for size in (1, 2, 3)}
    needed = 0.95 * sum(counts[3])
    best = best_schedule(counts, needed)
    fewest = min(cost for cost, found in all_schedules(counts) if found >= needed)
    most = max(found for cost, found in all_schedules(counts) if cost == fewest)
    assert (best.cost, best.num_met) == (fewest, most)
    assert best.num_met == sum(counts[size][at] for at, size in enumerate(best.sizes))


def test_a_schedule_is_large_where_it_has_to_be() -> None:
    best = best_schedule({1: [9, 2, 9, 8], 2: [9, 9, 9, 9]}, 0.95 * 36)
    assert best.sizes == (1, 2, 1, 1)
    assert (best.cost, best.num_scales) == (5, 2)
    with pytest.raises(ValueError, match=r"sizes \[1\] has 5"):
        best_schedule({1: [1, 1]}, 5)


# --- rows and claims ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first_s", "last_s"), [(0.9, 1.0), (1.0, 1.2), (1.1, 1.2), (0.5, 0.71), (2.0, 3.0)]
)
def test_in_time_is_what_the_autoscaler_calls_so(first_s: float, last_s: float) -> None:
    window = SloWindow(SloTargets(TARGETS.ttft_s, TARGETS.tpot_s))
    window.arrived("r", 0.0)
    window.first_token("r", first_s)
    window.finished("r", last_s, 3)
    theirs, ours = window.attainment(last_s), stream(first_s, last_s, last_s)
    assert theirs.both == met(ours, TARGETS)
    assert theirs.ttft == (ttft(ours) <= TARGETS.ttft_s)
    assert theirs.tpot == (tpot(ours) <= TARGETS.tpot_s)


def a_round() -> bench.Round:
    """Four requests, one in each quarter of the day."""
    good, late = stream(*IN_TIME), stream(*LATE)
    wrong, failed = stream(*IN_TIME, ids=(0, 1, 1)), stream(0.1, ids=(0,), error="HTTP 503")
    scales = [
        operation([0], [0, 1], (1150.0, 1160.0)),
        operation([0, 1], [0], (1300.0, 1310.0)),
        operation([0], [0, 1], (1350.0, 1355.0), "rolled_back"),
        operation([0], [0], (1400.0, 1410.0), name="recovery-0d"),
        operation([0], [0, 1], (1700.0, 1710.0)),  # the day is over
    ]
    ran = {
        bench.AUTOSCALE: bench.Ran(1, [good, good, wrong, failed], 1000.0, scales),
        bench.SMALLEST: bench.Ran(1, [good, late, late, good], 5000.0),
        bench.LARGEST: bench.Ran(2, [good, good, good, good], 9000.0),
    }
    return bench.Round(1, Day(600.0, 0.2, 1.0), [10.0, 290.0, 305.0, 590.0], ran)


def test_rows_are_over_static_largest_of_their_round() -> None:
    rows = {row["run"]: row for row in bench.rows_of(a_round(), OFFERED)}
    scaled = rows[bench.AUTOSCALE]
    assert scaled["attainment"] == {"ttft": 0.75, "tpot": 0.75, "both": 0.75}
    assert scaled["device_seconds"] == 600 + 160 + 5
    assert scaled["device_seconds_over_largest"] == pytest.approx(765 / 1200)
    assert scaled["attainment_over_largest"] == 0.75
    assert (scaled["scales"], scaled["scales_failed"]) == (3, 1)
    assert (scaled["wrong"], scaled["failed"]) == (1, 1)
    small, best = rows[bench.SMALLEST], rows[bench.HINDSIGHT]
    assert small["attainment_over_largest"] == small["device_seconds_over_largest"] == 0.5
    assert best["attainment_over_largest"] == 1.0
    assert best["device_seconds"] == 620, "the two windows in which one device was late"
    assert best["scales"] == 2


def test_a_window_is_that_of_when_a_request_was_to_be_sent() -> None:
    found = a_round()
    assert [at for at, count in enumerate(found.windows_sent()) if count] == [1, 29, 30, 59]
    assert found.windows_met(bench.SMALLEST, TARGETS)[29] == 0
    assert sum(found.windows_met(bench.AUTOSCALE, TARGETS)) == 3


@pytest.mark.parametrize(
    ("met_ratio", "cost_ratio", "holds"),
    [
        (0.95, 0.7, [True, True]),
        (0.949, 0.7, [False, True]),
        (1.0, 0.701, [True, False]),
        (0.0, 0.0, [False, False]),
    ],
)
def test_claims_say_what_holds(met_ratio: float, cost_ratio: float, holds: list[bool]) -> None:
    ratios = {"attainment_over_largest": met_ratio, "device_seconds_over_largest": cost_ratio}
    rows = [{"seed": 7, "run": name, **ratios} for name in (bench.AUTOSCALE, bench.SMALLEST)]
    assert [each["holds"] for each in bench.claims_of(rows)] == holds


def test_a_static_largest_that_met_nothing_lets_no_claim_hold() -> None:
    found = a_round()
    found.ran[bench.LARGEST].streams[:] = [stream(*LATE)] * 4  # type: ignore[index]
    rows = bench.rows_of(found, OFFERED)
    assert [each["holds"] for each in bench.claims_of(rows)] == [False, True]


def test_each_static_size_is_run_and_the_autoscaler_has_the_benchs_targets() -> None:
    options = bench.parsed(["--policy", '{"min_devices": 1, "max_devices": 3}'])
    runs = bench.runs_of(options.sizes, options.policy, TARGETS)
    names = [bench.AUTOSCALE, bench.SMALLEST, "static 2", bench.LARGEST]
    assert [(each.name, each.num_devices) for each in runs] == list(
        zip(names, (1, 1, 2, 3), strict=True)
    )
    read, *static = [parse(each.flags) for each in runs]
    assert (read[0].slo_ttft_s, read[0].slo_tpot_s) == (TARGETS.ttft_s, TARGETS.tpot_s)
    assert (read[0].autoscale, read[0].standby_ranks) == (options.sizes, 3)
    assert all(each.autoscale is None and each.standby_ranks == 0 for each, _ in static)
    assert all(rest == [] for _, rest in (read, *static))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], True),
        (["--seconds", "60"], False),
        (["--seeds", "1", "2"], False),
        (["--seeds", "1", "1", "1"], False),
    ],
)
def test_only_a_whole_run_is_a_result(arguments: list[str], *, expected: bool) -> None:
    assert bench.is_whole(bench.parsed(arguments)) is expected


def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["--policy", '{"min_devices": 2, "max_devices": 2}'],
        ["--night", "2", "--noon", "1"],
    ):
        with pytest.raises(SystemExit):
            bench.parsed(arguments)
    assert "give a policy that can scale" in capsys.readouterr().err
    with pytest.raises(ElasticConfigError, match="max_devices"):
        bench.parsed(["--policy", "{}"])


@pytest.fixture
def figures() -> dict[str, Any]:
    """Through JSON, as the table and the picture read it; under it where it is from."""
    options: argparse.Namespace = bench.parsed([])
    made = json.loads(json.dumps(bench.figures_of([a_round()], OFFERED, options)))
    machine = {"cores": 2, "cpu": "c", "device": "d"}
    origin = {"machine": machine, "commit": "0" * 40, "command": "python -m bench.elasticmoe.day"}
    return {**made, **origin}


def test_the_result_says_days_rows_and_claims(figures: dict[str, Any]) -> None:
    assert [row["run"] for row in figures["rows"]][-1] == bench.HINDSIGHT
    assert len(figures["days"][0]["rate"]) == bench.NUM_WINDOWS
    assert sum(figures["days"][0]["windows_sent"]) == 4
    assert {each["seed"] for each in figures["claims"]} == {1}
    assert not figures["is_complete"], "one round of three"


def test_the_table_has_each_row_and_each_claim(figures: dict[str, Any]) -> None:
    text = TABLES["elasticmoe_day"][1](figures)
    assert "| 1 | autoscale | 75.0 | 75.0 | 75.0 | 0.750 | 765 | 0.637 | 3 (1) | 1 | 1 |" in text
    assert "| 1 | best schedule in hindsight | - | - | 100.0 | 1.000 | 620 | 0.517 | 2 |" in text
    assert "attainment at least 0.95 of static largest's: 0.750, **does not hold**" in text
    assert "device-seconds at most 0.7 of static largest's: 0.637, holds" in text


def test_the_picture_names_every_run_and_its_units(figures: dict[str, Any]) -> None:
    text = plots.svg("elasticmoe_day", figures)
    for words in (bench.AUTOSCALE, bench.SMALLEST, bench.LARGEST, bench.HINDSIGHT, "[share]"):
        assert words in text
    assert text == plots.svg("elasticmoe_day", figures)
