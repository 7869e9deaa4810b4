"""How long a decoding step takes: fitted to a server's own windows, asked for any other step.

    windows of steady decoding: SpeedPoint --[fit]--> StepCosts, by least squares, none negative
    StepWork of a batch, a cache, adapters (step_work.py) --[StepCosts.speed]--> tokens a second

A step is computing and stall. Computing: something in any case, something for each token, for each
distinct expert and, of the processor, for each load; a (token, expert) pair is part of its token,
which has as many experts whatever it is. An expert takes longer in a layer that reads any: the
threads that read take turns with it. Stall, layer by layer: experts that are here are computed
while the missing ones are read, and those as they arrive, so it is what loads take beyond that and
beyond the processor's own part of them. Processors that waited are cold and asleep: a layer that
waits computes for longer, where it waits for more than moments.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from sgl_esft.errors import ConfigError
from sgl_esft.formats.strict_json import read_object
from sgl_esft.offload.policies import Values
from sgl_esft.offload.step_work import StepWork

FORMAT: Final = "sgl-esft speed 1"
INTERVAL: Final = (10.0, 90.0)  # percentiles of what measured windows lie off
MIN_SETTINGS: Final = 3  # batch size, rows, adapters: fewer leave nothing to compare with
COLD_AFTER_S: Final = 1e-3  # of waiting, two thirds of `cold_s`
_MIN_LOADS: Final = 0.05  # a step; fewer say nothing about the link
_CLOSE: Final = 1e-6  # relative; costs that differ by less are the same
_ROUNDS: Final = 50  # of finding which layers wait, and for which load, by turns with the costs

Measure = Annotated[float, msgspec.Meta(ge=0, le=1e15)]  # JSON of Python knows Infinity
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e15)]
Size = Annotated[int, msgspec.Meta(ge=1)]
Setting: TypeAlias = tuple[int, int, bool, int | None]


@dataclass(frozen=True)
class SpeedPoint:
    """A window of `num_tokens` requests decoding together on one rank; a step, on average."""

    num_tokens: Size
    num_rows: Size  # of each layer
    num_layers: Size  # that have experts
    with_adapters: bool  # some of the requests were adapters'
    step_s: Positive
    stall_s: Measure  # of it nothing could be computed
    num_needed: Positive  # distinct experts, all layers together
    num_loads: Measure
    read_bytes: Measure
    max_bytes_per_s: Size | None = None  # by --expert-read-bandwidth; None = what storage gives

    @property
    def setting(self) -> Setting:
        """What is repeated from window to window."""
        return self.num_tokens, self.num_rows, self.with_adapters, self.max_bytes_per_s

    @property
    def compute_s(self) -> float:
        """Of a step, what was not waited for."""
        return max(0.0, self.step_s - self.stall_s)

    @property
    def link_byte_s(self) -> float:
        """Of the link's bandwidth, where it was held to one; else 0."""
        return 0.0 if self.max_bytes_per_s is None else 1.0 / self.max_bytes_per_s

    def work(self) -> StepWork:
        """As if layers asked for equally many, and any expert were missing alike.

        A window's counters do not say more; how many layers wait at all follows from it.
        """
        per_layer = self.num_needed / self.num_layers
        count = max(1, round(per_layer))
        missing = min(1.0, self.num_loads / self.num_needed)
        share = [
            math.comb(count, n) * missing**n * (1 - missing) ** (count - n)
            for n in range(count + 1)
        ]
        return StepWork(
            self.num_tokens,
            needed=np.full(count + 1, per_layer),
            loads=np.arange(count + 1, dtype=np.float64) * (per_layer / count),
            layers=np.array(share) * self.num_layers,
        )


@dataclass(frozen=True)
class Speed:
    """Tokens a second of all requests together, and where INTERVAL of measured ones would lie."""

    expected: float
    low: float
    high: float


