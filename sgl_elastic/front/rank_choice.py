"""Which DP rank a request goes to, so that requests of one adapter meet on few ranks.

    front: request --> [choose] --> rank (SGLang's routed_dp_rank)
                          ^
    front: added, finished --> [LoadBook] --snapshot--> RankLoad of each rank

A rank's step reads each expert that any of its tokens selects, once; tokens of one more adapter
select tuned experts that nobody else there needs (docs/batching.md). With e tuned experts a layer,
each selected by a token with chance p, the first request of an adapter brings e * p experts more
than one whose adapter is there already, and where n requests of it run, the next one brings
e * p * (1 - p)^n. So the cost of a rank is its load and `adapter_cost * (1 - p)^n`, in requests.

Where the constants come from: in ExpertWeave's four published adapters e is 5.4 in the mean and p
about 0.3 (0.22 to 0.44). By ExpertWeave's formula of experts touched, a request of a new adapter
adds 1.8 to 6.6 times what one of a running adapter adds, for 4 to 16 adapters among 16 to 64
requests: most where few adapters have many requests each, which is what gathering leads to. So a
new adapter weighs like 6 requests.

What this saves depends on the experts' layout. Where a rank computes the experts for its own
tokens only, its steps read fewer of them. With expert parallelism over the DP ranks all ranks'
tokens meet in every MoE layer, and the adapters of all ranks together count: gathering saves no
expert there by itself. What it saves in both: an adapter's shared prompts are in one rank's prefix
cache and not in all, and a queue that fewer adapters share is easier to batch by adapter.

Deterministic; no clock. Not thread-safe: all calls come from the front's event loop.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from sgl_elastic.autoscale.slo import check_above_zero
from sgl_elastic.errors import ElasticConfigError, ElasticInternalError, PlanError

AdapterId = str | None  # None = the base


class RankStrategy(StrEnum):
    """How a rank is chosen."""

    ADAPTER = "adapter"  # the cheapest by load and adapter
    LEAST_LOADED = "least_loaded"  # baseline
    ROUND_ROBIN = "round_robin"  # baseline; SGLang's own default


@dataclass(frozen=True)
class RankPolicy:
    """The numbers of `choose`. Raises ElasticConfigError for any that cannot work."""

    strategy: RankStrategy = RankStrategy.ADAPTER
    max_imbalance: int = 8  # requests of the chosen rank above the least loaded, at most
    adapter_cost: float = 6.0  # of an adapter's first request on a rank, in requests; 0 = none
    selection_chance: float = 0.3  # p, of a token to select one of its adapter's tuned experts
    tokens_per_request: int = 2048  # tokens in flight that weigh as much as one request more

    def __post_init__(self) -> None:
        for name in ("max_imbalance", "tokens_per_request"):
            check_above_zero(name, getattr(self, name))
        check_above_zero("selection_chance", self.selection_chance, most=1.0)
        if not 0 <= self.adapter_cost < math.inf:
            raise ElasticConfigError(
                f"adapter_cost is {self.adapter_cost!r}: give a finite number, 0 for no cost."
            )


@dataclass(frozen=True)
class RankLoad:
    """What the front knows of a rank: requests that it sent there and that have not finished."""

    num_requests: int = 0  # running and queued
    num_tokens: int = 0  # in flight: prompts, and what was answered so far
    adapters: Mapping[AdapterId, int] = field(default_factory=dict)  # requests of each, above 0
    capacity_tokens: int = 0  # KV tokens of the rank; 0 = unknown, counts as enough

    @property
    def num_adapters(self) -> int:
        """Distinct adapters, without the base."""
        return len(self.adapters) - (None in self.adapters)


def choose(
    loads: Sequence[RankLoad],
    adapter_id: AdapterId,
    num_tokens: int,
    policy: RankPolicy,
    *,
    turn: int = 0,
) -> int:
    """The rank for a request; a function of its arguments alone.

    loads: of every rank, at least one. num_tokens: its prompt's. turn: requests sent before it, for
    round robin.

    Never a rank that would then have more than `max_imbalance` requests above the least loaded.
    Among those, ranks whose KV has room for `num_tokens` go first. Ties: fewer requests, then the
    lower rank. Round robin keeps no bound.
    """
    if policy.strategy is RankStrategy.ROUND_ROBIN:
        return turn % len(loads)
    ranks = _with_room(loads, _within_bound(loads, policy.max_imbalance), num_tokens)
    return min(
        ranks,
        key=lambda rank: (_cost(loads[rank], adapter_id, policy), loads[rank].num_requests, rank),
    )


def _within_bound(loads: Sequence[RankLoad], max_imbalance: int) -> list[int]:
    """Ranks that may take one more; the least loaded is always among them."""
    least = min(load.num_requests for load in loads)
    return [r for r, load in enumerate(loads) if load.num_requests < least + max_imbalance]


def _with_room(loads: Sequence[RankLoad], ranks: list[int], num_tokens: int) -> list[int]:
    """Those of `ranks` with KV for so many tokens; all of them where none has."""
    found = [
        rank
        for rank in ranks
        if not loads[rank].capacity_tokens
        or loads[rank].num_tokens + num_tokens <= loads[rank].capacity_tokens
    ]
    return found or ranks


def _cost(load: RankLoad, adapter_id: AdapterId, policy: RankPolicy) -> float:
    """In requests. The base costs its load alone: adapters' tokens select its experts too."""
    cost = load.num_requests + load.num_tokens / policy.tokens_per_request
    if adapter_id is None or policy.strategy is not RankStrategy.ADAPTER:
        return cost
    missed = (1 - policy.selection_chance) ** load.adapters.get(adapter_id, 0)
    return cost + policy.adapter_cost * missed


