"""More adapters than slots: requests queue and adapters are exchanged; nothing fails."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.one_rank import LOADED, OneRank
from tests.support.references import NUM_NEW_TOKENS

pytestmark = pytest.mark.server


def test_one_batch_for_more_adapters_than_slots(one_rank: OneRank) -> None:
    requests = [(adapter, i) for adapter in (None, *LOADED) for i in range(20)]
    random.Random(5).shuffle(requests)
    answers = one_rank.server.token_ids(
        [one_rank.prompts[i] for _, i in requests],
        [adapter for adapter, _ in requests],
        NUM_NEW_TOKENS,
    )
    assert answers == [one_rank.expected[adapter][i] for adapter, i in requests]


def test_concurrent_clients(one_rank: OneRank) -> None:
    """Independent clients, each with an adapter, while adapters come and go."""
    jobs = [(adapter, i) for i in range(12) for adapter in (None, *LOADED)]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda job: one_rank.ask(job[1], job[0]), jobs))
    assert answers == [one_rank.expected[adapter][i] for adapter, i in jobs]


def test_load_and_unload_while_others_decode(one_rank: OneRank) -> None:
    server = one_rank.server
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(
            server.generate, [one_rank.prompts[0]] * 8, ["a0", "a1", "a2", None] * 2, 200
        )
        for _ in range(3):
            assert server.load("a3", one_rank.family.adapters["a3"]).status_code == 200
            assert one_rank.ask(1, "a3") == one_rank.expected["a3"][1]
            assert server.unload("a3").status_code == 200
        answers = running.result()
    for adapter, answer in zip(["a0", "a1", "a2", None] * 2, answers, strict=True):
        start = tuple(answer["output_ids"][:NUM_NEW_TOKENS])
        assert start == one_rank.expected[adapter][0]


def test_pinned_adapter_keeps_its_slot_and_the_rest_share(one_rank: OneRank) -> None:
    server = one_rank.server
    assert server.load("a3", one_rank.family.adapters["a3"], pinned=True).status_code == 200
    for adapter in ("a3", *LOADED, "a3"):
        assert one_rank.ask(2, adapter) == one_rank.expected[adapter][2]
    assert server.unload("a3").status_code == 200
    one_rank.check_answers()


def test_sglangs_limit_on_loaded_adapters(one_rank: OneRank) -> None:
    """Loading one more than --max-loaded-loras unloads the oldest, which returns when asked for."""
    server = one_rank.server
    for adapter in LOADED:
        one_rank.ask(0, adapter)
    for name in ("a3", "fifth"):
        assert server.load(name, one_rank.family.adapters["a3"]).status_code == 200
    assert server.adapter_names() == ["a1", "a2", "a3", "fifth"]
    assert one_rank.ask(4, "fifth") == one_rank.expected["a3"][4]
    assert one_rank.ask(4, "a0") == one_rank.expected["a0"][4]
    assert "a0" in server.adapter_names()
    for name in ("a3", "fifth"):
        server.unload(name)
    one_rank.check_answers()
    assert server.adapter_names() == list(LOADED)
