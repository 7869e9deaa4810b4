"""The autoscaler's decision, on single windows and on whole load traces, and its loop."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from sgl_elastic.autoscale.autoscaler import AutoscaleMetrics, Autoscaler
from sgl_elastic.autoscale.policy import (
    MAX_REGRETS,
    REGRET_S,
    AutoscalePolicy,
    AutoscaleState,
    LoadSample,
    Reason,
    decide,
    down_wait_s,
    parse_policy,
    utilisation_when_smaller,
)
from sgl_elastic.autoscale.slo import Attainment
from sgl_elastic.errors import BusyError, DoesNotFitError, ElasticConfigError
from sgl_elastic.types import ScaleRequest

POLICY = AutoscalePolicy(min_devices=1, max_devices=8)
FRESH = AutoscaleState()
WINDOW_S = 5.0


def seen(share: float, num_finished: int = 100) -> Attainment:
    return Attainment(share, share, share, num_finished)


def metrics(
    share: float = 0.95, num_devices: int = 4, busy: float = 0.5, num_finished: int = 100
) -> LoadSample:
    """busy: KV used, over what there is."""
    tokens = 10_000 * num_devices
    return LoadSample(
        num_devices=num_devices,
        attainment=seen(share, num_finished),
        kv_used_tokens=round(busy * tokens),
        kv_capacity_tokens=tokens,
    )


LOW, CALM = metrics(0.8), metrics(1.0, busy=0.2)


def after(
    windows: Iterable[LoadSample],
    policy: AutoscalePolicy = POLICY,
    state: AutoscaleState = FRESH,
    now_s: float = 0.0,
) -> tuple[int | None, AutoscaleState, Reason]:
    """The last of some windows in a row: (devices asked for, state, reason)."""
    request, reason = None, Reason.STEADY
    for each in windows:
        request, state, reason = decide(policy, each, state, now_s)
        now_s += WINDOW_S
    return request.dp_size if request else None, state, reason


TWO = metrics(0.5, num_devices=2)
FEW = metrics(0.0, num_finished=7)
SCALED = AutoscaleState(last_scale_s=100.0)
SCALED_CALM = replace(SCALED, num_calm=2)
UP, SLACK = Reason.LOW_ATTAINMENT, Reason.SLACK
STEADY, MORE, COOLING = Reason.STEADY, Reason.MORE_WINDOWS, Reason.COOLING_DOWN


@pytest.mark.parametrize(
    ("windows", "changed", "state", "now_s", "wanted", "reason"),
    [
        ([LOW], {}, FRESH, 0, 5, UP),
        ([metrics(0.90)], {}, FRESH, 0, None, STEADY),  # exactly the lower bound is not low
        ([metrics(0.8999)], {}, FRESH, 0, 5, UP),
        ([LOW] * 2, {"up_windows": 3}, FRESH, 0, None, MORE),
        ([LOW] * 3, {"up_windows": 3}, FRESH, 0, 5, UP),
        ([LOW, LOW, metrics(), LOW, LOW], {"up_windows": 3}, FRESH, 0, None, MORE),
        ([CALM], {}, FRESH, 0, None, MORE),
        ([CALM] * 2, {}, FRESH, 0, None, MORE),
        ([CALM] * 3, {}, FRESH, 0, 3, SLACK),
        ([CALM, CALM, LOW, CALM, CALM], {}, FRESH, 0, None, MORE),
        # A down needs attainment, and room afterwards: 0.52 * 4/3 = 0.693, 0.54 * 4/3 = 0.72.
        ([metrics(1.0, busy=0.52)] * 3, {}, FRESH, 0, 3, SLACK),
        ([metrics(1.0, busy=0.54)] * 3, {}, FRESH, 0, None, STEADY),
        ([metrics(0.99, busy=0.1)] * 3, {}, FRESH, 0, 3, SLACK),
        ([metrics(0.985, busy=0.1)] * 3, {}, FRESH, 0, None, STEADY),
        # Bounds.
        ([metrics(0.0, num_devices=8)], {}, FRESH, 0, None, Reason.AT_MAX),
        ([metrics(0.0, num_devices=7)], {"max_step": 5}, FRESH, 0, 8, UP),
        ([CALM] * 9, {"min_devices": 4}, FRESH, 0, None, Reason.AT_MIN),
        ([TWO], {"min_devices": 4}, FRESH, 0, 4, UP),
        # Few requests prove nothing.
        ([FEW] * 3, {}, FRESH, 0, None, Reason.TOO_FEW_REQUESTS),
        ([metrics(0.0, num_finished=8)], {}, FRESH, 0, 5, UP),
        # Each direction cools down by its own time; a streak goes on meanwhile.
        ([LOW], {}, SCALED, 129.9, None, COOLING),
        ([LOW], {}, SCALED, 130.0, 5, UP),
        ([CALM], {}, SCALED_CALM, 219.9, None, COOLING),
        ([CALM], {}, SCALED_CALM, 220.0, 3, SLACK),
        ([CALM] * 3, {}, AutoscaleState(last_scale_s=-110.0), 0, 3, SLACK),
        ([replace(LOW, is_scaling=True)], {}, FRESH, 0, None, Reason.SCALING),
        # The step grows with the shortfall.
        ([metrics(0.89, num_devices=8)], {"max_devices": 64, "max_step": 8}, FRESH, 0, 9, UP),
        ([metrics(0.45, num_devices=8)], {"max_devices": 64, "max_step": 8}, FRESH, 0, 12, UP),
        ([metrics(0.0, num_devices=8)], {"max_devices": 64, "max_step": 8}, FRESH, 0, 16, UP),
        ([metrics(0.0, num_devices=8)], {"max_devices": 64, "max_step": 3}, FRESH, 0, 11, UP),
        ([metrics(0.45, num_devices=2)], {"max_step": 8}, FRESH, 0, 3, UP),
        ([metrics(0.0, num_devices=1)], {"max_step": 8}, FRESH, 0, 2, UP),
    ],
)
def test_what_windows_in_a_row_ask_for(
    windows: list[LoadSample],
    changed: dict[str, float],
    state: AutoscaleState,
    now_s: float,
    wanted: int | None,
    reason: Reason,
) -> None:
    found = after(windows, replace(POLICY, **changed), state, now_s)  # type: ignore[arg-type]
    assert (found[0], found[2]) == (wanted, reason)


def test_what_one_window_tells_the_next() -> None:
    assert after([LOW])[1] == AutoscaleState(last_scale_s=0.0)
    assert after([FEW] * 3)[1] == FRESH
    streaks = AutoscaleState(num_low=1, num_calm=2)
    assert after([metrics(0.95, busy=0.1)], state=streaks)[1] == FRESH, "the middle breaks both"
    assert after([CALM, CALM, replace(CALM, is_scaling=True)])[1] == FRESH


def test_room_is_what_one_device_fewer_would_have() -> None:
    base = metrics(1.0, busy=0.3)
    for changed, expected in (
        ({}, 0.4),
        ({"kv_used_tokens": 30_000}, 1.0),
        ({"kv_capacity_tokens": 0}, math.inf),
        ({"num_devices": 1}, math.inf),
    ):
        found = utilisation_when_smaller(replace(base, **changed))  # type: ignore[arg-type]
        assert found == pytest.approx(expected), changed
    assert after([replace(base, kv_used_tokens=30_000)] * 3)[2] is Reason.STEADY
    assert after([metrics(1.0, num_devices=1, busy=0.0)] * 5)[2] is Reason.AT_MIN


def test_a_regretted_down_makes_the_next_one_wait_twice_as_long() -> None:
    state = after([CALM] * 3)[1]
    assert (state.last_was_down, state.num_regrets) == (True, 0)
    state = after([LOW], state=state, now_s=60.0)[1]
    assert (state.num_regrets, down_wait_s(POLICY, state)) == (1, 240.0)
    assert after([CALM] * 3, state=state, now_s=200.0)[2] is Reason.COOLING_DOWN
    state = after([CALM] * 3, state=state, now_s=300.0)[1]
    assert after([LOW], state=state, now_s=340.0)[1].num_regrets == 2
    assert after([LOW], state=state, now_s=3000.0)[1].num_regrets == 0  # a new wave of load
    assert after([CALM] * 3, state=state, now_s=3000.0)[1].num_regrets == 0
    worst = replace(state, num_regrets=MAX_REGRETS)
    assert after([LOW], state=worst, now_s=340.0)[1].num_regrets == MAX_REGRETS


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("min_devices", (0, 9)),
        ("max_devices", (1.5, True, 5000)),
        ("max_step", (0,)),
        ("up_windows", (0,)),
        ("down_windows", (0,)),
        ("min_requests", (0,)),
        ("up_below", (0.995, 0)),
        ("down_above", (1.01,)),
        ("down_utilisation", (math.nan,)),
        ("up_cooldown_s", (0,)),
        ("down_cooldown_s", (math.inf,)),
    ],
)
def test_a_policy_that_cannot_work_is_refused_by_name(name: str, values: tuple[float]) -> None:
    for value in values:
        with pytest.raises(ElasticConfigError, match=name):
            replace(POLICY, **{name: value})


def test_a_policy_is_read_from_json() -> None:
    assert parse_policy(None) is None
    text = '{"min_devices": 2, "max_devices": 6, "up_below": 0.8, "down_windows": 5}'
    assert parse_policy(text) == AutoscalePolicy(2, 6, up_below=0.8, down_windows=5)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        "{}",
        '{"min_devices": 1}',
        '{"min_devices": 1, "max_devices": 2, "colour": 3}',
        '{"min_devices": "1", "max_devices": 2}',
        '{"min_devices": 1, "max_devices": 2, "up_below": null}',
        '{"min_devices": true, "max_devices": 2}',
        "[" * 100_000,
    ],
)
def test_a_policy_that_is_not_one_is_refused(text: str) -> None:
    with pytest.raises(ElasticConfigError, match="autoscale policy"):
        parse_policy(text)


@dataclass
class Cluster:
    """A server under a load: what is more than its rate waits, and who waits long is late.

    rate: requests/s of a device. busy_at: utilisation it claims at full rate, 1 = the truth.
    """

    num_devices: int
    rate: float = 10.0
    busy_at: float = 1.0
    queue: float = 0.0

    def window(self, load: float) -> LoadSample:
        rate = self.rate * self.num_devices
        waiting = max(0.0, self.queue + (load - rate) * WINDOW_S)
        late = max(0.0, (self.queue + waiting) / 2 - rate)  # waits longer than a second
        share = 1.0 - min(1.0, late / max(1e-9, load * WINDOW_S + self.queue))
        self.queue = waiting
        busy = min(1.0, load / rate) * self.busy_at
        return metrics(share, self.num_devices, busy, num_finished=round(load * WINDOW_S))


@dataclass
class History:
    """Every window's (devices, attainment), and every scale as (time, from, to)."""

    devices: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    scales: list[tuple[float, int, int]] = field(default_factory=list)

    @property
    def turns(self) -> int:
        """Scales in the other direction than the one before."""
        ups = [new > old for _, old, new in self.scales]
        return sum(a != b for a, b in pairwise(ups))


