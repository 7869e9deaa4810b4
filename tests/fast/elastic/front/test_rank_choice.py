"""Which rank a request goes to: the cost and its bound, the book, and random workloads."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_elastic.errors import ElasticConfigError, ElasticInternalError, PlanError
from sgl_elastic.front.rank_choice import (
    AdapterId,
    LoadBook,
    RankLoad,
    RankPolicy,
    RankStrategy,
    choose,
)

POLICY = RankPolicy()
LEAST_LOADED = RankPolicy(RankStrategy.LEAST_LOADED)
ROUND_ROBIN = RankPolicy(RankStrategy.ROUND_ROBIN)


def rank(
    adapters: Mapping[AdapterId, int] | None = None, num_tokens: int = 0, kv: int = 0
) -> RankLoad:
    adapters = adapters or {}
    return RankLoad(sum(adapters.values()), num_tokens, adapters, kv)


A, B, NONE = rank({"a": 2}), rank({"b": 2}), rank()
BUSY = [rank({"a": 3}), B, rank({"c": 2, None: 1})]
FULL, ROOMY = rank({"a": 1}, 900, kv=1000), rank({"b": 3}, 900, kv=9000)
LONG = [rank({"a": 1}, num_tokens=8192), rank({"b": 1}, num_tokens=100)]
DRAWN = [rank({"a": 1, "b": 3}), rank({"a": 3, "b": 1})]
TIED = [B, rank({"b": 1}, num_tokens=2048)]
FREE = replace(POLICY, adapter_cost=0.0)


@pytest.mark.parametrize(
    ("loads", "adapter", "num_tokens", "policy", "chosen"),
    [
        # An adapter goes where it runs, a new one and the base to the least loaded.
        ([A, B, rank({"c": 2})], "a", 10, POLICY, 0),
        ([A, B, rank({"c": 2})], "b", 10, POLICY, 1),
        ([A, B, rank({"c": 2})], "c", 10, POLICY, 2),
        (BUSY, "new", 10, POLICY, 1),
        (BUSY, None, 10, POLICY, 1),
        # It moves on when its rank costs more than a new one: load above the other's against
        # 6 requests less what is left to bring, 6 * (1 - 0.7^n).
        ([rank({"a": 5}), NONE], "a", 0, POLICY, 1),  # 5 > 4.99
        ([rank({"a": 4}), NONE], "a", 0, POLICY, 0),  # 4 < 4.56
        ([rank({"a": 1}), NONE], "a", 0, FREE, 1),
        # More requests of an adapter draw more.
        (DRAWN, "a", 0, POLICY, 1),
        (DRAWN, "b", 0, POLICY, 0),
        # Tokens in flight are load too.
        (LONG, None, 10, POLICY, 1),
        (LONG, None, 10, LEAST_LOADED, 1),
        # A rank without room is passed over while another has some.
        ([FULL, ROOMY], "a", 100, POLICY, 0),
        ([FULL, ROOMY], "a", 101, POLICY, 1),
        ([FULL, FULL], "a", 101, POLICY, 0),
        # Ties go to fewer requests, and then to the lower rank.
        ([NONE, NONE, NONE], "a", 0, POLICY, 0),
        (TIED, None, 0, POLICY, 1),
    ],
)
def test_choices(
    loads: list[RankLoad],
    adapter: AdapterId,
    num_tokens: int,
    policy: RankPolicy,
    chosen: int,
) -> None:
    assert choose(loads, adapter, num_tokens, policy) == chosen


def test_round_robin_takes_turns_whatever_the_load() -> None:
    loads = [rank({"a": 9}), rank(), rank()]
    assert [choose(loads, "a", 0, ROUND_ROBIN, turn=n) for n in range(4)] == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_imbalance", 0),
        ("adapter_cost", -1.0),
        ("adapter_cost", float("nan")),
        ("selection_chance", 0.0),
        ("selection_chance", 1.1),
        ("tokens_per_request", 0),
    ],
)
def test_a_policy_that_cannot_work_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ElasticConfigError, match=name):
        replace(POLICY, **{name: value})


adapters = st.sampled_from([None, "a", "b", "c", "d"])
rank_loads = st.builds(
    rank,
    st.dictionaries(adapters, st.integers(1, 30), max_size=4),
    st.integers(0, 20_000),
    st.sampled_from([0, 5_000, 30_000]),
)


@given(
    st.lists(rank_loads, min_size=1, max_size=6),
    adapters,
    st.integers(0, 9000),
    st.integers(1, 12),
    st.floats(0, 1000),
)
def test_no_choice_breaks_the_bound(
    loads: list[RankLoad],
    adapter: AdapterId,
    num_tokens: int,
    bound: int,
    cost: float,
) -> None:
    policy = RankPolicy(max_imbalance=bound, adapter_cost=cost)
    chosen = choose(loads, adapter, num_tokens, policy)
    assert loads[chosen].num_requests + 1 <= min(load.num_requests for load in loads) + bound
    assert chosen == choose(loads, adapter, num_tokens, policy)


def test_the_book_counts_what_comes_and_goes() -> None:
    book = LoadBook(2, (100, 200))
    book.add("x", 1, "a", 10)
    book.add("y", 1, "a", 20)
    book.add("z", 1, None, 30)
    before = book.snapshot()
    assert book.num_added == 3
    assert book.finish("x")
    assert book.finish("y")
    assert book.snapshot()[1] == rank({None: 1}, 30, 200)
    assert before == (rank(kv=100), rank({"a": 2, None: 1}, 60, 200)), "it does not change"
    assert before[1].num_adapters == 1


@pytest.mark.parametrize("number", [-1, 2])
def test_a_rank_that_there_is_not_is_a_defect(number: int) -> None:
    book = LoadBook(2)
    with pytest.raises(ElasticInternalError, match=f"rank {number}, and there are 2 ranks"):
        book.add("x", number, "a", 10)
    with pytest.raises(ElasticInternalError, match="capacities of 3 ranks"):
        LoadBook(2, (1, 2, 3))


def test_rebase_moves_requests() -> None:
    book = LoadBook(3)
    for rid, number, adapter in [("x", 0, "a"), ("y", 1, "a"), ("z", 2, "b")]:
        book.add(rid, number, adapter, 10)
    book.rebase({0: 1, 1: 1, 2: 0}, 2, (50, 60))
    assert book.snapshot() == (rank({"b": 1}, 10, 50), rank({"a": 2}, 20, 60))
    book.finish("y")
    assert book.snapshot()[1] == rank({"a": 1}, 10, 60)


@pytest.mark.parametrize("moves", [{0: 0}, {0: 0, 1: 2}, {}])
def test_rebase_refuses_moves_that_lose_requests_and_changes_nothing(moves: dict[int, int]) -> None:
    book = LoadBook(2)
    book.add("x", 0, "a", 10)
    book.add("y", 1, "a", 10)
    before = book.snapshot()
    with pytest.raises(PlanError, match="nowhere"):
        book.rebase(moves, 2)
    assert book.snapshot() == before


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("aft"), st.integers(0, 2), adapters)))
def test_the_book_is_the_sum_of_its_requests(
    events: list[tuple[int, str, int, AdapterId]],
) -> None:
    book, held = LoadBook(3), dict[int, tuple[int, AdapterId, int]]()
    for number, (rid, what, where, adapter) in enumerate(events):
        if what == "a":
            book.add(rid, where, adapter, number)
            held[rid] = (where, adapter, number)
        elif what == "f":
            assert book.finish(rid) == (held.pop(rid, None) is not None)
        elif what == "t":
            book.rebase({0: 1, 1: 2, 2: 0}, 3)
            held = {key: ((at + 1) % 3, who, n) for key, (at, who, n) in held.items()}
    for at, load in enumerate(book.snapshot()):
        here = [(who, n) for r, who, n in held.values() if r == at]
        assert load.adapters == Counter(who for who, _ in here)
        assert (load.num_requests, load.num_tokens) == (len(here), sum(n for _, n in here))


@dataclass(frozen=True)
class Seen:
    """Means over the arrivals after the warm-up; `worst` is a maximum."""

    adapters: float  # distinct, a rank
    max_over_mean: float  # requests of the fullest rank over the mean
    worst_choice: int  # requests of a chosen rank above the least loaded


def simulate(policy: RankPolicy, seed: int, num_ranks: int = 4, alpha: float = 0.0) -> Seen:
    """Poisson arrivals for 20 adapters and the base, exponential lifetimes, 100 requests at once.

    alpha: of the adapters' popularity, a power law; 0 = alike. The arrivals are the same for every
    policy.
    """
    rng, book, ends, now = random.Random(seed), LoadBook(num_ranks), list[tuple[float, int]](), 0.0
    names: list[AdapterId] = [None, *(f"adapter {n}" for n in range(20))]
    weights = [1 / 20, *((n + 1.0) ** -alpha / 20 for n in range(20))]
    seen: list[tuple[float, float, int]] = []
    for rid in range(2000):
        now += rng.expovariate(100.0)
        while ends and ends[0][0] <= now:
            book.finish(heapq.heappop(ends)[1])
        adapter = rng.choices(names, weights)[0]
        num_tokens = rng.randrange(50, 1000)
        heapq.heappush(ends, (now + rng.expovariate(1.0), rid))
        chosen = choose(book.snapshot(), adapter, num_tokens, policy, turn=book.num_added)
        book.add(rid, chosen, adapter, num_tokens)
        if rid >= 500:
            loads = book.snapshot()
            counts = [load.num_requests for load in loads]
            seen.append(
                (
                    mean(load.num_adapters for load in loads),
                    max(counts) / mean(counts),
                    counts[chosen] - min(counts[:chosen] + counts[chosen + 1 :]),
                )
            )
    adapters_, spread, above = zip(*seen, strict=True)
    return Seen(mean(adapters_), mean(spread), max(above))


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_fewer_distinct_adapters_than_the_baselines_at_bounded_load(
    seed: int, alpha: float
) -> None:
    ours, plain, least = (
        simulate(policy, seed, alpha=alpha) for policy in (POLICY, ROUND_ROBIN, LEAST_LOADED)
    )
    assert ours.adapters <= 0.65 * plain.adapters
    assert ours.adapters <= 0.65 * least.adapters
    assert ours.worst_choice <= POLICY.max_imbalance
    assert ours.max_over_mean <= 1.12
    assert ours.max_over_mean <= plain.max_over_mean


def test_a_dearer_adapter_gathers_more_and_a_lower_bound_less() -> None:
    def distinct(cost: float, bound: int) -> float:
        return simulate(RankPolicy(adapter_cost=cost, max_imbalance=bound), seed=1).adapters

    assert distinct(12, 16) < distinct(6, 16) < distinct(2, 16) < distinct(0, 16)
    assert distinct(12, 16) < distinct(12, 4) < distinct(12, 2)
