"""More live adapters than slots: everybody gets one, and nobody waits for requests without end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_esft.plugin.adapter_batching import AdapterId, may_join
from sgl_esft.plugin.schedule_hooks import Composer, hold_back_for_the_oldest
from sgl_esft.weave.slot_table import SlotTable

NUM_SLOTS, MAX_OVERTAKES, MAX_STEPS = 3, 4, 5


@dataclass
class Req:
    """SGLang's request, as far as the order looks at it; it runs for `num_left` steps."""

    rid: str
    lora_id: AdapterId
    num_left: int
    came_at: int = 0
    retraction_count: int = 0

    def finished(self) -> bool:
        return self.num_left == 0


class Server:
    """One scheduler with slots; each client sends its next request when the last has ended."""

    def __init__(self, clients: Iterable[AdapterId], num_running: int, *, holds_back: bool) -> None:
        self._max_running = num_running
        self._composer = Composer(MAX_OVERTAKES, None)
        self._table = SlotTable(NUM_SLOTS)
        self._holds_back = holds_back
        self._queue: list[Req] = []
        self._running: list[Req] = []
        self._num_sent = 0
        self.num_misses = 0
        self.waits: list[tuple[AdapterId, int]] = []  # steps until a request began
        self.now = 0
        for adapter_id in clients:
            self._send(adapter_id)

    def _send(self, adapter_id: AdapterId) -> None:
        self._num_sent += 1
        num_steps = 1 + self._num_sent * 3 % MAX_STEPS  # so that they do not end together
        self._queue.append(Req(str(self._num_sent), adapter_id, num_steps, self.now))

    def step(self) -> None:
        """Admit as SGLang does, run one step, let those that have ended ask again."""
        self._composer.reorder(self._queue, self._running)
        for req in list(self._queue):
            running = {r.lora_id for r in self._running}
            if len(self._running) < self._max_running and self._may_schedule(req, running):
                self._queue.remove(req)
                self._running.append(req)
                self.waits.append((req.lora_id, self.now - req.came_at))
        self.num_misses += len(self._table.admit(_adapters(r.lora_id for r in self._running)))
        self.now += 1
        for req in self._running:
            req.num_left -= 1
        ended = [req for req in self._running if req.finished()]
        self._running = [req for req in self._running if not req.finished()]
        for req in ended:
            self._send(req.lora_id)

    def _may_schedule(self, req: Req, running: Collection[AdapterId]) -> bool:
        if not self._fits({req.lora_id, *running}):
            return False
        oldest = self._composer.next_adapter
        return not self._holds_back or may_join(req.lora_id, running, oldest, self._fits)

    def _fits(self, adapter_ids: Collection[AdapterId]) -> bool:
        return self._table.can_admit(_adapters(adapter_ids))

    @property
    def longest_wait(self) -> int:
        waiting = [self.now - req.came_at for req in self._queue]
        return max([*waiting, *(wait for _, wait in self.waits)])


def _adapters(adapter_ids: Iterable[AdapterId]) -> set[str]:
    return {adapter_id for adapter_id in adapter_ids if adapter_id is not None}


def serve(clients: Sequence[AdapterId], *, num_running: int = 6, holds_back: bool = True) -> Server:
    server = Server(clients, num_running, holds_back=holds_back)
    for _ in range(500):
        server.step()
    return server


@pytest.mark.parametrize("num_clients", [1, 2, 5])
def test_eight_adapters_take_turns_on_three_slots(num_clients: int) -> None:
    clients = [f"a{i % 8}" for i in range(8 * num_clients)]
    server = serve(clients)
    started = Counter(adapter_id for adapter_id, _ in server.waits)
    assert set(started) == set(clients)
    assert max(started.values()) <= 2 * min(started.values())
    # Ahead of a request are at most all others and B later ones. The one in front waits for what
    # runs to end, and one step more for its turn.
    assert server.longest_wait <= (len(clients) + MAX_OVERTAKES) * (MAX_STEPS + 1)


@pytest.mark.parametrize("num_running", [6, 32])
def test_a_fourth_adapter_is_served_beside_three_that_never_rest(num_running: int) -> None:
    clients = ["a", "b", "c"] * 4 + ["d"]
    server = serve(clients, num_running=num_running)
    assert Counter(adapter_id for adapter_id, _ in server.waits)["d"] > 40
    assert server.longest_wait <= (len(clients) + MAX_OVERTAKES) * (MAX_STEPS + 1)


def test_without_holding_back_it_would_hardly_ever_be_served() -> None:
    clients = ["a", "b", "c"] * 4 + ["d"]
    server = serve(clients, num_running=32, holds_back=False)
    assert Counter(adapter_id for adapter_id, _ in server.waits)["d"] <= 3


def test_the_base_is_not_held_back() -> None:
    clients = ["a", "b", "c"] * 4 + ["d", None]
    held, free = (serve(clients, holds_back=h) for h in (True, False))
    assert len(of_base(held)) >= 0.8 * len(of_base(free))
    assert max(of_base(held)) <= 2 * max(of_base(free))


def of_base(server: Server) -> list[int]:
    """Its requests' waits, in steps."""
    return [wait for adapter_id, wait in server.waits if adapter_id is None]


def test_without_more_adapters_than_slots_nothing_is_held_back() -> None:
    clients = ["a", "b", "c", None] * 3
    assert serve(clients).waits == serve(clients, holds_back=False).waits


def test_running_adapters_keep_their_slots_while_they_may() -> None:
    """Twice as many adapters as slots: no new adapter at every step."""
    server = serve([f"a{i % 6}" for i in range(24)])
    assert server.num_misses < len(server.waits) / 2


@pytest.mark.parametrize(
    ("adapter_id", "running", "oldest", "expected"),
    [
        ("a", {"a", "b", "c"}, None, True),
        ("a", {"a", "b", "c"}, "d", False),
        (None, {"a", "b", "c"}, "d", True),
        ("d", {"a", "b"}, "d", True),
        ("a", {"a", "b", None}, "d", True),
        ("c", {"a", "b"}, "d", False),
        ("a", {"a", "b", "d"}, "d", True),
    ],
)
def test_who_may_join(
    adapter_id: AdapterId, running: set[AdapterId], oldest: AdapterId, expected: bool
) -> None:
    def fits(adapter_ids: set[AdapterId]) -> bool:
        return len(adapter_ids - {None}) <= NUM_SLOTS

    assert may_join(adapter_id, running, oldest, fits) is expected


@pytest.mark.parametrize("next_adapter", [None, "d"])
@pytest.mark.parametrize("answer", [False, True])
def test_the_hook_asks_sglang_first(next_adapter: AdapterId, answer: bool) -> None:
    def fits(adapter_ids: set[AdapterId]) -> bool:
        return len(adapter_ids) <= NUM_SLOTS

    manager = SimpleNamespace(validate_lora_batch=fits)
    scheduler: Any = SimpleNamespace(
        policy=SimpleNamespace(esft_composer=SimpleNamespace(next_adapter=next_adapter)),
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(lora_manager=manager)),
    )
    req: Any = SimpleNamespace(lora_id="a")
    held = hold_back_for_the_oldest(lambda *_: answer, scheduler, req, {"a", "b", "c"})
    assert held is (answer and next_adapter is None)