def drive(
    policy: AutoscalePolicy, cluster: Cluster, load: Callable[[float], float], n: int
) -> History:
    """n windows; a scale takes effect with the next window."""
    history, state = History(), FRESH
    for number in range(n):
        now = number * WINDOW_S
        window = cluster.window(load(now))
        history.devices.append(cluster.num_devices)
        history.shares.append(window.attainment.worst)
        request, state, _ = decide(policy, window, state, now)
        if request is not None:
            history.scales.append((now, cluster.num_devices, request.dp_size))
            cluster.num_devices = request.dp_size
    return history


def test_a_step_of_load_is_followed_up_and_down_again() -> None:
    policy = replace(POLICY, max_step=4)
    history = drive(policy, Cluster(2), lambda t: 55.0 if 100 <= t < 1000 else 12.0, 600)
    assert max(history.devices) <= 8
    at_peak = history.shares[60:200]  # from 200 s after the step on
    assert min(at_peak) >= 0.9
    assert history.devices[-1] == 2
    assert history.turns == 1


def test_a_spike_of_one_window_costs_one_up_at_most() -> None:
    history = drive(POLICY, Cluster(4), lambda t: 60.0 if t == 100 else 26.0, 100)
    assert [new - old for _, old, new in history.scales] in ([], [1], [1, -1])


