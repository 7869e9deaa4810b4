"""Requests that have not been answered in full: as they were sent, where, and what came back.

    router.py --admit, output, move--> [InFlight] --> LoadBook (rank_choice.py), SloWindow

A request whose instance goes away is sent again under the same id, and goes on from its tokens: the
tokenizer manager, the detokenizer and the client see one stream. Not safe to share between threads:
the router's lock guards it.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sgl_elastic.autoscale.slo import SloWindow
from sgl_elastic.front.rank_choice import LoadBook, RankPolicy, choose
from sgl_elastic.instance.handover import HandedOver
from sgl_elastic.instance.rank_messages import RequestState
from sgl_elastic.types import Placement


@dataclass
class _Request:
    message: Any  # as it was sent, without a rank
    rank: int
    num_seen: int = 0  # tokens that came back
    output_ids: array[int] = field(default_factory=lambda: array("q"))  # those tokens


class InFlight:
    """By request id. `window` hears of arrivals, first tokens and ends."""

    def __init__(self, policy: RankPolicy, window: SloWindow) -> None:
        self._policy = policy
        self._window = window
        self._requests: dict[str, _Request] = {}
        self._book = LoadBook(1)
        self.last_output_s = 0.0

    @property
    def num_running(self) -> int:
        """Requests that have not been answered in full."""
        return len(self._requests)

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests, prompts and answers."""
        return sum(load.num_tokens for load in self._book.snapshot())

    def begin(self, placement: Placement) -> None:
        """The first instance's ranks are these."""
        self._book = LoadBook(placement.dp_size, placement.kv_tokens)

    def admit(self, request: Any, num_ranks: int, now_s: float) -> int:
        """Choose a rank of `num_ranks`, or the one that the client wants; remember the request."""
        rank = request.routed_dp_rank
        num_tokens = len(request.input_ids or ())
        if rank is None or not 0 <= rank < num_ranks:
            loads, turn = self._book.snapshot(), self._book.num_added
            rank = choose(loads, request.lora_id, num_tokens, self._policy, turn=turn)
        self._requests[request.rid] = _Request(copy.copy(request), int(rank))
        self._book.add(request.rid, int(rank), request.lora_id, num_tokens)
        self._window.arrived(request.rid, now_s)
        return int(rank)

    def move(self, handed: HandedOver, placement: Placement, *, has_kv: bool) -> None:
        """Each goes on at the rank that took it over. Without KV, any rank may go on with any.

        Raises PlanError when a rank is left out that has requests; nothing has changed then.
        """
        moves = dict(handed.rank_of_old)
        if not has_kv:
            known = range(len(self._book.snapshot()))
            moves = {old: moves.get(old, old % placement.dp_size) for old in known}
        self._book.rebase(moves, placement.dp_size, placement.kv_tokens)
        for rid, request in self._requests.items():
            request.rank = handed.ranks.get(rid, moves[request.rank])
        self._window.forget_finished()

    def to_send(self) -> Iterator[tuple[str, Any, int]]:
        """(id, message, rank) of each, in the order of their arrival."""
        for rid, request in list(self._requests.items()):
            yield rid, request.message, request.rank

    def find(self, rid: str) -> tuple[Any, int, int]:
        """(message, rank, tokens that came back) of a request that has not been answered."""
        request = self._requests[rid]
        return request.message, request.rank, request.num_seen

    def drop(self, rid: str) -> None:
        """It has ended without an answer; nothing when it had ended before."""
        if self._requests.pop(rid, None) is not None:
            self._book.finish(rid)
            self._window.dropped(rid)

    def output(
        self, rid: str, new_ids: Sequence[int], num_tokens: int, now_s: float, *, is_finished: bool
    ) -> None:
        """Tokens of a request have come back: the new ones, and how many there are so far."""
        request = self._requests.get(rid)
        if request is None:
            return
        if len(new_ids) > 0:
            self.last_output_s = now_s
            request.output_ids.extend(new_ids)
        if request.num_seen == 0 and num_tokens > 0:
            self._window.first_token(rid, now_s)
        request.num_seen = max(request.num_seen, num_tokens)
        if is_finished:
            del self._requests[rid]
            self._book.finish(rid)
            self._window.finished(rid, now_s, num_tokens)

    def states(self) -> list[tuple[int, RequestState]]:
        """(rank, state) of each request that has tokens."""
        return [
            (
                request.rank,
                RequestState(rid, request.output_ids.tobytes(), request.num_seen, {}, {}),
            )
            for rid, request in self._requests.items()
            if request.num_seen
        ]

    def late(self, num_sent: Mapping[str, int]) -> list[str]:
        """Requests of which fewer tokens have come back than a rank has sent."""
        return [
            rid
            for rid, count in num_sent.items()
            if rid in self._requests and self._requests[rid].num_seen < count
        ]
