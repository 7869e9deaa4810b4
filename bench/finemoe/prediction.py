"""FineMoE's figures of prediction, on traces of real router choices. Counted, not timed.

    traces -> [Subject] known and judged sequences -> [figure3] ... [shift] -> finemoe_*.json

*Recall* is the share of a token's routed experts that were named `distance` layers ahead, over the
layers for which that is possible: with as many named as are routed to (`recall`), or as many as
delta asks for (`recall_with_delta`, `experts_named` a layer). `recall_of_new` leaves out judged
tokens whose experts are those of a known token in every layer: prompts of one task repeat
themselves. A cache's hit rate is another number.

What the traces lack. No embeddings and no hidden states: semantic search, and speculation by the
next layer's gate, are null. Only the routed experts' weights: entropies are too low, and a map
cannot name more experts than were routed to, so that delta changes nothing.

The paper's figures are curves without numbers; `paper` has what its text says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.record import write_result
from bench.finemoe.traces import NUM_EXPERTS, Trace, options_of, read_trace, split, tasks_of
from sgl_esft.offload.predictors.counts import RequestCountsPredictor
from sgl_esft.offload.predictors.finemoe import FineMoEPredictor
from sgl_esft.offload.predictors.learned import train
from sgl_esft.offload.predictors.map_store import MapStore, RunningSearch, entry_bytes
from sgl_esft.offload.predictors.predictor import Predictor
from sgl_esft.offload.predictors.replacement import AGE_WEIGHT
from sgl_esft.offload.routing import NO_OWNER, Floats, Prediction, StepTokens

ANY_BATCH = 1 << 20  # judged tokens are predicted for many at a time, which changes nothing
FILLED_AT_ONCE = 8  # maps that enter a store together, as a served batch's do
SIDE_BY_SIDE = 4  # requests of a server that learns online
RIDGE = 1e-3
ITERATIONS = (1, 2, 5, 10, 20, 40)
STORED = (1024, 2048, 4096, 8192, 16384, 32768)
# MoE layers, experts, hidden size
MODELS = {
    "DeepSeek-V2-Lite": (26, 64, 2048),
    "Mixtral-8x7B": (32, 8, 4096),
    "Qwen1.5-MoE-A2.7B": (24, 60, 2048),
    "Phi-3.5-MoE": (32, 16, 4096),
}
PAPER = {
    "figure3": "curves; coarse entropy far above fine; rises with iterations, flat after about ten",
    "figure4": "curves; fine far above coarse at every distance, and falls less",
    "figure8": "curves; hit rate rises with similarity",
    "figure9": "bars; correlation positive for all models and data",
    "figure14a": "order only: hit count worst, then speculate and T, T+S, T+S+delta best",
    "figure16a": "curve; rises steeply below 1,000 maps, little after; section 4.4: 2LJ maps (here "
    "3,328) give at least 0.75, LJ ln(LJ) / 2 (6,171) at least 0.98",
    "figure18": "less than 200 MB at 32K maps, for the largest of its models",
    "shift": "none: maps and tests are of one data set",
    "shared": "none: there are no adapters",
}


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    most_sequences: int | None = None
    distances: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    distance: int = 3  # where it is not what varies
    num_maps: int = 1000  # the paper's capacity
    capacities: tuple[int, ...] = (125, 250, 500, 1000, 2000, 3328, 6171)
    pairs: tuple[int, int] = (300, 1000)  # judged and known tokens that are compared
    shared_capacities: tuple[int, ...] = (1000, 4000)


QUICK = Plan(10, (1, 3), 3, 200, (50, 200), (50, 200), (200,))


@dataclass(frozen=True)
class Subject:
    """A task's tokens: those in the store, those predicted for, and which of these it has seen."""

    task: str
    known: Trace
    judged: Trace
    is_repeat: Any  # [N] bool

    @property
    def num_layers(self) -> int:
        return self.known.maps.shape[1]