policies = st.builds(
    AutoscalePolicy,
    min_devices=st.integers(1, 3),
    max_devices=st.integers(3, 10),
    up_windows=st.integers(1, 4),
    down_windows=st.integers(1, 6),
    up_cooldown_s=st.floats(1, 100),
    down_cooldown_s=st.floats(1, 300),
    max_step=st.integers(1, 4),
)


@settings(deadline=None, max_examples=40)
@given(policies, st.lists(st.floats(0, 150), min_size=1, max_size=30), st.integers(1, 12))
def test_any_trace_respects_bounds_cool_downs_and_steps(
    policy: AutoscalePolicy, loads: list[float], start: int
) -> None:
    history = drive(policy, Cluster(start), lambda t: loads[int(t / 40) % len(loads)], 200)
    for _, old, new in history.scales:
        if new > old:
            assert new <= policy.max_devices
            assert new - old <= policy.max_step or new == policy.min_devices
        else:
            assert new == old - 1 >= policy.min_devices
    times = [time for time, _, _ in history.scales]
    for (time, old, new), before in zip(history.scales[1:], times, strict=False):
        wait = policy.up_cooldown_s if new > old else policy.down_cooldown_s
        assert time - before >= wait


@settings(deadline=None, max_examples=40)
@given(policies, st.floats(0, 90), st.integers(1, 10))
def test_a_steady_load_does_not_flap(policy: AutoscalePolicy, load: float, start: int) -> None:
    """Where utilisation tells the truth: up, then (once the backlog is gone) down, then rest."""
    history = drive(policy, Cluster(start), lambda _: load, 800)
    assert history.turns <= 1
    assert len(set(history.devices[-200:])) == 1


