"""The prefix cache never serves one model's KV to another, nor an old version's to a new one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.adapter_factory import write_random_adapter
from tests.support.one_rank import LOADED, OneRank
from tests.support.references import NUM_NEW_TOKENS, Tokens

pytestmark = pytest.mark.server

PROMPT = "the quick brown fox jumps over the lazy dog, and then it does so again, slowly."


def ask(one_rank: OneRank, adapter: str | None) -> tuple[Tokens, int]:
    """(tokens, prompt tokens taken from the prefix cache)."""
    answer = one_rank.server.generate([PROMPT], [adapter], NUM_NEW_TOKENS)[0]
    return tuple(answer["output_ids"]), answer["meta_info"]["cached_tokens"]


def test_each_model_has_its_own_prefix(one_rank: OneRank) -> None:
    one_rank.server.post("/flush_cache", {})
    first = {adapter: ask(one_rank, adapter) for adapter in (None, *LOADED)}
    again = {adapter: ask(one_rank, adapter) for adapter in (None, *LOADED)}
    assert [cached for _, cached in first.values()] == [0, 0, 0, 0]
    assert all(cached > len(PROMPT) // 2 for _, cached in again.values())
    assert {a: tokens for a, (tokens, _) in first.items()} == {
        a: tokens for a, (tokens, _) in again.items()
    }
    assert len({tokens for tokens, _ in first.values()}) == len(first)


def test_other_weights_under_an_old_name(one_rank: OneRank, tmp_path: Path) -> None:
    """Unload, change the very same folder, load under the same name: nothing old is found."""
    server, folder = one_rank.server, one_rank.root / "changing"
    write_random_adapter(folder, one_rank.family.base, seed=501)
    assert server.load("changing", folder).status_code == 200
    old, _ = ask(one_rank, "changing")
    _, cached = ask(one_rank, "changing")
    assert cached > 0
    assert server.unload("changing").status_code == 200
    shutil.rmtree(folder)
    write_random_adapter(folder, one_rank.family.base, seed=502)
    assert server.load("changing", folder).status_code == 200
    new, cached = ask(one_rank, "changing")
    assert cached == 0
    assert new != old
    assert server.unload("changing").status_code == 200
    one_rank.check_answers()


def test_same_weights_under_two_names_answer_alike(one_rank: OneRank) -> None:
    server = one_rank.server
    copy = shutil.copytree(one_rank.family.adapters["a0"], one_rank.root / "copy-of-a0")
    assert server.load("copy", copy).status_code == 200
    assert one_rank.ask(3, "copy") == one_rank.expected["a0"][3]
    assert server.unload("copy").status_code == 200