@dataclass(frozen=True)
class StepCosts:
    """Seconds that a step is made of, on one machine.

    `byte_s` None: nothing was read when it was measured, so no load can be predicted. Of a link
    that is held to a bandwidth it is what a load takes beyond `link_byte_s`: the machine's part.
    """

    fixed_s: float
    token_s: float
    expert_s: float  # a distinct expert, loop and computing
    load_s: float  # the processor's, for each expert that is read
    latency_s: float  # of a layer's first load, beyond its bytes
    byte_s: float | None  # 1 / bandwidth, where link_byte_s is 0
    base_load_bytes: float  # of an expert read, where only the base is asked
    mixed_load_bytes: float  # with adapters: theirs are not aligned, and read some more
    link_byte_s: float = 0.0  # 1 / what the link is held to; 0 = to nothing
    cold_s: float = 0.0  # that a layer computes for longer which waits long
    contended_s: float = 0.0  # that an expert computes for longer whose layer reads any
    off_low: float = 0.0  # measured over predicted seconds, less 1: INTERVAL
    off_high: float = 0.0

    def with_bandwidth(self, bytes_per_s: float) -> StepCosts:
        """On a link that carries at most so much; it is not made faster than it was measured."""
        if self.link_byte_s:
            return replace(self, link_byte_s=max(self.link_byte_s, 1.0 / bytes_per_s))
        return replace(self, byte_s=max(self.byte_s or 0.0, 1.0 / bytes_per_s))

    def compute_s(self, work: StepWork) -> float:
        """Of a step that waits for nothing."""
        return (
            self.fixed_s
            + self.token_s * work.num_tokens
            + self.expert_s * work.num_needed
            + self.contended_s * work.num_contended
            + self.load_s * work.num_loads
        )

    def waits_s(self, work: StepWork, load_bytes: float) -> Values:
        """[n], of each kind of layer, whose loads have so many bytes each.

        Raises ConfigError: byte_s is None.
        """
        if work.num_loads == 0.0:
            return np.zeros(len(work.layers))
        if self.byte_s is None:
            raise ConfigError(
                "the server that was calibrated read no expert: calibrate one with a smaller "
                "--expert-cache too, and name both files"
            )
        waits = _Queue.of(work).waits(self, load_bytes * (self.byte_s + self.link_byte_s))
        longest: Values = waits.max(axis=0)
        return longest

    def stall_s(self, work: StepWork, load_bytes: float) -> float:
        """Of a step, as `waits_s`."""
        return float(work.layers @ self.waits_s(work, load_bytes))

    def step_s(self, work: StepWork, *, with_adapters: bool) -> float:
        """Of a step."""
        waits_s = self.waits_s(
            work, self.mixed_load_bytes if with_adapters else self.base_load_bytes
        )
        return self.compute_s(work) + float(
            work.layers @ (waits_s + self.cold_s * _coldness(waits_s))
        )

    def speed(self, work: StepWork, *, with_adapters: bool) -> Speed:
        """Tokens a second while such steps follow each other: prompts take time of their own."""
        expected = work.num_tokens / self.step_s(work, with_adapters=with_adapters)
        return Speed(expected, expected / (1 + self.off_high), expected / (1 + self.off_low))


def _coldness(waits_s: Values) -> Values:
    """Share of `cold_s` after a wait: nothing after a moment, all of it after some of them."""
    found: Values = 1.0 - np.exp(-waits_s / COLD_AFTER_S)
    return found


@dataclass(frozen=True)
class _Queue:
    """What each kind of layer's step may wait for: [m, n], the first row for nothing.

    `is_load`; `landed`: in times of a load, one after the other; `beside`: experts that are
    computed until it lands; `loads`: all of the layer's, begun before.
    """

    is_load: NDArray[np.bool_]
    landed: Values
    beside: Values
    loads: Values

    @classmethod
    def of(cls, work: StepWork) -> _Queue:
        counts = np.maximum(np.rint(work.loads), work.loads > 0.0).astype(np.int64)
        shape = 1 + int(counts.max(initial=0)), len(counts)
        found = cls(np.zeros(shape, np.bool_), *(np.zeros(shape) for _ in range(3)))
        for kind, count in enumerate(counts.tolist()):
            rows = slice(1, 1 + count)
            found.is_load[rows, kind] = True
            # On average over steps a layer may load a part of an expert.
            found.landed[rows, kind] = np.arange(1, 1 + count) * work.loads[kind] / max(1, count)
            found.beside[rows, kind] = max(0.0, work.needed[kind] - count) + np.arange(count)
            found.loads[rows, kind] = work.loads[kind]
        return found

    def waits(self, costs: StepCosts, transfer_s: float) -> Values:
        """[m, n] seconds, where a layer waits for this load; the longest is what it does wait."""
        busy = self.beside * costs.expert_s + self.loads * costs.load_s
        seconds = costs.latency_s + self.landed * transfer_s - busy
        found: Values = np.where(self.is_load, seconds, 0.0)
        return found