@settings(deadline=None, max_examples=40)
@given(policies, st.floats(0, 90), st.integers(1, 10), st.floats(0.05, 1.0))
def test_a_wrong_utilisation_flaps_less_and_less(
    policy: AutoscalePolicy, load: float, start: int, busy_at: float
) -> None:
    """Without the back-off there would be a turn in every down_cooldown_s or so, for ever."""
    num_windows = 800
    history = drive(policy, Cluster(start, busy_at=busy_at), lambda _: load, num_windows)
    # A down that is taken back is regretted or lasted for REGRET_S. Regrets grow to MAX_REGRETS,
    # fall by one in REGRET_S at most, and hold the next down back for long where they are most.
    longest_wait_s = policy.down_cooldown_s * 2**MAX_REGRETS
    seconds = num_windows * WINDOW_S
    num_allowed = MAX_REGRETS + 1 + 2 * seconds / REGRET_S + seconds / longest_wait_s
    assert history.turns <= 2 * num_allowed


@dataclass
class Server:
    """Stands for the front: a clock, a sample, and a coordinator that may refuse."""

    windows: LoadSample
    now: float = 0.0
    refusal: Exception | None = None
    requests: list[int] = field(default_factory=list)

    def clock(self) -> float:
        self.now += WINDOW_S
        return self.now

    def sample(self, now_s: float) -> LoadSample:
        assert now_s == self.now
        return self.windows

    def submit(self, request: ScaleRequest) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request.dp_size)