class Outcome:
    """What was named of each token's experts, `distance` layers ahead."""

    def __init__(self, trace: Trace, distance: int) -> None:
        self._chosen, self._top_k = trace.chosen, trace.top_k
        self._num_layers = trace.maps.shape[1] - distance
        self._first = np.zeros(len(trace.maps), np.int64)  # found among the first top_k
        self._found = np.zeros(len(trace.maps), np.int64)
        self._named = np.zeros(len(trace.maps), np.int64)

    def add(self, token: int, prediction: Prediction) -> None:
        hits = self._chosen[token, prediction.layer, prediction.expert_ids]
        self._first[token] += hits[: self._top_k].sum()
        self._found[token] += hits.sum()
        self._named[token] += len(hits)

    def row(self, is_repeat: Any = None) -> dict[str, float | None]:
        """Means over all tokens; `recall_of_new` where it is said which are not new."""
        true = self._num_layers * self._top_k
        row: dict[str, float | None] = {
            "recall": float(self._first.mean() / true),
            "recall_with_delta": float(self._found.mean() / true),
            "experts_named": float(self._named.mean() / self._num_layers),
        }
        if is_repeat is not None:
            new = self._first[~is_repeat]
            row["recall_of_new"] = float(new.mean() / true) if len(new) else None
        return row


def judge(
    predictor: Predictor, trace: Trace, distances: Iterable[int], owner: int = NO_OWNER
) -> dict[int, Outcome]:
    """Show the predictor all sequences side by side; what it named at each of the distances."""
    outcomes = {distance: Outcome(trace, distance) for distance in distances}
    for tokens in trace.steps():
        requests = tuple(trace.sequences[tokens].tolist())
        owners = (owner,) * len(requests)
        predictor.begin_step(StepTokens(requests, (-1,) * len(requests), owners=owners))
        for layer in range(trace.maps.shape[1]):
            for prediction in predictor.observe(layer, trace.maps[tokens, layer]):
                if (outcome := outcomes.get(prediction.layer - layer)) is not None:
                    outcome.add(int(tokens[prediction.token]), prediction)
        predictor.end_step()
    return outcomes


def empty(like: Trace, capacity: int, age_weight: float = AGE_WEIGHT) -> MapStore:
    """A store of at most so many of such maps, without embeddings."""
    _, num_layers, num_experts = like.maps.shape
    max_bytes = capacity * entry_bytes(num_layers, num_experts, 0)
    return MapStore(num_layers, num_experts, 0, 1, max_bytes, age_weight=age_weight)


def filled(known: Trace, capacity: int, age_weight: float = AGE_WEIGHT) -> MapStore:
    """A store that was shown all known tokens in turn."""
    store = empty(known, capacity, age_weight)
    fill(store, np.zeros((len(known.maps), 0), np.float32), known.maps)
    return store


def fill(store: MapStore, embeddings: Floats, maps: Floats) -> None:
    """One batch's tokens after the other's."""
    for first in range(0, len(maps), FILLED_AT_ONCE):
        some = slice(first, first + FILLED_AT_ONCE)
        store.add(embeddings[some], maps[some])


def guided(
    store: MapStore, top_k: int, distance: int, *, by_adapter: bool = False
) -> FineMoEPredictor:
    """FineMoE over a store that stays as it is."""
    return FineMoEPredictor(
        store, top_k, distance, learns=False, by_adapter=by_adapter, max_batch=ANY_BATCH
    )


def counting(known: Trace, reach: int) -> RequestCountsPredictor:
    """MoE-Infinity's predictor, with the counts of all known sequences."""
    _, num_layers, num_experts = known.maps.shape
    predictor = RequestCountsPredictor(
        num_layers,
        num_experts,
        known.top_k,
        reach=reach,
        max_requests=max(known.num_sequences, 1),
    )
    sums = [known.chosen[known.sequences == n].sum(axis=0) for n in range(known.num_sequences)]
    predictor.remember(np.array(sums, np.float32))
    return predictor


# ---- baselines that need no predictor ----


def by_popularity(subject: Subject, distance: int) -> float:
    """Recall of the most frequent known experts."""
    top_k, frequency = subject.known.top_k, subject.known.chosen.mean(axis=0)
    best = np.argsort(-frequency, axis=1, kind="stable")[:, :top_k]
    hits = np.take_along_axis(subject.judged.chosen, best[None], axis=2)
    return float(hits[:, distance:].mean())


def by_previous_token(subject: Subject, distance: int) -> float:
    """Recall of what the token before in the sequence had; nothing for the first."""
    trace = subject.judged
    has_one = trace.sequences[1:] == trace.sequences[:-1]
    both = trace.chosen[1:] & trace.chosen[:-1] & has_one[:, None, None]
    return float(both[:, distance:].sum() / trace.chosen[:, distance:].sum())


# ---- figures: each gives rows, one or more a task ----

Rows = list[dict[str, Any]]


