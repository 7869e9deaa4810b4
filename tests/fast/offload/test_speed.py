"""Batches are cut from what was recorded, and costs that made the windows are found in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sgl_esft.errors import ConfigError
from sgl_esft.offload.decisions import Decisions
from sgl_esft.offload.policies import POLICIES
from sgl_esft.offload.routing import Ints
from sgl_esft.offload.simulate import base_maps, needed_slots, replay
from sgl_esft.offload.speed import (
    SpeedPoint,
    StepCosts,
    fit,
    non_negative,
    read_points,
    write_speed,
)
from sgl_esft.offload.step_work import (
    BASE,
    WARM_STEPS,
    StepWork,
    TracedRequests,
    batched,
    requests_of,
    work_of,
)
from sgl_esft.offload.trace import SlotChange, TraceEvent, TraceHeader, TraceStep

HEADER = TraceHeader(
    num_layers=3, num_experts=16, top_k=2, num_slots=24, num_base=16, embedding_size=4
)
LFU = POLICIES["lfu"]
TRUE = StepCosts(
    fixed_s=12e-3,
    token_s=0.4e-3,
    expert_s=0.15e-3,
    load_s=0.1e-3,
    latency_s=0.3e-3,
    byte_s=1 / 50e6,
    base_load_bytes=98e3,
    mixed_load_bytes=110e3,
    contended_s=0.08e-3,
)


# ---- a trace, cut ----


def _step(ids: Sequence[Ints], requests: Sequence[int], slots: Sequence[int]) -> TraceStep:
    """ids: [L, k] of each token; requests: of those that decode, the first ones."""
    return TraceStep(
        tuple(requests),
        np.array(slots),
        np.stack(ids, axis=1),
        np.zeros((3, len(requests), 16), np.float32),
        np.zeros((len(requests), 4), np.float32),
    )


def _ids(rng: np.random.Generator) -> Ints:
    """One token's: some experts more often than others."""
    return np.stack([rng.permutation(16)[:2] ** 2 // 16 for _ in range(3)])


def _maps(own: int) -> Ints:
    """Adapter slot 0 has its own expert for ids 0 to 3, from slot `own` on."""
    row = np.arange(16)
    adapter = np.where(row < 4, own + row, row)
    return np.broadcast_to(np.stack([adapter, row]), (3, 2, 16)).copy()


def _trace(seed: int, num_requests: int = 6) -> tuple[list[TraceEvent], dict[int, list[Ints]]]:
    """Requests that come one after the other and end after 8 to 12 tokens, at most three at a
    time; every third is an adapter's. And what each of them decoded.
    """
    rng = np.random.default_rng(seed)
    left = {number: 8 + number % 5 for number in range(num_requests)}
    told: dict[int, list[Ints]] = {number: [] for number in left}
    events: list[TraceEvent] = [SlotChange(_maps(16))]
    while left:
        here = list(left)[:3]
        ids = [_ids(rng) for _ in here]
        events.append(_step(ids, here, [0 if n % 3 == 0 else BASE for n in here]))
        events.append(_step([_ids(rng)] * 5, [], [BASE] * 5))  # a prompt
        for number, token in zip(here, ids, strict=True):
            told[number].append(token)
            left[number] -= 1
            if not left[number]:
                del left[number]
    return events, told


def test_requests_are_those_that_were_recorded() -> None:
    events, told = _trace(1)
    found = requests_of(HEADER, events)
    assert [each.adapter_slot for each in found.requests] == [0, -1, -1, 0, -1, -1]
    for each, tokens in zip(found.requests, told.values(), strict=True):
        assert np.array_equal(each.topk_ids, np.stack(tokens))
    assert found.has_adapters
    assert len(found.of_base().requests) == 4
    assert len(found.of_base(at_least=5).requests) == 6, "too few: as if all had asked the base"
    assert not found.of_base(at_least=5).has_adapters


def test_requests_of_an_adapter_that_has_gone_are_left_out() -> None:
    events, _ = _trace(2)
    later = _trace(3)[0][1:]  # request ids are the same: others'
    moved = [
        replace(e, request_ids=tuple(n + 100 for n in e.request_ids))
        for e in later
        if isinstance(e, TraceStep)
    ]
    found = requests_of(HEADER, [*events, SlotChange(_maps(20)), *moved])
    assert [each.adapter_slot for each in found.requests] == [-1] * 4 + [0, -1, -1, 0, -1, -1]
    assert np.array_equal(found.maps, _maps(20))


def test_a_trace_of_prompts_alone_is_named() -> None:
    with pytest.raises(ConfigError, match="no decoded tokens"):
        requests_of(HEADER, [_step([_ids(np.random.default_rng(0))], [], [BASE])])


def test_a_batch_is_requests_one_after_the_other_at_each_place() -> None:
    """Each place's tokens are whole requests of the trace, in an order that the seed decides."""
    traced = requests_of(HEADER, _trace(4)[0])
    alone = [step.topk_ids[:, 0] for step in batched(traced, 1, 7, 60)]
    order = np.random.default_rng(7).permutation(6)
    tokens = np.concatenate([traced.requests[n].topk_ids for n in order])
    assert len(tokens) == 58
    assert np.array_equal(np.stack(alone), np.concatenate([tokens, tokens[:2]]))

    places = batched(traced, 3, 7, 9)
    for place, number in enumerate(order[:3]):
        request = traced.requests[number]
        for step, ids in zip(places, request.topk_ids, strict=False):
            assert np.array_equal(step.topk_ids[:, place], ids)
            assert step.adapter_slots[place] == request.adapter_slot
    with pytest.raises(ConfigError, match="7 requests together: the trace has 6"):
        batched(traced, 7, 0, 1)


def test_work_is_what_a_server_would_count() -> None:
    """Distinct experts and loads are those of simulate's replay, adapters' experts among them."""
    traced = requests_of(HEADER, _trace(5, 12)[0])
    work = work_of(traced, 4, 6, LFU, num_steps=30)
    steps = batched(traced, 4, 0, WARM_STEPS + 30)
    decisions = Decisions(3, 24, 6, LFU, num_base=16)
    for layer, uses in enumerate(traced.uses()):
        decisions.step(layer, np.sort(np.argsort(-uses, kind="stable")[:6]))
    change = SlotChange(traced.maps)
    warm = replay(HEADER, [change, *steps[:WARM_STEPS]], decisions).counts
    every = replay(HEADER, [change, *steps[WARM_STEPS:]], decisions).counts
    assert work.num_needed == pytest.approx((every.num_asked - warm.num_asked) / 30)
    assert work.num_loads == pytest.approx((every.num_loads - warm.num_loads) / 30)
    assert 0 < work.num_loads < work.num_needed
    assert work.layers.sum() == pytest.approx(3)
    asked = [needed_slots(traced.maps[0], s.topk_ids[0], s.adapter_slots) for s in steps]
    assert max(slot for each in asked for slot in each) >= 16
    base = work_of(traced.of_base(4), 4, 6, LFU, num_steps=30)
    assert base.num_needed != work.num_needed


def test_more_rows_mean_fewer_loads_and_a_row_for_each_slot_none() -> None:
    traced = requests_of(HEADER, _trace(6, 12)[0])
    loads = [work_of(traced, 2, rows, LFU).num_loads for rows in (2, 6, 10, 99)]
    assert loads == sorted(loads, reverse=True)
    assert loads[0] > 0
    assert loads[-1] == 0


def test_what_cannot_be_counted_is_named() -> None:
    traced = requests_of(HEADER, _trace(7)[0])
    with pytest.raises(ConfigError, match="--expert-cache 1: one token needs 2"):
        work_of(traced, 1, 1, LFU)
    for name in ("finemoe", "stream"):
        with pytest.raises(ConfigError, match=f"{name} fetches ahead"):
            work_of(traced, 1, 4, POLICIES[name])


# ---- costs ----


def _window(costs: StepCosts, needed: float, loads: float, like: SpeedPoint) -> SpeedPoint:
    size = costs.mixed_load_bytes if like.with_adapters else costs.base_load_bytes
    point = replace(like, num_needed=needed, num_loads=loads, read_bytes=loads * size)
    stall_s = costs.stall_s(point.work(), size)
    return replace(point, stall_s=stall_s, step_s=costs.compute_s(point.work()) + stall_s)


def _windows(costs: StepCosts, sizes: Sequence[int], rows: Sequence[int]) -> list[SpeedPoint]:
    """What a server of these costs would show. More requests: more experts, not so many each."""
    found = []
    for num_rows in rows:
        for size in sizes:
            for with_adapters in (False, True):
                needed = 48 * (1 - 0.75**size) * (1.15 if with_adapters else 1.0)
                loads = needed * (1 - num_rows / 24) * (0.8 if size < 4 else 1.0)
                like = SpeedPoint(size, num_rows, 3, with_adapters, 1.0, 0.0, 1.0, 0.0, 0.0)
                found.append(_window(costs, needed, loads, like))
    return found


CALIBRATED = _windows(TRUE, (1, 2, 4, 8), (8, 24))
HELD_OUT = _windows(TRUE, (3, 6, 12), (6, 12, 18))


@pytest.mark.parametrize("bytes_per_s", [20e6, 50e6, 400e6])
def test_costs_that_made_the_windows_are_found(bytes_per_s: float) -> None:
    costs = replace(TRUE, byte_s=1 / bytes_per_s)
    found = fit(_windows(costs, (1, 2, 4, 8), (8, 24)))
    for name in ("fixed_s", "token_s", "expert_s", "load_s", "latency_s", "byte_s", "contended_s"):
        assert getattr(found, name) == pytest.approx(getattr(costs, name), rel=1e-3), name
    assert found.base_load_bytes == pytest.approx(98e3)
    assert found.mixed_load_bytes == pytest.approx(110e3)


@pytest.mark.parametrize("bytes_per_s", [20e6, 50e6, 400e6, 4e9])
def test_held_out_windows_are_predicted(bytes_per_s: float) -> None:
    """Also where hardly anything is waited for, so that nothing can be said of the link."""
    true = replace(TRUE, byte_s=1 / bytes_per_s)
    costs = fit(_windows(true, (1, 2, 4, 8), (8, 24)))
    for point in _windows(true, (3, 6, 12), (6, 12, 18)):
        speed = costs.speed(point.work(), with_adapters=point.with_adapters)
        assert speed.expected == pytest.approx(point.num_tokens / point.step_s, rel=0.01)
    assert max(p.stall_s / p.step_s for p in HELD_OUT) > 0.4, "it is not the computing alone"


def test_another_link_is_predicted() -> None:
    """Calibrated on a fast one."""
    fast = fit(_windows(replace(TRUE, byte_s=1 / 400e6), (1, 2, 4, 8), (8, 24)))
    slow = fast.with_bandwidth(50e6)
    for point in HELD_OUT:
        found = slow.step_s(point.work(), with_adapters=point.with_adapters)
        assert found == pytest.approx(point.step_s, rel=0.01)
    assert slow.with_bandwidth(1e9).byte_s == slow.byte_s, "a link is not made faster"


def _held(points: Sequence[SpeedPoint], max_bytes_per_s: int) -> list[SpeedPoint]:
    return [replace(p, max_bytes_per_s=max_bytes_per_s) for p in points]


BEYOND = replace(TRUE, byte_s=1 / 200e6)  # turns on a processor, a read's call


def _on_link(bytes_per_s: int, batches: Sequence[int], rows: Sequence[int]) -> list[SpeedPoint]:
    """Windows on a machine like BEYOND whose link is held to a bandwidth."""
    true = replace(BEYOND, link_byte_s=1 / bytes_per_s)
    return _held(_windows(true, batches, rows), bytes_per_s)


def test_what_a_load_takes_beyond_a_link_stays_on_a_slower_one() -> None:
    points = _on_link(400_000_000, (1, 2, 4, 8), (8, 24))
    slow = fit(points).with_bandwidth(50e6)
    assert slow.byte_s == pytest.approx(1 / 200e6, rel=0.02)
    assert slow.link_byte_s == pytest.approx(1 / 50e6)
    assert slow.with_bandwidth(1e9) == slow, "a link is not made faster"
    for point in _on_link(50_000_000, (3, 6), (12,)):
        found = slow.step_s(point.work(), with_adapters=point.with_adapters)
        assert found == pytest.approx(point.step_s, rel=0.01)
    # Of what storage gives, nobody knows which part of a load is the link's.
    unheld = [replace(p, max_bytes_per_s=None) for p in points]
    assert fit(unheld).with_bandwidth(50e6).byte_s == pytest.approx(1 / 50e6)


def test_a_layer_that_waits_long_computes_longer() -> None:
    """Seen only where links differ: on one, loads and waits go together."""
    links, cold_s = (400_000_000, 20_000_000), 8e-3
    cold = replace(BEYOND, cold_s=cold_s)

    def windows(link: int, batches: Sequence[int], rows: Sequence[int]) -> list[SpeedPoint]:
        true = replace(cold, link_byte_s=1 / link)
        return [
            replace(p, step_s=true.step_s(p.work(), with_adapters=p.with_adapters))
            for p in _on_link(link, batches, rows)
        ]

    calibrated = [p for link in links for p in windows(link, (1, 2, 4, 8), (8, 24))]
    costs = fit(calibrated)
    assert costs.cold_s == pytest.approx(cold_s, rel=0.05)
    assert costs.link_byte_s == pytest.approx(1 / max(links)), "the fastest is meant"
    assert fit(windows(links[0], (1, 2, 4, 8), (8, 24))).cold_s == 0.0
    between = costs.with_bandwidth(50e6)
    for point in windows(50_000_000, (3, 6), (12,)):
        found = between.step_s(point.work(), with_adapters=point.with_adapters)
        assert found == pytest.approx(point.step_s, rel=0.01)
        warm = replace(between, cold_s=0.0)
        without = warm.step_s(point.work(), with_adapters=point.with_adapters)
        assert without < 0.9 * point.step_s, "it is a part of it that counts"


def test_experts_of_layers_that_read_compute_longer() -> None:
    """A load too few costs as much as those experts do: more rows than were calibrated tell."""
    costs = fit(CALIBRATED)
    alike = replace(costs, contended_s=0.0)
    for point in _windows(TRUE, (6, 12), (22,)):
        work = point.work()
        assert work.num_loads < work.num_contended / 8, "layers read, and not much"
        found = costs.step_s(work, with_adapters=point.with_adapters)
        assert found == pytest.approx(point.step_s, rel=0.01)
        without = alike.step_s(work, with_adapters=point.with_adapters)
        assert without < 0.95 * point.step_s, "it is a part of it that counts"


def test_links_that_are_held_and_links_that_are_not_are_refused_together() -> None:
    points = _windows(TRUE, (1, 2, 4, 8), (8, 24))
    with pytest.raises(ConfigError, match="--expert-read-bandwidth"):
        fit([*points, *_held(points, 50_000_000)])
    resident = [replace(p, num_loads=0.0, read_bytes=0.0, stall_s=0.0) for p in points]
    fit([*_held(points, 50_000_000), *resident])  # what reads nothing has no link


def _noisy(points: Sequence[SpeedPoint], sigma: float, seed: int) -> list[SpeedPoint]:
    rng = np.random.default_rng(seed)
    return [
        replace(p, step_s=p.stall_s + (p.step_s - p.stall_s) * rng.lognormal(sigma=sigma))
        for p in points
    ]


def test_intervals_cover_what_is_measured_then() -> None:
    """Eight of ten, as they say, and they are not so wide that they say nothing."""
    sigma, inside, count = 0.04, 0, 0
    for seed in range(4):
        costs = fit(_noisy([*CALIBRATED, *CALIBRATED], sigma, seed))
        assert costs.off_low < 0 < costs.off_high < 4 * sigma
        for point in _noisy(HELD_OUT, sigma, 100 + seed):
            speed = costs.speed(point.work(), with_adapters=point.with_adapters)
            assert speed.low < speed.expected < speed.high
            inside += speed.low <= point.num_tokens / point.step_s <= speed.high
            count += 1
    assert inside / count > 0.7


def test_a_window_that_was_disturbed_does_not_count() -> None:
    """One of three; but the interval has it."""
    disturbed = [replace(p, step_s=3 * p.step_s, stall_s=2 * p.stall_s) for p in CALIBRATED]
    costs = fit([*CALIBRATED, *disturbed, *CALIBRATED])
    found = vars(replace(costs, off_low=0.0, off_high=0.0))
    assert found == pytest.approx(vars(TRUE), rel=1e-3)
    assert costs.off_high == pytest.approx(2.0, rel=0.1)


def test_an_interval_is_as_wide_as_what_is_left_out_lies_off() -> None:
    """Four windows are explained by four costs, whatever they are: residuals alone say nothing."""
    few = [p for p in CALIBRATED if p.num_rows == 24 and not p.with_adapters]
    odd = [replace(p, step_s=p.step_s * (1.3 if p.num_tokens == 4 else 1.0)) for p in few]
    costs = fit(odd)
    assert costs.off_high > 0.1


def test_a_layer_waits_as_its_experts_arrive() -> None:
    """The closed form against each load's own time."""
    rng = np.random.default_rng(3)
    for _ in range(400):
        needed = int(rng.integers(1, 14))
        loads = int(rng.integers(0, needed + 1))
        costs = replace(TRUE, latency_s=float(rng.exponential(1e-3)), expert_s=2e-4)
        transfer_s = float(rng.exponential(5e-4))
        now, stall = (needed - loads) * costs.expert_s + loads * costs.load_s, 0.0
        for landing in transfer_s * np.arange(1, 1 + loads):  # one after the other
            stall += max(0.0, costs.latency_s + landing - now)
            now = max(now, costs.latency_s + landing) + costs.expert_s
        kind = [np.array([float(x)]) for x in (needed, loads, 1)]
        found = costs.stall_s(StepWork(1, *kind), transfer_s * 50e6)
        assert found == pytest.approx(stall, abs=1e-12)
        assert loads or found == 0


def test_no_cost_is_negative() -> None:
    terms = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert non_negative(terms, np.array([3.0, 5.0, 7.0])) == pytest.approx([1.0, 2.0])
    assert non_negative(terms, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])
    assert non_negative(terms, np.array([-1.0, -2.0, -3.0])) == pytest.approx([0.0, 0.0])


def test_where_nothing_was_read_no_load_is_predicted() -> None:
    costs = fit([p for p in CALIBRATED if p.num_rows == 24])
    assert costs.byte_s is None
    costs.step_s(CALIBRATED[-1].work(), with_adapters=True)
    with pytest.raises(ConfigError, match="smaller --expert-cache"):
        costs.step_s(CALIBRATED[0].work(), with_adapters=False)


@pytest.mark.parametrize(
    "points",
    [
        [],
        CALIBRATED[:2],
        [p for p in CALIBRATED if p.num_tokens == 4],
        [p for p in CALIBRATED if p.setting == (2, 8, True, None)] * 9,
    ],
)
def test_too_few_windows_are_named(points: list[SpeedPoint]) -> None:
    with pytest.raises(ConfigError, match="give at least 3, of at least 2 batch sizes"):
        fit(points)


# ---- files ----


def test_a_file_holds_the_windows(tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    costs = write_speed(path, CALIBRATED, {"name": "here"})
    assert costs == fit(CALIBRATED)
    assert read_points(path) == tuple(CALIBRATED)
    assert json.loads(path.read_text())["machine"] == {"name": "here"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "another"}, "speed.json is no sgl-esft speed 1"),
        ({"points": None}, "speed.json is damaged"),
        ({"points": [{"num_tokens": 1}]}, "speed.json is damaged: .*missing required field"),
        ({"step_s": 0.0}, "speed.json is damaged: .*step_s"),
        ({"step_s": float("nan")}, "speed.json is damaged"),
        ({"num_needed": float("inf")}, "speed.json is damaged"),
        ({"num_tokens": 1.5}, "speed.json is damaged"),
        ({"num_loads": -1.0}, "speed.json is damaged"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = tmp_path / "speed.json"
    write_speed(path, CALIBRATED, {})
    found = json.loads(path.read_text())
    if set(change) <= set(found):
        found |= change
    else:
        found["points"][0] |= change
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=words):
        read_points(path)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read none\.json"):
        read_points(tmp_path / "none.json")


def test_a_trace_without_adapters_has_the_base_alone() -> None:
    rng = np.random.default_rng(8)
    traced = requests_of(HEADER, [_step([_ids(rng)], [n], [BASE]) for n in range(3)])
    assert isinstance(traced, TracedRequests)
    assert not traced.has_adapters
    assert np.array_equal(traced.maps, base_maps(HEADER))
