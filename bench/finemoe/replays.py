"""A task's tokens as a server's steps, and what one way to keep and fetch experts does with them.

    Trace --[steps_of]--> TraceStep of B requests side by side --.
    Way: eviction, predictor; Setting: rows, link ---------------+--[Replays.run]--> Run: hits,
                  sgl_esft/offload/simulate.py decides as a server does              loads, stall

Known tokens are replayed first, so that caches are warm, and not counted. All tokens are taken for
decoded ones, as the traces' authors recorded them: prompts, one token after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.finemoe.prediction import RIDGE, Subject, counting, filled, guided
from bench.finemoe.traces import NUM_EXPERTS, Trace
from sgl_esft.offload.decisions import Counts, Decisions
from sgl_esft.offload.policies import POLICIES, ExpertPolicy, LeastFrequentlyUsed
from sgl_esft.offload.predictors.learned import train
from sgl_esft.offload.predictors.map_store import MapStore
from sgl_esft.offload.predictors.moments import RouterMoments, logits_of
from sgl_esft.offload.predictors.predictor import Predictor
from sgl_esft.offload.predictors.regression import RegressionPredictor
from sgl_esft.offload.routing import Floats, Ints, Prediction, StepTokens
from sgl_esft.offload.simulate import Timeline, added, belady_hits, needs_of, replay
from sgl_esft.offload.trace import TraceHeader, TraceStep

REACH = 6  # layers that MoE-Infinity's predictor looks ahead
MOMENTS_BYTES = 64 << 20  # the default of --expert-map-memory


@dataclass(frozen=True)
class Setting:
    """What a replay varies. Rows of a layer, requests side by side, layers ahead, maps kept.

    `load_time`: of one expert, in computing times of a layer (r); None = nothing is fetched ahead.
    """

    num_rows: int
    load_time: float | None = None
    batch: int = 1
    distance: int = 3
    num_maps: int = 1000
    num_warm: int = 200  # steps before those that count
    num_steps: int = 1000  # at most


@dataclass(frozen=True)
class Run:
    """What came of the steps that count."""

    counts: Counts
    by_layer: tuple[Counts, ...]
    num_steps: int
    num_tokens: int
    stall: float  # in computing times of a layer, of all layers

    @property
    def hit_rate(self) -> float:
        """Of distinct experts of a step, those that were there when it asked."""
        return self.counts.num_hits / max(1, self.counts.num_asked)

    def row(self) -> dict[str, float]:
        """Hit rate, and loads a token: on demand, ahead, and ahead in vain."""
        counts, tokens = self.counts, self.num_tokens
        return {
            "hit_rate": self.hit_rate,
            "loads_per_token": (counts.num_loads + counts.num_prefetches) / tokens,
            "demand_per_token": counts.num_loads / tokens,
            "prefetched_per_token": counts.num_prefetches / tokens,
            "wasted_per_token": counts.num_wasted / tokens,
        }


# ---- ways ----

MakePredictor = Callable[["Replays", Setting, Sequence[TraceStep]], Predictor]


@dataclass(frozen=True)
class Way:
    """A policy, and what predicts for it; `instead_of` names the paper's baseline."""

    policy: ExpertPolicy
    predict: MakePredictor | None = None
    instead_of: str = ""


class Oracle:
    """A `Predictor` that was told every step: what could be hidden at best within a pass."""

    wants_hidden = False
    wants_embeddings = True
    is_quick = False

    def __init__(self, steps: Iterable[TraceStep]) -> None:
        self._steps = iter(steps)

    def begin_step(self, tokens: StepTokens) -> list[Prediction]:
        """All layers at once. Raises ValueError for a step that does not come next."""
        step = next(self._steps)
        if step.request_ids != tokens.request_ids:
            raise ValueError(f"requests {tokens.request_ids}, but {step.request_ids} come next")
        return [
            Prediction(layer, token, ids, np.ones(len(ids), np.float32))
            for layer, of_layer in enumerate(step.topk_ids)
            for token, ids in enumerate(of_layer)
        ]

    def observe(self, layer: int, probs: Floats) -> list[Prediction]:
        """Nothing is left to say."""
        return []

    def observe_hidden(self, layer: int, hidden: Floats) -> list[Prediction]:
        """Nothing is left to say."""
        return []

    def end_step(self) -> None:
        """Nothing is learned."""

    def forget(self, request_ids: Iterable[int]) -> None:
        """Nothing is kept by request."""


def _maps(of: Replays, setting: Setting, _: Sequence[TraceStep]) -> Predictor:
    return guided(of.store(setting.num_maps), of.subject.known.top_k, setting.distance)


def _counts(of: Replays, _: Setting, __: Sequence[TraceStep]) -> Predictor:
    return counting(of.subject.known, min(REACH, of.subject.num_layers))


def _probes(of: Replays, setting: Setting, _: Sequence[TraceStep]) -> Predictor:
    known = of.subject.known
    return train(known.maps, setting.distance, RIDGE, top_k=known.top_k)


def _regressed(of: Replays, _: Setting, __: Sequence[TraceStep]) -> Predictor:
    """It learns on, as it cannot be told not to."""
    known = of.subject.known
    num_layers, num_experts = known.maps.shape[1:]
    moments = RouterMoments(num_layers, num_experts, MOMENTS_BYTES)
    moments.add(logits_of(known.maps))
    return RegressionPredictor(moments, known.top_k)


