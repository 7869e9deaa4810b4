"""Experts in tiers on one rank: every bit as with all of them in memory, whatever arrives when."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from sgl_esft.errors import InvariantError
from sgl_esft.offload import tier as tier_module
from sgl_esft.offload.policies import POLICIES
from sgl_esft.offload.predictors.finemoe import FineMoEPredictor
from sgl_esft.offload.predictors.map_store import MapStore
from sgl_esft.offload.predictors.moments import RouterMoments
from sgl_esft.offload.predictors.next_gate import NextGatePredictor
from sgl_esft.offload.predictors.regression import RegressionPredictor
from sgl_esft.offload.routing import StepTokens
from sgl_esft.offload.rows import NOT_HERE
from sgl_esft.platform.moe import FAILED, moe_forward
from tests.fast.offload.tiers import Rank, open_rank, totals

pytestmark = pytest.mark.usefixtures("one_thread")

TOP_K = 2


@pytest.fixture(scope="module")
def base(root: Path) -> Path:
    return root / "base"


def _step(rank: Rank, num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    dtype = rank.w13[0].dtype
    hidden = torch.randn((num_tokens, rank.spec.hidden_size), generator=random).to(dtype)
    ids = torch.stack(
        [torch.randperm(rank.spec.num_experts, generator=random)[:TOP_K] for _ in range(num_tokens)]
    )
    if num_tokens > 2:
        ids[1, 1] = -1  # another rank's
    return hidden, ids.to(torch.int32)


@pytest.mark.parametrize("num_rows", [2, 3, 5, 8])
@pytest.mark.parametrize("policy", ["stream", "static", "lru", "lfu"])
def test_every_bit_is_as_with_all_experts_in_memory(base: Path, policy: str, num_rows: int) -> None:
    with open_rank(base, num_rows, policy, loads_per_layer=2.0) as rank:
        for step in range(12):
            rank.tier.begin(None)
            for layer in range(len(rank.w13)):
                hidden, ids = _step(rank, (1, 4, 40)[step % 3], 100 * step + layer)
                found = rank.tiered(layer, hidden, ids)
                assert torch.equal(found, rank.whole(layer, hidden, ids))
                rank.tier.decisions.check_integrity()
        counts = totals(rank)
        assert counts["num_loads"] > 0
        if num_rows == 8:
            assert counts["num_loads"] + counts["num_prefetches"] <= 8 * len(rank.w13)


def test_a_prompt_loads_each_expert_at_most_once_a_layer(base: Path) -> None:
    with open_rank(base, 3) as rank:
        hidden, ids = _step(rank, 64, 5)
        rank.tier.begin(None)
        rank.tiered(0, hidden, ids)
        assert rank.reader.counts.num_experts == len(ids[ids >= 0].unique())


def test_what_is_here_is_computed_while_others_are_read(base: Path) -> None:
    """The layer does not wait for the slowest before it begins."""
    reading, computed = threading.Event(), threading.Event()

    def slow(fd: int, buffers: list[memoryview], offset: int) -> int:
        if reading.is_set():
            assert computed.wait(10), "nothing was computed meanwhile"
        return os.preadv(fd, buffers, offset)

    with open_rank(base, 4, os_preadv=slow) as rank:
        rank.tier.begin(None)
        list(rank.tier.arrivals(0, [0, 1]))
        reading.set()
        order = []
        for slot, row in rank.tier.arrivals(0, [0, 1, 6]):
            assert row != FAILED
            order.append(slot)
            if len(order) == 2:
                computed.set()
        assert order == [0, 1, 6]


def _failing(fail: threading.Event, number: int) -> object:
    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fail.is_set():
            raise OSError(number, os.strerror(number))
        return os.preadv(fd, buffers, offset)

    return preadv


def test_a_read_that_fails_is_no_answer_and_the_next_one_is_right(base: Path) -> None:
    fail = threading.Event()
    with open_rank(base, 4, os_preadv=_failing(fail, errno.EIO)) as rank:  # type: ignore[arg-type]
        hidden, ids = _step(rank, 4, 1)
        rank.tier.begin(None)
        here = int(ids[0, 0])
        list(rank.tier.arrivals(0, [here]))
        fail.set()
        found = rank.tiered(0, hidden, ids)
        lost = ((ids >= 0) & (ids != here)).any(dim=1)
        assert found[lost].isnan().all()
        assert not found[~lost].isnan().any()
        assert rank.tier.failure is not None
        assert "ExpertReadError" in rank.tier.failure
        assert "Input/output error" in rank.tier.failure
        fail.clear()
        rank.tier.begin(None)
        assert rank.tier.failure is None
        assert torch.equal(rank.tiered(0, hidden, ids), rank.whole(0, hidden, ids))


def test_a_failed_wave_fails_alone(base: Path) -> None:
    """Those that follow in the row of one that failed are loaded."""
    broken: list[int] = []

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset in broken:
            raise OSError(errno.EIO, "broken")
        return os.preadv(fd, buffers, offset)

    with open_rank(base, 2, os_preadv=preadv) as rank:
        place = rank.source.place(None, rank.tier.layers[0].layer_id, 3)
        broken.append(place.gate.start - place.gate.start % 4096)
        rank.tier.begin(None)
        rows = dict(rank.tier.arrivals(0, list(range(8))))
        failed = {slot for slot, row in rows.items() if row == FAILED}
        assert 3 in failed
        assert len(failed) < 8
        assert all(rank.tier.decisions.where(0)[slot] == NOT_HERE for slot in failed)


def test_a_step_that_is_left_leaves_no_expert_that_is_not_there(base: Path) -> None:
    """An exception while experts are computed must not make later steps read unwritten rows."""
    with open_rank(base, 2) as rank:
        rank.tier.begin(None)
        arrivals = rank.tier.arrivals(0, [0, 1, 2, 3])
        next(arrivals)
        arrivals.close()  # type: ignore[attr-defined]
        hidden, ids = _step(rank, 16, 3)
        rank.tier.begin(None)
        assert torch.equal(rank.tiered(0, hidden, ids), rank.whole(0, hidden, ids))


def test_removed_slots_are_read_anew(base: Path) -> None:
    with open_rank(base, 4) as rank:
        rank.tier.begin(None)
        first = rank.spec.moe_layer_ids[0]
        extra = rank.spec.num_experts  # an adapter's slot
        rank.tier.add(0, {extra: rank.source.place(None, first, 2)})
        [(_, row)] = rank.tier.arrivals(0, [extra])
        assert torch.equal(rank.tier.layers[0].w13[row], rank.w13[0][2])
        rank.tier.remove(0, [extra])
        with pytest.raises(InvariantError, match="has no expert"):
            list(rank.tier.arrivals(0, [extra]))
        rank.tier.add(0, {extra: rank.source.place(None, first, 5)})
        [(_, row)] = rank.tier.arrivals(0, [extra])
        assert torch.equal(rank.tier.layers[0].w13[row], rank.w13[0][5])


def _finemoe(rank_layers: int, num_experts: int) -> FineMoEPredictor:
    store = MapStore(rank_layers, num_experts, 4, 1, 1 << 20)
    return FineMoEPredictor(store, TOP_K, 1)


def _decode(rank: Rank, token: int) -> None:
    """One token whose experts are `token`'s in every layer."""
    num_experts = rank.spec.num_experts
    embedding = np.eye(4, dtype=np.float32)[[token]]
    rank.tier.begin(StepTokens((token,), (-1,)))
    rank.tier.embedded(embedding)
    for layer in range(len(rank.w13)):
        mine = [(3 * token + layer + k) % num_experts for k in range(TOP_K)]
        probs = np.zeros((1, num_experts), np.float32)
        probs[0, mine] = 1 / TOP_K
        for _slot, row in rank.tier.arrivals(layer, sorted(mine), probs):
            assert row != FAILED


