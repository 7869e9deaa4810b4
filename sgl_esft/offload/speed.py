"""How long a decoding step takes: fitted to a server's own windows, asked for any other step.

    windows of steady decoding: SpeedPoint --[fit]--> StepCosts, by least squares, none negative
    StepWork of a batch, a cache, adapters (step_work.py) --[StepCosts.speed]--> tokens a second

A step is computing and stall. Computing: something in any case, something for each token, for each
distinct expert and, of the processor, for each load; a (token, expert) pair is part of its token,
which has as many experts whatever it is. Stall, layer by layer: experts that are here are computed
while the missing ones are read, and those as they arrive, so it is what loads take beyond that.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np

from sgl_esft.errors import ConfigError
from sgl_esft.formats.strict_json import read_object
from sgl_esft.offload.policies import Values
from sgl_esft.offload.step_work import StepWork

FORMAT: Final = "sgl-esft speed 1"
INTERVAL: Final = (10.0, 90.0)  # percentiles of what measured windows lie off
_MIN_GROUPS: Final = 3  # batch size, rows, adapters: fewer leave nothing to compare with
_MIN_LOADS: Final = 0.05  # a step; fewer say nothing about the link
_LINK_ROUNDS: Final = 50  # which layers wait, and for what: found by turns with how long

Measure = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Size = Annotated[int, msgspec.Meta(ge=1)]


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

    @property
    def setting(self) -> tuple[int, int, bool]:
        """What is repeated from window to window."""
        return self.num_tokens, self.num_rows, self.with_adapters

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
            loads=np.arange(count + 1) * (per_layer / count),
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

    `byte_s` None: nothing was read when it was measured, so no load can be predicted.
    """

    fixed_s: float
    token_s: float
    expert_s: float  # a distinct expert, loop and computing
    load_s: float  # the processor's, for each expert that is read
    latency_s: float  # of a layer's first load, beyond its bytes
    byte_s: float | None  # 1 / bandwidth
    base_load_bytes: float  # of an expert read, where only the base is asked
    mixed_load_bytes: float  # with adapters: theirs are not aligned, and read some more
    off_low: float = 0.0  # measured over predicted seconds, less 1: INTERVAL
    off_high: float = 0.0

    def with_bandwidth(self, bytes_per_s: float) -> StepCosts:
        """On a link that carries at most so much."""
        return replace(self, byte_s=max(self.byte_s or 0.0, 1.0 / bytes_per_s))

    def compute_s(self, work: StepWork) -> float:
        """Of a step, without stall."""
        return (
            self.fixed_s
            + self.token_s * work.num_tokens
            + self.expert_s * work.num_needed
            + self.load_s * work.num_loads
        )

    def stall_s(self, work: StepWork, load_bytes: float) -> float:
        """Of a step whose loads have so many bytes each. Raises ConfigError: byte_s is None."""
        if work.num_loads == 0.0:
            return 0.0
        if self.byte_s is None:
            raise ConfigError(
                "the server that was calibrated read no expert: calibrate one with a smaller "
                "--expert-cache too, and name both files"
            )
        return float(work.layers @ self._waits(work, load_bytes * self.byte_s).max(axis=0))

    def _waits(self, work: StepWork, transfer_s: float) -> Values:
        """[3, n]: what a layer waits for none, its first, its last load; the longest is so.

        Loads follow each other; the last has all other experts to hide behind.
        """
        has_any = work.loads > 0.0
        first = self.latency_s + transfer_s - (work.needed - work.loads) * self.expert_s
        last = self.latency_s + work.loads * transfer_s - (work.needed - 1.0) * self.expert_s
        return np.stack([np.zeros(len(work.loads)), first * has_any, last * has_any])

    def step_s(self, work: StepWork, *, with_adapters: bool) -> float:
        """Of a step."""
        load_bytes = self.mixed_load_bytes if with_adapters else self.base_load_bytes
        return self.compute_s(work) + self.stall_s(work, load_bytes)

    def speed(self, work: StepWork, *, with_adapters: bool) -> Speed:
        """Tokens a second while such steps follow each other: prompts take time of their own."""
        expected = work.num_tokens / self.step_s(work, with_adapters=with_adapters)
        return Speed(expected, expected / (1 + self.off_high), expected / (1 + self.off_low))


def fit(points: Iterable[SpeedPoint]) -> StepCosts:
    """Costs by which measured steps are explained best, each by its relative error.

    The interval is as wide as the residuals, and as those of settings that are left out of the
    fit. Raises ConfigError for points of fewer than three settings or of one batch size.
    """
    every = list(points)
    if not _is_enough(every):
        raise ConfigError(
            f"windows of {len({p.setting for p in every})} settings (batch size, rows, adapters): "
            f"give at least {_MIN_GROUPS}, of at least 2 batch sizes"
        )
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


