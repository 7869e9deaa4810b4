"""A trace is what was recorded, and its replay decides what the rank decided."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sgl_esft.errors import ConfigError
from sgl_esft.offload.decisions import Counts, Decisions, Load
from sgl_esft.offload.policies import POLICIES
from sgl_esft.offload.predictors.counts import RequestCountsPredictor
from sgl_esft.offload.predictors.finemoe import FineMoEPredictor
from sgl_esft.offload.predictors.map_store import MapStore
from sgl_esft.offload.predictors.moments import RouterMoments, logits_of
from sgl_esft.offload.predictors.predictor import Predictor
from sgl_esft.offload.predictors.regression import RegressionPredictor
from sgl_esft.offload.recall import RecallRow
from sgl_esft.offload.routing import Floats, Ints, Prediction, StepTokens
from sgl_esft.offload.simulate import (
    Timeline,
    base_maps,
    belady_hits,
    needed_slots,
    needs_of,
    replay,
)
from sgl_esft.offload.trace import (
    HEADER_NAME,
    STEPS_PER_PART,
    SlotChange,
    TraceEvent,
    TraceHeader,
    TraceStep,
    TraceWriter,
    read_header_of,
    read_trace,
    rounded,
)
from sgl_esft.platform.moe import FAILED
from tests.fast.offload.tiers import open_rank

HEADER = TraceHeader(
    num_layers=3, num_experts=8, top_k=2, num_slots=16, num_base=8, embedding_size=4
)
MANY = 1 << 30


def _step(rng: np.random.Generator, num_tokens: int, num_predicted: int) -> TraceStep:
    ids = np.stack(
        [
            [rng.permutation(HEADER.num_experts)[: HEADER.top_k] for _ in range(num_tokens)]
            for _ in range(HEADER.num_layers)
        ]
    )
    probs = rng.random((HEADER.num_layers, num_predicted, HEADER.num_experts)).astype(np.float32)
    probs /= probs.sum(axis=-1, keepdims=True)
    return TraceStep(
        tuple(int(n) for n in rng.integers(0, 1 << 50, num_predicted)),
        rng.integers(-1, 1, num_tokens),
        ids.astype(np.int64),
        rounded(probs),
        rounded(rng.random((num_predicted, 4)).astype(np.float32)),
    )


def _maps(adapter: dict[int, int]) -> Ints:
    """One adapter slot, alike in all layers: expert id -> slot."""
    base = np.arange(HEADER.num_experts)
    own = base.copy()
    own[list(adapter)] = list(adapter.values())
    # Strides of 0, as no rank has them: what is written must be what they mean.
    return np.broadcast_to(np.stack([own, base]), (HEADER.num_layers, 2, HEADER.num_experts))


def _events(seed: int, num_steps: int) -> list[TraceEvent]:
    rng = np.random.default_rng(seed)
    events: list[TraceEvent] = [SlotChange(_maps({1: 8, 4: 9}), (), (7,))]
    for number in range(num_steps):
        if number == num_steps // 2:
            gone = tuple((layer, slot) for layer in range(3) for slot in (8, 9))
            events.append(SlotChange(_maps({2: 8}), gone, (5,)))
        num_tokens = (1, 3, 12)[number % 3]
        events.append(_step(rng, num_tokens, num_tokens if num_tokens < 12 else 0))
    return events


def _equal(one: TraceEvent, other: TraceEvent) -> bool:
    return all(
        np.array_equal(np.asarray(a), np.asarray(b))
        for a, b in zip(vars(one).values(), vars(other).values(), strict=True)
    )


@pytest.mark.parametrize("num_steps", [1, STEPS_PER_PART + 3])
def test_a_trace_is_read_as_it_was_written(tmp_path: Path, num_steps: int) -> None:
    events = _events(1, num_steps)
    writer = TraceWriter(tmp_path / "trace", HEADER, MANY)
    for event in events:
        writer.add(event)
    writer.flush()
    assert read_header_of(tmp_path / "trace") == HEADER
    found = list(read_trace(tmp_path / "trace"))
    assert len(found) == len(events)
    assert all(_equal(one, other) for one, other in zip(found, events, strict=True))


def test_a_trace_of_before_there_were_owners_says_none(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace", HEADER, MANY)
    for event in _events(1, 3):
        writer.add(event)
    writer.flush()
    part = next((tmp_path / "trace").glob("part-*"))
    arrays = load_file(part)
    assert arrays.pop("owners").tolist() == [[7], [5]]
    save_file(arrays, part)
    changes = [e for e in read_trace(tmp_path / "trace") if isinstance(e, SlotChange)]
    assert [change.owners for change in changes] == [(), ()]


def test_a_full_trace_stops_and_stays_readable(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, HEADER, 3000)
    for event in _events(2, 20):
        writer.add(event)
        writer.flush()
    assert writer.is_full
    assert 0 < len(list(read_trace(tmp_path))) < 20
    parts = list(tmp_path.glob("part-*"))
    assert sum(file.stat().st_size - 1000 for file in parts) < 3000, "but for headers"


def test_bad_traces_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    writer = TraceWriter(folder, HEADER, MANY)
    with pytest.raises(ConfigError, match="is not empty"):
        TraceWriter(folder, HEADER, MANY)
    writer.add(_events(1, 1)[1])
    writer.flush()
    part = next(folder.glob("part-*"))
    part.write_bytes(part.read_bytes()[:-9])
    with pytest.raises(ConfigError, match="damaged"):
        list(read_trace(folder))
    header = json.loads((folder / HEADER_NAME).read_text())
    (folder / HEADER_NAME).write_text(json.dumps({**header, "format": "another"}))
    with pytest.raises(ConfigError, match="record it again"):
        list(read_trace(folder))


def _predictor(policy: str, *, by_adapter: bool) -> Predictor | None:
    if policy == "regression":
        moments = RouterMoments(HEADER.num_layers, HEADER.num_experts, MANY)
        shape = (20, HEADER.num_layers, HEADER.num_experts)
        moments.add(logits_of(np.random.default_rng(0).random(shape, np.float32)))
        return RegressionPredictor(moments, HEADER.top_k)
    if policy != "finemoe":
        return None
    store = MapStore(HEADER.num_layers, HEADER.num_experts, 4, 1, 4096)
    return FineMoEPredictor(store, HEADER.top_k, 1, by_adapter=by_adapter)


@pytest.mark.parametrize(
    ("policy", "by_adapter"),
    [
        ("lru", False),
        ("stream", False),
        ("regression", False),
        ("finemoe", False),
        ("finemoe", True),
    ],
)
def test_a_replay_counts_what_the_rank_counted(root: Path, policy: str, by_adapter: bool) -> None:
    """Real files, threads and rows on one side, the trace alone on the other."""
    events = _events(3, 60)
    predictor = _predictor(policy, by_adapter=by_adapter)
    holder = {"maps": base_maps(HEADER)}
    owners: tuple[int, ...] = ()

    def slots_of(layer: int, adapter_slot: int, ids: Ints) -> Ints:
        return holder["maps"][layer, adapter_slot, ids]

    with open_rank(
        root / "base",
        4,
        policy,
        predictor=predictor,
        loads_per_layer=1.5,
        slots_of=slots_of,
    ) as rank:
        for layer in range(3):  # adapters' slots: any expert will do
            layer_id = rank.tier.layers[layer].layer_id
            rank.tier.add(layer, {s: rank.source.place(None, layer_id, 1) for s in range(8, 16)})
        for event in events:
            if isinstance(event, SlotChange):
                holder["maps"], owners = event.maps, event.owners
                for layer, slot in event.forgotten:
                    rank.tier.decisions.forget(layer, (slot,))
                continue
            slots = tuple(event.adapter_slots[: len(event.request_ids)].tolist())
            whose = tuple(-1 if slot < 0 else owners[slot] for slot in slots)
            tokens = StepTokens(event.request_ids, slots, owners=whose) if slots else None
            rank.tier.begin(tokens)
            if tokens is not None and predictor is not None:
                rank.tier.embedded(event.embeddings)
            for layer in range(3):
                needed = needed_slots(
                    holder["maps"][layer], event.topk_ids[layer], event.adapter_slots
                )
                probs = event.probs[layer] if tokens is not None else None
                for _slot, row in rank.tier.arrivals(layer, needed.tolist(), probs):
                    assert row != FAILED
        rank.tier.begin(None)
        of_rank = [Counts(**vars(rank.tier.decisions.counts(layer))) for layer in range(3)]
        recall = rank.tier.decisions.recall
    decisions = Decisions(3, 16, 4, POLICIES[policy], num_base=8, loads_per_layer=1.5)
    found = replay(HEADER, events, decisions, _predictor(policy, by_adapter=by_adapter))
    assert list(found.by_layer) == of_rank
    assert found.counts.num_loads > 0
    assert (found.counts.num_prefetches > 0) == (policy != "lru")
    assert found.num_steps == 60
    assert found.recall.num_asked == recall.num_asked
    assert found.recall.rows == recall.rows
    if policy == "finemoe":
        others = Decisions(3, 16, 4, POLICIES[policy], num_base=8, loads_per_layer=1.5)
        other = replay(HEADER, events, others, _predictor(policy, by_adapter=not by_adapter))
        assert other.recall.rows != recall.rows, "whose maps are searched makes a difference"
    by_maps = {(layer, 1) for layer in range(3)}
    by_layers = {(1, 1), (2, 1), (2, 2)}
    assert set(recall.rows) == {"finemoe": by_maps, "regression": by_layers}.get(policy, set())


class Logged(RequestCountsPredictor):
    """Names from several distances; keeps (pass, layer that is named, distance, ids, token)."""

    def __init__(self) -> None:
        super().__init__(HEADER.num_layers, HEADER.num_experts, HEADER.top_k, reach=2)
        self.log: list[tuple[int, int, int, Ints, int]] = []
        self.num_passes = 0

    def begin_step(self, tokens: StepTokens) -> list[Prediction]:
        self.num_passes += 1
        return self._keep(-1, super().begin_step(tokens))

    def observe(self, layer: int, probs: Floats) -> list[Prediction]:
        return self._keep(layer, super().observe(layer, probs))

    def _keep(self, layer: int, found: list[Prediction]) -> list[Prediction]:
        self.log += [
            (self.num_passes, each.layer, each.layer - layer, each.expert_ids, each.token)
            for each in found
        ]
        return found


def test_recall_is_of_what_was_named_from_each_distance() -> None:
    """Counted a second time, from the predictions and the trace alone. Prompts do not count."""
    events, predictor = _events(5, 60), Logged()
    predictor.remember(np.random.default_rng(0).integers(0, 5, (4, 3, 8)).astype(np.float32))
    found = replay(HEADER, events, Decisions(3, 16, 4, POLICIES["lfu"], num_base=8), predictor)
    asked, rows = [0, 0, 0], dict[tuple[int, int], RecallRow]()
    maps, num_passes = base_maps(HEADER), 0
    for event in events:
        if isinstance(event, SlotChange):
            maps = event.maps
        elif event.request_ids:
            num_passes += 1
            for layer in range(3):
                ids, of = event.topk_ids[layer], event.adapter_slots
                needed = set(needed_slots(maps[layer], ids, of).tolist())
                asked[layer] += len(needed)
                named: dict[int, set[int]] = {}
                for at, target, distance, said, token in predictor.log:
                    if (at, target) == (num_passes, layer):
                        named.setdefault(distance, set()).update(maps[layer, of[token], said])
                for distance, slots in named.items():
                    row = rows.setdefault((layer, distance), RecallRow())
                    row.num_named += len(slots)
                    row.num_found += len(slots & needed)
    assert predictor.num_passes == num_passes == 40
    assert found.recall.num_asked == asked
    assert found.recall.rows == rows
    assert set(rows) == {(1, 1), (2, 1), (2, 2)}, "of a new request nothing is known before"
    assert all(0 < row.num_found < row.num_named for row in rows.values())


def test_needed_slots_are_those_of_each_tokens_adapter() -> None:
    maps = _maps({1: 8, 4: 9})[0]
    ids = np.array([[1, 4], [1, -1], [7, 4]])
    assert needed_slots(maps, ids, np.array([0, -1, -1])).tolist() == [1, 4, 7, 8, 9]


def test_no_policy_has_more_hits_than_belady() -> None:
    events = [event for event in _events(4, 90) if isinstance(event, TraceStep)]
    few = [step for step in events if len(step.adapter_slots) == 1]
    needs = needs_of(HEADER, few)
    for policy in ("lru", "lfu", "static", "stream"):
        decisions = Decisions(3, 16, 4, POLICIES[policy], num_base=8)
        found = replay(HEADER, few, decisions)
        for layer, counts in enumerate(found.by_layer):
            assert counts.num_hits <= belady_hits(needs[layer], 4)


def test_belady_keeps_who_comes_back_first() -> None:
    needs = [np.array([slot]) for slot in (0, 1, 2, 0, 1, 2, 0)]
    assert belady_hits(needs, 2) == 3
    assert belady_hits(needs, 3) == 4


def test_a_timeline_hides_what_was_fetched_in_time() -> None:
    """Loads of half a layer's time: on demand they stall, a layer ahead they do not."""
    late, early = Timeline(0.5), Timeline(0.5)
    for layer in range(4):
        late.compute(layer, [layer], [Load(layer, layer, 0)])
    early.compute(0, [0], [Load(0, 0, 0)])
    for layer in range(1, 4):
        early.guess([Load(layer, layer, 0)], during_layer=True)
        early.compute(layer, [layer], [])
    assert late.stall == pytest.approx(4 * 0.5)
    assert early.stall == pytest.approx(0.5), "the first layer's"