def test_what_was_seen_before_is_fetched_ahead(base: Path) -> None:
    layers = 3
    predictor = _finemoe(layers, 8)
    with open_rank(base, 4, "finemoe", predictor=predictor, loads_per_layer=8.0) as rank:
        assert len(rank.w13) == layers
        for token in (0, 1, 2):
            _decode(rank, token)
        before = totals(rank)
        for _ in range(3):
            for token in (0, 1, 2):
                _decode(rank, token)
        after = totals(rank)
        assert after["num_prefetches"] > before["num_prefetches"]
        assert after["num_useful"] > before["num_useful"]
        assert after["num_loads"] == before["num_loads"], "all that is repeated was foreseen"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What the thread beside the pass was woken for; it is done at once."""
    found: list[Callable[[], None]] = []

    def start(_self: object, work: Callable[[], None]) -> None:
        found.append(work)
        work()

    monkeypatch.setattr(tier_module._Beside, "start", start)
    return found


def test_no_thread_is_woken_for_a_pass_that_is_not_predicted(
    base: Path, started: list[Callable[[], None]]
) -> None:
    with open_rank(base, 4, "finemoe", predictor=_finemoe(3, 8), loads_per_layer=8.0) as rank:
        rank.tier.begin(None)
        rank.tiered(0, *_step(rank, 40, 1))
        assert not started
        _decode(rank, 0)
        assert len(started) == 1 + len(rank.w13), "embeddings, then each layer"


def test_a_quick_predictor_wakes_one_only_where_it_may_learn(
    base: Path, started: list[Callable[[], None]]
) -> None:
    quick = RegressionPredictor(RouterMoments(3, 8, 1 << 20), TOP_K)
    with open_rank(base, 4, "regression", predictor=quick, loads_per_layer=8.0) as rank:
        rank.tier.begin(StepTokens((0,), (-1,)))
        assert not rank.tier.wants_embeddings
        rank.tier.embedded(None)
        for layer in range(len(rank.w13)):
            list(rank.tier.arrivals(layer, [0, 1], np.full((1, 8), 1 / 8, np.float32)))
            assert len(started) == (layer == len(rank.w13) - 1)
        assert quick.moments.num_added == 1, "it was shown every layer"
    with open_rank(base, 4, "finemoe", predictor=_finemoe(3, 8)) as rank:
        rank.tier.begin(StepTokens((0,), (-1,)))
        assert rank.tier.wants_embeddings


def test_guesses_change_no_bit(base: Path) -> None:
    predictor = _finemoe(3, 8)
    with open_rank(base, 3, "finemoe", predictor=predictor, loads_per_layer=1.0) as rank:
        for step in range(30):
            rank.tier.begin(StepTokens((step % 4,), (-1,)))
            rank.tier.embedded(np.eye(4, dtype=np.float32)[[step % 4]])
            for layer in range(3):
                hidden, ids = _step(rank, 1, step % 4 + layer)
                probs = np.full((1, 8), 0.01, np.float32)
                probs[0, ids[0].tolist()] = 0.4
                rows = rank.tier.layers[layer]
                found = moe_forward(
                    hidden,
                    rows.w13,
                    rows.w2,
                    torch.ones((1, TOP_K)),
                    ids,
                    lambda slots, layer=layer, probs=probs: rank.tier.arrivals(layer, slots, probs),
                )
                whole = moe_forward(
                    hidden, rank.w13[layer], rank.w2[layer], torch.ones((1, TOP_K)), ids
                )
                assert torch.equal(found, whole)
                rank.tier.decisions.check_integrity()


def test_every_policy_of_the_table_has_words() -> None:
    assert all(policy.what and policy.name == name for name, policy in POLICIES.items())


def test_the_order_of_arrival_changes_no_bit() -> None:
    random = torch.Generator().manual_seed(3)
    w13, w2 = torch.randn((6, 8, 5), generator=random), torch.randn((6, 5, 4), generator=random)
    hidden = torch.randn((7, 5), generator=random)
    ids = torch.randint(-1, 6, (7, 3), generator=random, dtype=torch.int32)
    weights = torch.rand((7, 3), generator=random)

    def backwards(slots: list[int]) -> Iterator[tuple[int, int]]:
        return iter([(slot, slot) for slot in reversed(slots)])

    first = moe_forward(hidden, w13, w2, weights, ids)
    assert torch.equal(moe_forward(hidden, w13, w2, weights, ids, backwards), first)  # type: ignore[arg-type]


def test_the_next_layers_gate_is_asked_by_hidden_states(base: Path) -> None:
    """Gates that choose by the hidden state's largest number: what comes is known a layer ahead."""
    width = 16
    gates = [np.roll(np.eye(8, width, dtype=np.float32), layer, axis=0) for layer in range(3)]
    predictor = NextGatePredictor(gates, 1)
    with open_rank(base, 2, "next-gate", predictor=predictor, loads_per_layer=4.0) as rank:
        for token in range(8):
            hidden = np.zeros((1, width), np.float32)
            hidden[0, token] = 9.0
            rank.tier.begin(StepTokens((token,), (-1,)))
            rank.tier.embedded(np.zeros((1, 4), np.float32))
            assert rank.tier.wants_hidden
            for layer in range(3):
                expert = (token + layer) % 8
                probs = np.zeros((1, 8), np.float32)
                probs[0, expert] = 1.0
                [(slot, row)] = rank.tier.arrivals(layer, [expert], probs, hidden)
                assert (slot, row != FAILED) == (expert, True)
        counts = totals(rank)
        assert counts["num_useful"] >= 12
        assert counts["num_loads"] <= 10