def autoscaler(server: Server, **more: Any) -> Autoscaler:
    arguments = {"policy": POLICY, "sample": server.sample, "submit": server.submit} | more
    return Autoscaler(**arguments, clock=server.clock)


@pytest.mark.parametrize("refusal", [BusyError("later"), DoesNotFitError("too small")])
def test_what_was_refused_is_tried_again_and_logged_once(
    refusal: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(CALM)
    loop = autoscaler(server)
    server.refusal = refusal
    with caplog.at_level(logging.WARNING):
        reasons = [loop.judge_window() for _ in range(5)]
    assert reasons[2:] == [Reason.SLACK] * 3
    told = f"Autoscaling was refused, and is tried again: 4 -> 3 devices (slack): {refusal}"
    expected = [] if isinstance(refusal, BusyError) else [told]
    assert [record.getMessage() for record in caplog.records] == expected
    server.refusal = None
    loop.judge_window()
    assert server.requests == [3]


def test_metrics_tell_attainment_decisions_and_reasons() -> None:
    registry = CollectorRegistry()
    server = Server(replace(LOW, attainment=Attainment(0.8, 0.9, 0.7, 100)))
    loop = autoscaler(server, metrics=AutoscaleMetrics(registry))
    server.refusal = BusyError("later")
    loop.judge_window()
    server.refusal = None
    assert [loop.judge_window() for _ in range(2)] == [Reason.LOW_ATTAINMENT, Reason.COOLING_DOWN]
    assert server.requests == [5]

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"sgl_elastic:{name}", labels)

    assert value("slo_attainment", target="ttft") == 0.8
    assert value("slo_attainment", target="both") == 0.7
    assert value("autoscale_windows_total", reason="low_attainment") == 2
    assert value("autoscale_windows_total", reason="cooling_down") == 1
    assert value("autoscale_requests_total", direction="up", outcome="busy") == 1
    assert value("autoscale_requests_total", direction="up", outcome="submitted") == 1


def test_the_thread_outlives_whatever_a_window_raises() -> None:
    server, again, registry = Server(CALM), threading.Event(), CollectorRegistry()
    calls: list[float] = []

    def sample(now_s: float) -> LoadSample:
        calls.append(now_s)
        if len(calls) == 1:
            raise RuntimeError("a defect in the sampler")
        again.set()
        return server.windows

    told = AutoscaleMetrics(registry)
    loop = autoscaler(server, sample=sample, interval_s=0.001, metrics=told)
    loop.start()
    loop.start()  # harmless
    assert again.wait(5)
    assert loop.is_running
    loop.stop()
    loop.stop()  # harmless
    assert not loop.is_running
    num_calls = len(calls)
    assert registry.get_sample_value("sgl_elastic:autoscale_errors_total") == 1
    assert not any(thread.name == "autoscaler" for thread in threading.enumerate())
    assert len(calls) == num_calls
    again.clear()
    loop.start()
    assert again.wait(5), "it starts again after a stop"
    loop.stop()


def test_without_a_policy_there_is_no_thread_and_nothing_is_asked_for() -> None:
    assert decide(None, LOW, AutoscaleState(num_low=9), 0.0) == (None, FRESH, Reason.OFF)
    loop = autoscaler(Server(LOW), policy=None)
    loop.start()
    assert not loop.is_running
    loop.stop()


def test_stop_from_inside_a_window_does_not_wait_for_itself() -> None:
    server, done = Server(LOW), threading.Event()

    def submit(_: ScaleRequest) -> None:
        loop.stop()
        done.set()

    loop = autoscaler(server, submit=submit, interval_s=0.001)
    loop.start()
    assert done.wait(5)
    assert not loop.is_running