def entropy(rows: Any) -> Any:
    """Bits, over the last axis."""
    shares = rows / rows.sum(axis=-1, keepdims=True)
    return -(shares * np.log2(np.where(shares > 0, shares, 1))).sum(axis=-1)


def figure3(subjects: Sequence[Subject], plan: Plan) -> Rows:
    """Mean entropy a layer: of a token's map, of a request's sum, of its first n tokens' sum."""
    rows = []
    for subject in subjects:
        trace = subject.known
        requests = [trace.maps[trace.sequences == n] for n in range(trace.num_sequences)]
        first = {
            count: [
                entropy(maps[:count].sum(axis=0)).mean() for maps in requests if len(maps) >= count
            ]
            for count in ITERATIONS
        }
        rows.append(
            {
                "task": subject.task,
                "iteration_bits": float(entropy(trace.maps).mean()),
                "request_bits": float(np.mean([entropy(m.sum(axis=0)).mean() for m in requests])),
                "most_bits": float(np.log2(NUM_EXPERTS)),
                "bits_by_iterations": {n: float(np.mean(x)) for n, x in first.items() if x},
            }
        )
    return rows


def figure4(subjects: Sequence[Subject], plan: Plan) -> Rows:
    """Recall at each distance: by maps, by counts of requests, by neither."""
    rows = []
    for subject in subjects:
        store = filled(subject.known, plan.num_maps)
        reach = max(plan.distances)
        coarse = judge(counting(subject.known, reach), subject.judged, plan.distances)
        for distance in plan.distances:
            fine = guided(store, subject.known.top_k, distance)
            outcome = judge(fine, subject.judged, [distance])[distance]
            rows.append(
                {
                    "task": subject.task,
                    "distance": distance,
                    "fine": outcome.row(subject.is_repeat),
                    "coarse": coarse[distance].row(subject.is_repeat),
                    "popularity": by_popularity(subject, distance),
                    "previous_token": by_previous_token(subject, distance),
                }
            )
    return rows


def compared(subject: Subject, plan: Plan, seed: int = 0) -> tuple[Floats, Floats]:
    """Of pairs of a judged and a known token, [n, C]: trajectory similarity, and shared experts.

    Both are means over the layers that can be predicted: similarity of the layers up to
    `distance` before, the share of the layer's experts that the other token has too.
    """
    draw, distance = np.random.default_rng(seed), plan.distance
    new, old = (
        draw.choice(len(trace.maps), min(count, len(trace.maps)), replace=False)
        for trace, count in zip((subject.judged, subject.known), plan.pairs, strict=True)
    )
    maps, chosen = subject.judged.maps[new], subject.judged.chosen[new].astype(np.float32)
    others = subject.known.chosen[old].astype(np.float32)
    store = empty(subject.known, len(old))
    store.add(np.zeros((len(old), 0), np.float32), subject.known.maps[old])
    search = RunningSearch(store, len(new))
    similarity, shared = np.zeros((2, len(new), len(old)), np.float32)
    for layer in range(subject.num_layers - distance):
        search.follow(layer, maps[:, layer])
        similarity += search.cosines()
        shared += chosen[:, layer + distance] @ others[:, layer + distance].T
    num_layers = subject.num_layers - distance
    return similarity / num_layers, shared / (num_layers * subject.known.top_k)


def figure8(subjects: Sequence[Subject], plan: Plan) -> Rows:
    """Mean recall of pairs by their similarity, in tenths."""
    rows = []
    for subject in subjects:
        similarity, shared = compared(subject, plan)
        tenths = np.clip(np.floor(similarity * 10), 0, 9).astype(np.int64)
        rows += [
            {
                "task": subject.task,
                "similarity": [tenth / 10, (tenth + 1) / 10],
                "pairs": int((tenths == tenth).sum()),
                "trajectory_recall": float(shared[tenths == tenth].mean()),
                "semantic_recall": None,
            }
            for tenth in np.unique(tenths).tolist()
        ]
    return rows


def figure9(subjects: Sequence[Subject], plan: Plan) -> Rows:
    """Pearson's coefficient of similarity and recall: of all pairs, and of each token's nearest."""
    rows = []
    for subject in subjects:
        similarity, shared = compared(subject, plan)
        nearest = similarity.argmax(axis=1)[:, None]
        best = [np.take_along_axis(each, nearest, axis=1)[:, 0] for each in (similarity, shared)]
        rows.append(
            {
                "task": subject.task,
                "trajectory_pearson": pearson(similarity.ravel(), shared.ravel()),
                "trajectory_pearson_of_nearest": pearson(*best),
                "semantic_pearson": None,
            }
        )
    return rows