def _future(_: Replays, __: Setting, steps: Sequence[TraceStep]) -> Predictor:
    return Oracle(steps)


def _frequent(name: str) -> ExpertPolicy:
    return ExpertPolicy(name, "frequency keeps", LeastFrequentlyUsed)


WAYS: Mapping[str, Way] = {
    "stream": Way(POLICIES["stream"], None, "DeepSpeed-Inference"),
    "static": Way(POLICIES["static"]),
    "lru": Way(POLICIES["lru"]),
    "lfu": Way(POLICIES["lfu"]),
    "request-counts": Way(POLICIES["request-counts"], _counts, "MoE-Infinity"),
    "learned": Way(POLICIES["learned"], _probes, "ProMoE"),
    "finemoe": Way(POLICIES["finemoe"], _maps, "FineMoE"),
    "maps, lfu": Way(_frequent("maps, lfu"), _maps, "what is used often stays"),
    "regression": Way(POLICIES["regression"], _regressed, "ours"),
    "oracle": Way(_frequent("oracle"), _future, "every expert of the pass is known"),
}


# ---- steps ----


def header_of(trace: Trace) -> TraceHeader:
    """Of a server of the base alone."""
    num_layers, num_experts = trace.maps.shape[1:]
    return TraceHeader(num_layers, num_experts, trace.top_k, num_experts, num_experts, 0)


def steps_of(trace: Trace, batch: int, first_request: int = 0) -> list[TraceStep]:
    """All tokens, by `batch` requests side by side: each goes through a part of them of its own.

    A request is one part's piece of a sequence. What is left over at the end is left out.
    """
    length = len(trace.maps) // batch
    parts = np.arange(batch)[:, None] * length + np.arange(length)
    requests = first_request + trace.sequences[parts] * batch + np.arange(batch)[:, None]
    ids = np.nonzero(trace.chosen)[2].reshape(*trace.chosen.shape[:2], trace.top_k)
    return [
        TraceStep(
            tuple(requests[:, number].tolist()),
            np.full(batch, -1),
            np.swapaxes(ids[tokens], 0, 1),
            np.swapaxes(trace.maps[tokens], 0, 1),
            np.zeros((batch, 0), np.float32),
        )
        for number, tokens in enumerate(parts.T)
    ]


def warm_and_judged(
    subject: Subject, setting: Setting
) -> tuple[Sequence[TraceStep], Sequence[TraceStep]]:
    """The last known steps, and the first that count; all requests differ."""
    known = steps_of(subject.known, setting.batch)
    after = (subject.known.num_sequences + 1) * setting.batch
    judged = steps_of(subject.judged, setting.batch, after)
    return known[len(known) - setting.num_warm :], judged[: setting.num_steps]


# ---- replays ----


class Replays:
    """Of one task. Its store is filled once for all of them: they do not learn."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._stores: dict[int, MapStore] = {}

    def store(self, num_maps: int) -> MapStore:
        """With at most so many of the known tokens' maps."""
        if num_maps not in self._stores:
            self._stores[num_maps] = filled(self.subject.known, num_maps)
        return self._stores[num_maps]

    def run(self, way: Way, setting: Setting) -> Run:
        """Warm up, replay, and count."""
        warm, judged = warm_and_judged(self.subject, setting)
        header = header_of(self.subject.known)
        decisions = self._decisions(way, setting)
        predictor = way.predict(self, setting, [*warm, *judged]) if way.predict else None
        timeline = Timeline(setting.load_time or 0.0)
        before = replay(header, warm, decisions, predictor, timeline)
        by_layer = tuple(replace(each) for each in before.by_layer)
        after = replay(header, judged, decisions, predictor, timeline)
        differences = tuple(map(_minus, after.by_layer, by_layer))
        stall = after.stall_layers - before.stall_layers
        return Run(added(differences), differences, after.num_steps, after.num_tokens, stall)

    def _decisions(self, way: Way, setting: Setting) -> Decisions:
        return Decisions(
            self.subject.num_layers,
            NUM_EXPERTS,
            setting.num_rows,
            way.policy,
            num_base=NUM_EXPERTS,
            loads_per_layer=1 / setting.load_time if setting.load_time else 0.0,
            popularity=list(self.subject.known.chosen.sum(axis=0).astype(np.float64)),
        )

    def most_hits(self, setting: Setting) -> float:
        """Belady's hit rate: who is needed last leaves first. Nothing beats it but prefetching.

        It begins with the experts that are needed first, whatever warming had left.
        """
        _, judged = warm_and_judged(self.subject, setting)
        asked = hits = 0
        for needs in needs_of(header_of(self.subject.known), judged):
            hits += belady_hits([_soonest(needs, setting.num_rows), *needs], setting.num_rows)
            asked += sum(map(len, needs))
        return hits / asked


def _minus(after: Counts, before: Counts) -> Counts:
    return Counts(**{name: value - vars(before)[name] for name, value in vars(after).items()})


def _soonest(needs: Sequence[Ints], count: int) -> Ints:
    """The slots that are asked for first, at most `count`, ascending."""
    found = dict.fromkeys(slot for needed in needs for slot in needed.tolist())
    return np.array(sorted(list(found)[:count]))