def fit(points: Iterable[SpeedPoint]) -> StepCosts:
    """Costs by which measured steps are explained best, each setting by its relative error.

    Of a setting's windows the medians count, so that one that was disturbed does not. The interval
    is as wide as all windows' residuals, and as those of settings that are left out of the fit.
    Raises ConfigError for points of fewer than three settings or of one batch size, and of links
    of which some were held to a bandwidth and others were not. Of several, the fastest is meant.
    """
    every = list(points)
    if not _is_enough(every):
        raise ConfigError(
            f"windows of {len({p.setting for p in every})} settings (batch size, rows, adapters, "
            "link): "
            f"give at least {MIN_SETTINGS}, of at least 2 batch sizes"
        )
    _check_links(every)
    costs = _fitted(every)
    spread = [_percentiles(_residuals(costs, every))]
    held_out = [off for setting in {p.setting for p in every} for off in _left_out(every, setting)]
    if held_out:
        spread.append(_percentiles(held_out))
    return replace(
        costs,
        off_low=min(0.0, *(low for low, _ in spread)),
        off_high=max(0.0, *(high for _, high in spread)),
    )


def _check_links(points: Sequence[SpeedPoint]) -> None:
    if len({point.max_bytes_per_s is None for point in points if _reads(point)}) > 1:
        raise ConfigError(
            "some windows are of servers with --expert-read-bandwidth, some of servers without: "
            "calibrate all of them with, or all without"
        )


def _reads(point: SpeedPoint) -> bool:
    return point.num_loads > _MIN_LOADS


def _is_enough(points: Sequence[SpeedPoint]) -> bool:
    many = len({p.setting for p in points}) >= MIN_SETTINGS
    return many and len({p.num_tokens for p in points}) > 1


def _left_out(points: Sequence[SpeedPoint], setting: Setting) -> list[float]:
    """Residuals of a setting's windows by a fit of the others; none where those are too few."""
    others = [p for p in points if p.setting != setting]
    if not _is_enough(others):
        return []
    costs, own = _fitted(others), [p for p in points if p.setting == setting]
    is_known = costs.byte_s is not None or all(p.num_loads == 0.0 for p in own)
    return _residuals(costs, own) if is_known else []


def _residuals(costs: StepCosts, points: Sequence[SpeedPoint]) -> list[float]:
    """Measured over predicted, less 1."""
    return [p.step_s / _predicted_s(costs, p) - 1 for p in points]


def _predicted_s(costs: StepCosts, point: SpeedPoint) -> float:
    on_its_link = replace(costs, link_byte_s=point.link_byte_s)
    return on_its_link.step_s(point.work(), with_adapters=point.with_adapters)


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.percentile(values, INTERVAL)
    return float(low), float(high)


def _typical(points: Sequence[SpeedPoint]) -> list[SpeedPoint]:
    """One for each setting: the median of each number of its windows."""
    by_setting: dict[Setting, list[SpeedPoint]] = {}
    for point in points:
        by_setting.setdefault(point.setting, []).append(point)
    names = ("step_s", "stall_s", "num_needed", "num_loads", "read_bytes")
    return [
        replace(windows[0], **{n: statistics.median(getattr(p, n) for p in windows) for n in names})
        for windows in by_setting.values()
    ]


def _fitted(windows: Sequence[SpeedPoint]) -> StepCosts:
    """Which load a layer waits for depends on the costs: it is taken from the last round's.

    Rounds may go in circles, of which the one that explains the steps best is kept.
    """
    points = _typical(windows)
    works = [point.work() for point in points]
    queues = [_Queue.of(work) for work in works]
    found = _solved(points, works, queues, None)
    if not any(map(_reads, points)):
        return found
    rounds: list[StepCosts] = []
    for _ in range(_ROUNDS):
        found = _solved(points, works, queues, found)
        if any(_are_close(found, each) for each in rounds):
            break
        rounds.append(found)
    return min(rounds, key=lambda costs: float(np.square(_residuals(costs, points)).sum()))


def _are_close(one: StepCosts, other: StepCosts) -> bool:
    """To no more than rounding, in effect."""
    return bool(np.allclose(_seconds_of(one), _seconds_of(other), rtol=_CLOSE, atol=0.0))


def _seconds_of(costs: StepCosts) -> list[float]:
    return [value or 0.0 for name, value in asdict(costs).items() if name.endswith("_s")]


