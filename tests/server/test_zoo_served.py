"""The demo zoo on its real prompts: the paper's table 3, and woven equal to merged."""

from __future__ import annotations

import random

import pytest

from sgl_esft import zoo
from sgl_esft.fields.described import MAX_PROMPTS
from sgl_esft.zoo.evaluate import score
from tests.support.families import MergedDemo
from tests.support.servers import DP2_EP2, TP2_EP2, Server, ServerPool, ServerSpec

pytestmark = pytest.mark.server

NUM_PROMPTS = 50
NUM_NEW_TOKENS = 24
LAYOUTS = {"tp2-ep2": TP2_EP2, "dp2-ep2": DP2_EP2, "one-rank": ()}  # the demo's own last: shared

Key = tuple[str | None, str, int]  # (adapter or None, task, example)
Texts = dict[Key, str]


def keys() -> list[Key]:
    """Every task's prompts, to the base and to the task's adapter."""
    return [
        (adapter, task, i)
        for task in zoo.adapter_paths()
        for adapter in (None, task)
        for i in range(NUM_PROMPTS)
    ]


def ask(server: Server, asked: list[Key], *, name_adapters: bool) -> Texts:
    """In as few requests as the server takes."""
    texts: Texts = {}
    for start in range(0, len(asked), MAX_PROMPTS):
        texts |= _ask(server, asked[start : start + MAX_PROMPTS], name_adapters=name_adapters)
    return texts


def _ask(server: Server, asked: list[Key], *, name_adapters: bool) -> Texts:
    answers = server.generate(
        [zoo.held_out(task, NUM_PROMPTS)[i].prompt for _, task, i in asked],
        [adapter if name_adapters else None for adapter, _, _ in asked],
        NUM_NEW_TOKENS,
        stop=["\n"],
        ignore_eos=False,
    )
    return {key: answer["text"] for key, answer in zip(asked, answers, strict=True)}


@pytest.fixture(scope="module")
def merged_texts(server_pool: ServerPool, merged_demo: MergedDemo) -> Texts:
    """Plain SGLang on the base and on every merged checkpoint."""
    server = server_pool.get(ServerSpec(zoo.base_path(), weave=False))
    texts: Texts = {}
    for adapter in (None, *zoo.adapter_paths()):
        server.use_weights(merged_demo.get(adapter))
        mine = [key for key in keys() if key[0] == adapter]
        texts |= ask(server, mine, name_adapters=False)
    return texts


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.full if args else ()) for name, args in LAYOUTS.items()],
)
def test_woven_equals_merged(layout: str, merged_texts: Texts, server_pool: ServerPool) -> None:
    args = LAYOUTS[layout]
    adapters = tuple(zoo.adapter_paths().items())
    spec = ServerSpec(zoo.base_path(), adapters, args) if args else ServerSpec()
    shuffled = keys()
    random.Random(layout).shuffle(shuffled)
    woven = ask(server_pool.get(spec), shuffled, name_adapters=True)
    assert [key for key in keys() if woven[key] != merged_texts[key]] == []


@pytest.mark.parametrize("task", zoo.tasks())
def test_adapters_know_their_task_and_the_base_does_not(task: str, merged_texts: Texts) -> None:
    examples = zoo.held_out(task, NUM_PROMPTS)
    base = score([merged_texts[None, task, i] for i in range(NUM_PROMPTS)], examples)
    adapted = score([merged_texts[task, task, i] for i in range(NUM_PROMPTS)], examples)
    assert base <= 0.2
    assert adapted >= 0.8