class LoadBook:
    """What the front knows of every rank, kept as requests come and go.

    O(distinct adapters of a rank) a call.
    """

    def __init__(self, num_ranks: int, capacity_tokens: Sequence[int] = ()) -> None:
        """capacity_tokens: KV tokens of each rank; () = unknown."""
        self._requests: dict[Hashable, _Request] = {}
        self._loads = _empty(num_ranks, capacity_tokens)
        self.num_added = 0  # since the book was opened; the turn of round robin

    def snapshot(self) -> tuple[RankLoad, ...]:
        """Every rank's load as of now, by rank."""
        return tuple(self._loads)

    def add(self, rid: Hashable, rank: int, adapter_id: AdapterId, num_tokens: int) -> None:
        """A request was sent to a rank. One that is in the book already is moved there.

        Raises ElasticInternalError for a rank that there is not.
        """
        if not 0 <= rank < len(self._loads):
            raise ElasticInternalError(
                f"request {rid!r} was sent to rank {rank}, and there are {len(self._loads)} ranks; "
                "rebase the book when the placement changes."
            )
        self.finish(rid)
        self._requests[rid] = request = _Request(rank, adapter_id, num_tokens)
        self._count(request, 1)
        self.num_added += 1

    def finish(self, rid: Hashable) -> bool:
        """It ended, however; False for one that is not in the book, which changes nothing."""
        request = self._requests.pop(rid, None)
        if request is None:
            return False
        self._count(request, -1)
        return True

    def rebase(
        self, moves: Mapping[int, int], num_ranks: int, capacity_tokens: Sequence[int] = ()
    ) -> None:
        """After a switch: what was on rank r is on rank `moves[r]` of `num_ranks`.

        Raises PlanError, with nothing changed, where a rank with requests has nowhere to go, or
        goes to a rank that there is not.
        """
        missing = [r for r, load in enumerate(self._loads) if load.num_requests and r not in moves]
        beyond = [rank for rank in moves.values() if not 0 <= rank < num_ranks]
        if missing or beyond:
            raise PlanError(
                f"moving ranks by {dict(moves)} to {num_ranks} ranks: ranks {missing} have "
                f"requests and go nowhere, ranks {beyond} do not exist. Map every old rank."
            )
        self._loads = _empty(num_ranks, capacity_tokens)
        for rid, request in self._requests.items():
            self._requests[rid] = moved = replace(request, rank=moves[request.rank])
            self._count(moved, 1)

    def _count(self, request: _Request, sign: int) -> None:
        load = self._loads[request.rank]
        adapters = dict(load.adapters)
        adapters[request.adapter_id] = adapters.get(request.adapter_id, 0) + sign
        if not adapters[request.adapter_id]:
            del adapters[request.adapter_id]
        self._loads[request.rank] = replace(
            load,
            num_requests=load.num_requests + sign,
            num_tokens=load.num_tokens + sign * request.num_tokens,
            adapters=adapters,
        )


@dataclass(frozen=True)
class _Request:
    rank: int
    adapter_id: AdapterId
    num_tokens: int


def _empty(num_ranks: int, capacity_tokens: Sequence[int]) -> list[RankLoad]:
    if capacity_tokens and len(capacity_tokens) != num_ranks:
        raise ElasticInternalError(
            f"KV capacities of {len(capacity_tokens)} ranks were given for {num_ranks} ranks."
        )
    return [RankLoad(capacity_tokens=n) for n in capacity_tokens or [0] * num_ranks]