def _solved(
    points: Sequence[SpeedPoint],
    works: Sequence[StepWork],
    queues: Sequence[_Queue],
    last: StepCosts | None,
) -> StepCosts:
    """Computing and stall together: an expert's cost is in both. `last` None: computing alone.

    works, queues: the points'.
    """
    terms, wanted = [], []
    links = {point.link_byte_s for point in points if _reads(point)}
    for point, work, queue in zip(points, works, queues, strict=True):
        of_stall = _StallTerms.of(point, work, queue, last) if last and _reads(point) else None
        # On one link loads and waits go together: what waiting costs cannot be told from theirs.
        cold = of_stall.cold_layers if of_stall is not None and len(links) > 1 else 0.0
        of_step = point.num_tokens, point.num_needed, point.num_loads
        terms.append([1.0, *of_step, 0.0, 0.0, cold, work.num_contended])
        wanted.append([point.compute_s, point.step_s])
        if of_stall is not None:
            terms.append([0.0, 0.0, *of_stall.terms, 0.0, 0.0])
            wanted.append([point.stall_s - of_stall.link_s, point.step_s])
    seconds, of_step_s = np.array(wanted).T
    parts = non_negative(np.array(terms) / of_step_s[:, None], seconds / of_step_s)
    fixed_s, token_s, expert_s, load_s, latency_s, byte_s, cold_s, contended_s = map(float, parts)
    base, mixed = _load_bytes(points)
    return StepCosts(
        *(fixed_s, token_s, expert_s, load_s, latency_s),
        byte_s=None if last is None else byte_s,
        base_load_bytes=base,
        mixed_load_bytes=mixed,
        link_byte_s=min(links, default=0.0),
        cold_s=cold_s,
        contended_s=contended_s,
    )


@dataclass(frozen=True)
class _StallTerms:
    """What a step's stall is made of: factors of expert_s (computing beside hides some of it),
    load_s, latency_s and byte_s, and the seconds that are the link's; and layers that are cold.
    """

    terms: tuple[float, float, float, float]
    link_s: float
    cold_layers: float

    @classmethod
    def of(cls, point: SpeedPoint, work: StepWork, queue: _Queue, costs: StepCosts) -> _StallTerms:
        """By which load each layer waits for: at first, when costs have no byte_s, the last one."""
        layers, size = work.layers, point.read_bytes / point.num_loads
        if costs.byte_s is None:
            waits_for, cold_layers = queue.is_load.sum(axis=0), 0.0
        else:
            waits = queue.waits(costs, size * (costs.byte_s + point.link_byte_s))
            waits_for = waits.argmax(axis=0)
            cold_layers = float(layers @ _coldness(waits.max(axis=0)))

        def factor(values: Values) -> float:
            return float(layers @ np.take_along_axis(values, waits_for[None], axis=0)[0])

        is_load = queue.is_load.astype(np.float64)
        landed_bytes = factor(queue.landed) * size
        terms = -factor(queue.beside), -factor(queue.loads), factor(is_load), landed_bytes
        return cls(terms, landed_bytes * point.link_byte_s, cold_layers)


def _load_bytes(points: Sequence[SpeedPoint]) -> tuple[float, float]:
    """(base alone, with adapters): bytes of a load; where one was not measured, the other."""

    def of(which: Callable[[SpeedPoint], bool]) -> float:
        num_loads = sum(p.num_loads for p in points if which(p))
        return sum(p.read_bytes for p in points if which(p)) / num_loads if num_loads else 0.0

    base, mixed = of(lambda p: not p.with_adapters), of(lambda p: p.with_adapters)
    return base or mixed, mixed or base


def non_negative(terms: Values, wanted: Values) -> Values:
    """[n] factors >= 0 of the columns of `terms` [m, n] whose sum is nearest to `wanted` [m].

    By trying each set of columns: there are few.
    """
    scale = np.maximum(np.linalg.norm(terms, axis=0), 1e-300)
    scaled, num_columns = terms / scale, terms.shape[1]
    best, least = np.zeros(num_columns), float(wanted @ wanted)
    for count in range(1, num_columns + 1):
        for chosen in itertools.combinations(range(num_columns), count):
            columns = scaled[:, chosen]
            found = np.linalg.lstsq(columns, wanted, rcond=None)[0]
            error = float(np.sum((columns @ found - wanted) ** 2))
            if found.min() >= 0.0 and error < least:
                best, least = np.zeros(num_columns), error
                best[list(chosen)] = found
    result: Values = best / scale
    return result


# ---- files ----


def write_speed(
    path: Path, points: Sequence[SpeedPoint], machine: Mapping[str, object]
) -> StepCosts:
    """Windows, the costs that they come to, and where it was. Returns the costs."""
    costs = fit(points)
    found = {
        "format": FORMAT,
        "machine": dict(machine),
        "costs": asdict(costs),
        "points": [asdict(point) for point in points],
    }
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return costs


def read_points(path: Path) -> tuple[SpeedPoint, ...]:
    """A file's windows: several files' are fitted together. Raises ConfigError."""
    found = read_object(path, ConfigError)
    if found.get("format") != FORMAT:
        raise ConfigError(f"{path.name} is no {FORMAT}: make it by `sgl-esft offload calibrate`")
    try:
        return msgspec.convert(found.get("points"), tuple[SpeedPoint, ...])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path.name} is damaged: {error}") from error