def _is_enough(points: Sequence[SpeedPoint]) -> bool:
    many = len({p.setting for p in points}) >= _MIN_GROUPS
    return many and len({p.num_tokens for p in points}) > 1


def _left_out(points: Sequence[SpeedPoint], setting: tuple[int, int, bool]) -> list[float]:
    """Residuals of a setting's windows by a fit of the others; none where those are too few."""
    others = [p for p in points if p.setting != setting]
    if not _is_enough(others):
        return []
    costs, own = _fitted(others), [p for p in points if p.setting == setting]
    is_known = costs.byte_s is not None or all(p.num_loads == 0.0 for p in own)
    return _residuals(costs, own) if is_known else []


def _residuals(costs: StepCosts, points: Sequence[SpeedPoint]) -> list[float]:
    """Measured over predicted, less 1."""
    return [p.step_s / costs.step_s(p.work(), with_adapters=p.with_adapters) - 1 for p in points]


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.percentile(values, INTERVAL)
    return float(low), float(high)


def _fitted(points: Sequence[SpeedPoint]) -> StepCosts:
    weights = np.array([1.0 / p.step_s for p in points])
    terms = np.array([[1.0, p.num_tokens, p.num_needed, p.num_loads] for p in points])
    computing = np.array([max(0.0, p.step_s - p.stall_s) for p in points])
    parts = non_negative(terms * weights[:, None], computing * weights)
    base, mixed = _load_bytes(points)
    costs = StepCosts(*map(float, parts), 0.0, None, base, mixed)
    readers = [p for p in points if p.num_loads > _MIN_LOADS]
    return _with_link(costs, readers) if readers else costs


def _load_bytes(points: Sequence[SpeedPoint]) -> tuple[float, float]:
    """(base alone, with adapters): bytes of a load; where one was not measured, the other."""

    def of(which: Callable[[SpeedPoint], bool]) -> float:
        num_loads = sum(p.num_loads for p in points if which(p))
        return sum(p.read_bytes for p in points if which(p)) / num_loads if num_loads else 0.0

    base, mixed = of(lambda p: not p.with_adapters), of(lambda p: p.with_adapters)
    return base or mixed, mixed or base


def _with_link(costs: StepCosts, points: Sequence[SpeedPoint]) -> StepCosts:
    """Latency and bandwidth by the stall of points that read.

    Which load a layer waits for depends on both: it is taken from the last round's.
    """
    works = [p.work() for p in points]
    sizes = [p.read_bytes / p.num_loads for p in points]
    weights = np.array([1.0 / p.step_s for p in points])
    found = replace(costs, latency_s=0.0, byte_s=math.inf)
    for _ in range(_LINK_ROUNDS):
        rows = [_link_terms(found, work, size) for work, size in zip(works, sizes, strict=True)]
        terms, hidden = np.array([row[:2] for row in rows]), np.array([row[2] for row in rows])
        stalls = np.array([p.stall_s for p in points]) + hidden
        latency_s, byte_s = map(float, non_negative(terms * weights[:, None], stalls * weights))
        before, found = found, replace(costs, latency_s=latency_s, byte_s=byte_s)
        if found == before:
            break
    return found


def _link_terms(costs: StepCosts, work: StepWork, size: float) -> tuple[float, float, float]:
    """(of latency_s, of byte_s) in a step's stall, and the computing that hides some of it."""
    has_any = work.loads > 0.0
    if costs.byte_s == math.inf:  # at first: every layer that reads waits for its last load
        waits_for = np.where(has_any, 2, 0)
    else:
        waits_for = costs._waits(work, size * (costs.byte_s or 0.0)).argmax(axis=0)
    is_first, is_last = waits_for == 1, waits_for == 2
    num_loads = is_first + is_last * work.loads
    beside = is_first * (work.needed - work.loads) + is_last * (work.needed - 1.0)
    return (
        float(work.layers @ (is_first + is_last)),
        float(work.layers @ num_loads) * size,
        float(work.layers @ beside) * costs.expert_s,
    )


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


def write_speed(path: Path, points: Sequence[SpeedPoint], machine: Mapping[str, object]) -> None:
    """Windows, the costs that they come to, and where it was."""
    found = {
        "format": FORMAT,
        "machine": dict(machine),
        "costs": asdict(fit(points)),
        "points": [asdict(point) for point in points],
    }
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def read_points(path: Path) -> tuple[SpeedPoint, ...]:
    """A file's windows: several files' are fitted together. Raises ConfigError."""
    found = read_object(path, ConfigError)
    if found.get("format") != FORMAT:
        raise ConfigError(f"{path.name} is no {FORMAT}: make it by `sgl-esft offload calibrate`")
    try:
        return msgspec.convert(found.get("points"), tuple[SpeedPoint, ...])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path.name} is damaged: {error}") from error