def pearson(one: Floats, other: Floats) -> float:
    """Of two vectors, in float64."""
    return float(np.corrcoef(one.astype(np.float64), other.astype(np.float64))[0, 1])


def figure14a(subjects: Sequence[Subject], plan: Plan) -> Rows:
    """Ways to predict, at one distance. T and T+delta are one run: its first top_k, and all."""
    rows = []
    distance = plan.distance
    for subject in subjects:
        known, judged, top_k = subject.known, subject.judged, subject.known.top_k
        predictors: dict[str, Predictor] = {
            "hit_count": counting(known, distance),
            "learned": train(known.maps, distance, RIDGE, top_k=top_k),
            "map_T": guided(filled(known, plan.num_maps), top_k, distance),
            "map_T_all_known": guided(filled(known, len(known.maps)), top_k, distance),
        }
        ways = {
            name: judge(predictor, judged, [distance])[distance].row(subject.is_repeat)
            for name, predictor in predictors.items()
        }
        rows.append(
            {
                "task": subject.task,
                "popularity": by_popularity(subject, distance),
                "previous_token": by_previous_token(subject, distance),
                "speculate": None,
                "map_T_S": None,
                "map_T_S_delta": None,
                **ways,
            }
        )
    return rows


def figure16a(subjects: Sequence[Subject], plan: Plan) -> Rows:
    """Similarity of the nearest map, and recall, by the store's capacity."""
    rows = []
    for subject in subjects:
        for capacity in plan.capacities:
            store = filled(subject.known, capacity)
            scores = nearest_scores(store, subject.judged, plan.distance)
            fine = guided(store, subject.known.top_k, plan.distance)
            outcome = judge(fine, subject.judged, [plan.distance])[plan.distance]
            rows.append(
                {
                    "task": subject.task,
                    "capacity": capacity,
                    "maps": store.size,
                    "trajectory_similarity": float(scores.mean()),
                    "share_at_least_0.75": float((scores >= 0.75).mean()),
                    "share_at_least_0.98": float((scores >= 0.98).mean()),
                    "semantic_similarity": None,
                    **outcome.row(subject.is_repeat),
                }
            )
    return rows


