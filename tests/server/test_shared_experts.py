"""Adapters that tune shared experts too, beside others and the base: answers of the merged models.

Correct is what plain SGLang answers on the merged checkpoints, in float32 and greedily: in mixed
batches, with chunked prefills, fewer slots than adapters, several ranks, and LoRA on the same
layers.
"""

from __future__ import annotations

import itertools
import random
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import requests

from sgl_esft.formats.model_spec import read_moe_spec
from sgl_esft.tools.merge import merge_adapter
from tests.server.test_equality import CHUNKED, assert_models_differ
from tests.support.adapter_factory import write_random_adapter
from tests.support.families import Families, Family
from tests.support.lora_factory import merge_lora, write_random_lora
from tests.support.references import NUM_NEW_TOKENS, Reference, reference_of
from tests.support.servers import DP2_EP2, TP2_EP2, Server, ServerPool, ServerSpec

pytestmark = pytest.mark.server

ARCHITECTURE = "DeepseekV2ForCausalLM"
# Layers whose shared experts an adapter has; "same" has the routed experts of "all".
SHARED = {"all": (1, 2, 3), "one": (2,), "same": ()}
LORA, PAIR = "l0", "all+l0"
LAYOUTS = {
    "one-rank": (*CHUNKED, "--max-adapters", "2"),
    "tp2-ep2": TP2_EP2,
    "dp2-ep2": DP2_EP2,
    "lora": (*CHUNKED, "--max-loras", "2", "--max-lora-rank", "8"),
}
BATCH = 40


class SharedFamily(Family):
    """A base, adapters with and without shared experts, a LoRA adapter on them, and a pair."""

    @property
    def folder(self) -> Path:
        return next(iter(self.adapters.values())).parent

    @cached_property
    def merged(self) -> dict[str, Path]:
        found = {name: self.folder / f"merged-{name}" for name in self.adapters}
        for name, out in found.items():
            merge_adapter(self.base, self.adapters[name], out)
        lora = self.folder / LORA
        found[PAIR] = merge_lora(found["all"], lora, self.folder / "merged-pair")
        return found


@pytest.fixture(scope="session")
def family(families: Families, tmp_path_factory: pytest.TempPathFactory) -> SharedFamily:
    """Over the base of other tests: the plain server may be running already."""
    base, folder = families.get(ARCHITECTURE).base, tmp_path_factory.mktemp("shared-experts")
    seeds = {"all": 31, "one": 32, "same": 31}
    adapters = {
        name: write_random_adapter(folder / name, base, seeds[name], shared_layers=layers)
        for name, layers in SHARED.items()
    }
    write_random_lora(folder / LORA, base, 33, loudness=0.4)
    return SharedFamily(f"{ARCHITECTURE} with shared experts", base, adapters)


def serve(family: SharedFamily, layout: str, pool: ServerPool) -> Server:
    lora = ("--lora-paths", f"{LORA}={family.folder / LORA}") if layout == "lora" else ()
    return pool.get(ServerSpec(family.base, family.named, (*LAYOUTS[layout], *lora)))


def wrong_answers(
    server: Server, reference: Reference, names: list[str | None], seed: str
) -> list[Any]:
    """Of all prompts to these models in mixed batches, those answered otherwise than merged."""
    asked = list(itertools.product(names, range(len(reference.prompts))))
    random.Random(seed).shuffle(asked)
    wrong = []
    for start in range(0, len(asked), BATCH):
        batch = asked[start : start + BATCH]
        answers = server.token_ids(
            [reference.prompts[i] for _, i in batch],
            [name.split("+") if name and "+" in name else name for name, _ in batch],  # type: ignore[misc]
            NUM_NEW_TOKENS,
        )
        wrong += [
            each
            for each, answer in zip(batch, answers, strict=True)
            if answer != reference.answers[each[0]][each[1]]
        ]
    return wrong


@pytest.mark.parametrize(
    "layout",
    ["one-rank", *(pytest.param(each, marks=pytest.mark.full) for each in list(LAYOUTS)[1:])],
)
def test_woven_equals_merged(layout: str, family: SharedFamily, server_pool: ServerPool) -> None:
    reference = reference_of(family, server_pool)
    server = serve(family, layout, server_pool)
    names = [*SHARED, None, *([PAIR] if layout == "lora" else [])]
    assert wrong_answers(server, reference, names, layout) == []
    assert_models_differ(reference.answers)


def test_other_weights_under_the_same_name(family: SharedFamily, server_pool: ServerPool) -> None:
    """Shared experts go with their version: none is left for the next, nor for the base."""
    reference = reference_of(family, server_pool)
    server = serve(family, "one-rank", server_pool)
    listed = requests.get(f"{server.url}/v1/adapters", timeout=30).json()["adapters"]
    num_bytes = {each["name"]: each["num_bytes"] for each in listed}
    spec = read_moe_spec(family.base)
    one_layer = 3 * spec.hidden_size * spec.shared_intermediate_size * 4
    assert num_bytes["all"] - num_bytes["same"] == 3 * one_layer
    for name, content in (("all", "same"), ("same", "all"), ("all", "all"), ("same", "same")):
        assert server.unload(name).status_code == 200
        assert server.load(name, family.adapters[content]).status_code == 200
        prompt = [reference.prompts[0]] * 4
        seen = server.token_ids(prompt, [name, None, "one", name], NUM_NEW_TOKENS)
        models = [content, None, "one", content]
        assert seen == [reference.answers[model][0] for model in models]