def nearest_scores(store: MapStore, trace: Trace, distance: int) -> Floats:
    """[L - distance, N]: cosine of the map that guides each prediction."""
    by_layer = []
    for tokens in np.array_split(np.arange(len(trace.maps)), 1 + len(trace.maps) // 256):
        search, scores = RunningSearch(store, len(tokens)), []
        for layer in range(store.num_layers - distance):
            search.follow(layer, trace.maps[tokens, layer])
            scores.append(search.best().scores)
        by_layer.append(np.stack(scores))
    return np.concatenate(by_layer, axis=1)


def figure18(subjects: Sequence[Subject], plan: Plan) -> Rows:
    """Bytes of a store: of ours, and of the maps alone in float32, which the paper must mean."""
    return [
        {
            "model": model,
            "maps": count,
            "bytes": count * entry_bytes(*sizes),
            "bytes_of_maps": count * sizes[0] * sizes[1] * 4,
        }
        for model, sizes in MODELS.items()
        for count in STORED
    ]


def shift(subjects: Sequence[Subject], plan: Plan) -> Rows:
    """Recall with another task's store, while that store or an empty one learns, and afterwards."""
    rows: Rows = []
    for subject in subjects:
        for other in subjects:
            store = filled(other.known, plan.num_maps)
            found = recalled(store, subject, plan)
            row: dict[str, Any] = {"task": subject.task, "store_of": other.task, **found}
            if other is not subject:
                row["while_learning"] = online(subject, store, plan)
                row["afterwards"] = recalled(store, subject, plan)
                row["afterwards_of_the_other"] = recalled(store, other, plan)
                row["by_the_papers_rule"] = shifted(other, subject, plan, 0.0)
            rows.append(row)
        learning = online(subject, empty(subject.known, plan.num_maps), plan)
        rows.append({"task": subject.task, "store_of": None, "while_learning": learning})
    return rows


def shifted(before: Subject, after: Subject, plan: Plan, age_weight: float) -> dict[str, Any]:
    """A store of one task that has learned another: recall of both. 0 = the paper's replacement."""
    store = filled(before.known, plan.num_maps, age_weight)
    online(after, store, plan)
    return {
        "afterwards": recalled(store, after, plan),
        "afterwards_of_the_other": recalled(store, before, plan),
    }


def recalled(store: MapStore, subject: Subject, plan: Plan) -> dict[str, float | None]:
    """Of the subject's judged tokens, by a store that stays as it is."""
    predictor = guided(store, subject.known.top_k, plan.distance)
    outcome = judge(predictor, subject.judged, [plan.distance])[plan.distance]
    return outcome.row(subject.is_repeat)


def shared(subjects: Sequence[Subject], plan: Plan) -> Rows:
    """Recall of a store that all tasks fill by turns, searched as one, and by task."""
    like, distance = subjects[0].known, plan.distance
    rows: Rows = []
    for capacity in plan.shared_capacities:
        together, apart = empty(like, capacity), empty(like, capacity)
        for first in range(0, min(len(each.known.maps) for each in subjects), FILLED_AT_ONCE):
            for owner, each in enumerate(subjects):
                maps = each.known.maps[first : first + FILLED_AT_ONCE]
                none = np.zeros((len(maps), 0), np.float32)
                together.add(none, maps)
                apart.add(none, maps, np.full(len(maps), owner))
        for owner, each in enumerate(subjects):
            found = {
                name: judge(
                    guided(store, like.top_k, distance, by_adapter=store is apart),
                    each.judged,
                    [distance],
                    owner,
                )[distance].row(each.is_repeat)
                for name, store in (("as_one", together), ("by_task", apart))
            }
            rows.append({"task": each.task, "maps": capacity, **found})
    return rows


def online(subject: Subject, store: MapStore, plan: Plan) -> Rows:
    """The known sequences as a server's requests, some side by side, learned from as they go."""
    predictor = FineMoEPredictor(store, subject.known.top_k, plan.distance)
    rows, num_learned = [], 0
    for first in range(0, subject.known.num_sequences, SIDE_BY_SIDE):
        last = min(first + SIDE_BY_SIDE, subject.known.num_sequences)
        some = subject.known.of(np.arange(first, last))
        outcome = judge(predictor, some, [plan.distance])[plan.distance]
        rows.append({"tokens_learned_before": num_learned, **outcome.row()})
        num_learned += len(some.maps)
    return rows


FIGURES: Mapping[str, Callable[[Sequence[Subject], Plan], Rows]] = {
    "figure3": figure3,
    "figure4": figure4,
    "figure8": figure8,
    "figure9": figure9,
    "figure14a": figure14a,
    "figure16a": figure16a,
    "figure18": figure18,
    "shift": shift,
    "shared": shared,
}


def read_subjects(paths: Iterable[Path], plan: Plan, seed: int) -> list[Subject]:
    """Every task of every file."""
    subjects = []
    for path in paths:
        for task in tasks_of(path):
            known, judged = split(read_trace(path, task, plan.most_sequences), seed)
            subjects.append(Subject(task, known, judged, judged.repeats_of(known)))
    return subjects


def described(name: str, subjects: Sequence[Subject], plan: Plan, seed: int) -> dict[str, Any]:
    """One figure, as it is written to its file."""
    figure = FIGURES[name]
    tokens = {
        each.task: {
            "known_tokens": len(each.known.maps),
            "judged_tokens": len(each.judged.maps),
            "judged_tokens_that_repeat": int(each.is_repeat.sum()),
        }
        for each in subjects
    }
    settings = {"seed": seed, "distance": plan.distance, "maps": plan.num_maps}
    what = (figure.__doc__ or "").partition("\n")[0]
    rows = figure(subjects, plan)
    return {"what": what, "paper": PAPER[name], **settings, "tasks": tokens, "rows": rows}


def main(arguments: Sequence[str] | None = None) -> None:
    """Count and write bench/results/finemoe_figure3.json and the others."""
    options = options_of(__doc__.partition("\n")[0], list(FIGURES), arguments)
    plan = QUICK if options.quick else Plan()
    subjects = read_subjects(options.trace, plan, options.seed)
    for name in options.figures:
        found = described(name, subjects, plan, options.seed)
        for row in found["rows"]:
            print(name, {key: _short(value) for key, value in row.items()})
        path = write_result(f"finemoe_{name}", found, folder=options.out, packages=("numpy",))
        print(f"wrote {path.name}")


def _short(value: Any) -> Any:
    """Rounded, to be read."""
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    return [_short(each) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
