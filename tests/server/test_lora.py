"""ESFT adapters, LoRA adapters, and both in one request, beside the base on one server.

Correct is what plain SGLang answers on the checkpoint with W + scaling * B A and the ESFT adapter's
experts written in, in float32 and greedily: in one mixed batch, with chunked prefills and the
prefix cache on, and under load while adapters of both kinds come and go.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import requests

from sgl_esft.tools.merge import merge_adapter
from tests.server.test_equality import CHUNKED, assert_models_differ
from tests.support.adapter_factory import write_random_adapter, write_random_base
from tests.support.families import Family
from tests.support.lora_factory import merge_lora, write_random_lora
from tests.support.optional_metrics import lora_metrics
from tests.support.references import NUM_NEW_TOKENS, Reference, reference_of
from tests.support.servers import TP2_EP2, Server, ServerPool, ServerSpec

pytestmark = pytest.mark.server

ESFT, LORAS = ("e0", "e1"), ("l0", "l1", "l2")
PAIRS = ("e0+l0", "e1+l1", "e0+l1")
ARCHITECTURES = ("DeepseekV2ForCausalLM", "Qwen3MoeForCausalLM")
# More LoRA adapters than slots: they take turns.
LORA_FLAGS = ("--max-loras", "2", "--max-lora-rank", "8", "--enable-metrics")
LAYOUTS = {"one-rank": CHUNKED, "tp2-ep2": TP2_EP2}
BATCH = 40
LOUDNESS = 0.4  # of LoRA's change: experts still decide too


class MixedFamily(Family):
    """A base, its adapters of both kinds, and every checkpoint that a request may mean."""

    @property
    def loras(self) -> dict[str, Path]:
        return {name: self.base.parent / name for name in LORAS}

    @cached_property
    def merged(self) -> dict[str, Path]:
        found = {}
        for name in ESFT:
            found[name] = self.base.parent / f"merged-{name}"
            merge_adapter(self.base, self.adapters[name], found[name])
        for name in (*LORAS, *PAIRS):
            esft, _, lora = name.rpartition("+")
            start = found[esft] if esft else self.base
            found[name] = merge_lora(start, self.loras[lora], self.base.parent / f"merged-{name}")
        return found


def make_mixed(architecture: str, folder: Path) -> MixedFamily:
    base = write_random_base(folder / "base", architecture, seed=1)
    esft = {
        name: write_random_adapter(folder / name, base, seed=10 + i) for i, name in enumerate(ESFT)
    }
    few = ("o_proj",) if architecture.startswith("Deepseek") else ("q_proj", "v_proj", "o_proj")
    write_random_lora(folder / "l0", base, 20, loudness=LOUDNESS)
    write_random_lora(folder / "l1", base, 21, rank=8, targets=few, loudness=2 * LOUDNESS)
    write_random_lora(folder / "l2", base, 22, layers=(1, 2), loudness=LOUDNESS, use_rslora=True)
    return MixedFamily(f"{architecture} with LoRA", base, esft)


@pytest.fixture(scope="session")
def mixed_families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MixedFamily]:
    folder = tmp_path_factory.mktemp("mixed")
    return {each: make_mixed(each, folder / each) for each in ARCHITECTURES}


def spec_of(family: MixedFamily, layout: str) -> ServerSpec:
    paths = [f"{name}={path}" for name, path in family.loras.items()]
    flags = (*LAYOUTS[layout], *LORA_FLAGS, "--lora-paths", *paths)
    return ServerSpec(family.base, family.named, flags)


def as_asked(name: str | None) -> Any:
    """A model's name as a prompt's adapter: a pair as a list, each order in turn."""
    return name.split("+") if name and "+" in name else name


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [
        ("DeepseekV2ForCausalLM", "one-rank"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in itertools.product(ARCHITECTURES, LAYOUTS)
            if case != ("DeepseekV2ForCausalLM", "one-rank")
        ),
    ],
)
def test_mixed_batches_equal_merged_models(
    architecture: str,
    layout: str,
    mixed_families: dict[str, MixedFamily],
    server_pool: ServerPool,
) -> None:
    family = mixed_families[architecture]
    reference = reference_of(family, server_pool)
    server = server_pool.get(spec_of(family, layout))
    requests_of = [(name, i) for name in reference.answers for i in range(len(reference.prompts))]
    random.Random(layout).shuffle(requests_of)
    wrong = []
    for start in range(0, len(requests_of), BATCH):
        batch = requests_of[start : start + BATCH]
        answers = server.token_ids(
            [reference.prompts[i] for _, i in batch],
            [as_asked(name) for name, _ in batch],
            NUM_NEW_TOKENS,
        )
        pairs = zip(batch, answers, strict=True)
        wrong += [r for r, a in pairs if a != reference.answers[r[0]][r[1]]]
    assert wrong == []
    assert_models_differ(reference.answers)


@pytest.fixture
def served(
    mixed_families: dict[str, MixedFamily], server_pool: ServerPool
) -> tuple[MixedFamily, Reference, Server]:
    family = mixed_families["DeepseekV2ForCausalLM"]
    reference = reference_of(family, server_pool)
    return family, reference, server_pool.get(spec_of(family, "one-rank"))


def test_answers_hold_while_adapters_of_both_kinds_come_and_go(
    served: tuple[MixedFamily, Reference, Server],
) -> None:
    """Clients ask for all models, one prompt a request; another loads, asks and unloads copies."""
    family, reference, server = served
    stop = threading.Event()
    wrong: list[object] = []

    def ask(prompt: int, model: str | None, adapter: Any) -> None:
        found = server.post(
            "/generate",
            {
                "text": reference.prompts[prompt],
                "adapter": adapter,
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": NUM_NEW_TOKENS,
                    "ignore_eos": True,
                },
            },
        )
        if found.status_code != 200 or (
            tuple(found.json()["output_ids"]) != reference.answers[model][prompt]
        ):
            wrong.append((model, adapter, prompt, found.text[:300]))

    def client(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            model = rng.choice(list(reference.answers))
            adapter = as_asked(model)
            if isinstance(adapter, list):
                rng.shuffle(adapter)
            ask(rng.randrange(len(reference.prompts)), model, adapter)

    def churn() -> None:
        for turn in range(4):
            for name, path, model, adapter in (
                ("esft-copy", family.adapters["e1"], "e1", "esft-copy"),
                ("lora-copy", family.loras["l1"], "l1", "lora-copy"),
            ):
                assert server.load(name, path).json()["success"], name
                ask(turn, model, adapter)
            ask(turn, "e1+l1", ["lora-copy", "esft-copy"])
            for name in ("esft-copy", "lora-copy"):
                assert server.unload(name).json()["success"], name

    with ThreadPoolExecutor(7) as pool:
        clients = [pool.submit(client, seed) for seed in range(6)]
        try:
            pool.submit(churn).result(timeout=240)
        finally:
            stop.set()
        for each in clients:
            each.result()
    assert wrong == []
    left = {a["name"]: a["num_references"] for a in listing(server)["adapters"]}
    assert left == dict.fromkeys((*ESFT, *LORAS), 0), "nothing is held, nothing is left"


def listing(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = requests.get(f"{server.url}/v1/adapters", timeout=30).json()
    return found


def test_the_listing_tells_both_kinds(served: tuple[MixedFamily, Reference, Server]) -> None:
    _, _, server = served
    told = listing(server)
    kinds = {adapter["name"]: adapter["kind"] for adapter in told["adapters"]}
    assert kinds == dict.fromkeys(ESFT, "esft") | dict.fromkeys(LORAS, "lora")
    assert told["slots"]["total"] == len(ESFT)
    assert told["lora_slots"]["total"] == 2
    assert told["lora_slots"]["used"] <= 2
    assert set(server.adapter_names()) >= {*ESFT, *LORAS}
    text = requests.get(f"{server.url}/metrics", timeout=30).text
    assert [name for name in lora_metrics() if f"\n{name}{{" not in text] == []


def test_a_replaced_lora_answers_anew(
    served: tuple[MixedFamily, Reference, Server], tmp_path: Path
) -> None:
    """The prefix cache knows the old version's prefixes, and must not be asked for them."""
    family, reference, server = served
    assert server.load("turn", family.loras["l0"]).json()["success"]
    try:
        for model in ("l0", "l1"):
            asked = server.token_ids([reference.prompts[0]], ["turn"], NUM_NEW_TOKENS)[0]
            assert asked == reference.answers[model][0]
            body = {"path": str(family.loras["l1"])}
            url = f"{server.url}/v1/adapters/turn?wait=true"
            assert requests.patch(url, json=body, timeout=60).status_code == 200
    finally:
        server.unload("turn")


@pytest.mark.parametrize(
    ("adapter", "kind"),
    [
        (["e0", "e1"], "TooManyAdaptersError"),
        (["l0", "l1"], "TooManyAdaptersError"),
        (["e0", "l0", "l1"], "TooManyAdaptersError"),
        (["e0", "e0"], "TooManyAdaptersError"),
        ([], "TooManyAdaptersError"),
        (["e0", "nobody"], "UnknownAdapterError"),
        ([["e0"], "l0"], "AdapterNameError"),
        ("e0+l0+l1", "TooManyAdaptersError"),
        ("e0+", "UnknownAdapterError"),
    ],
)
def test_what_no_prompt_may_ask_for(
    served: tuple[MixedFamily, Reference, Server], adapter: Any, kind: str
) -> None:
    _, _, server = served
    for field in ("adapter", "lora_path"):
        body = {"text": "x", field: adapter, "sampling_params": {"max_new_tokens": 1}}
        found = server.post("/generate", body)
        assert found.status_code in (400, 404), found.text
        assert found.json()["error"]["type"] == kind, found.text


def test_models_name_pairs(served: tuple[MixedFamily, Reference, Server]) -> None:
    _, _, server = served

    def text_of(model: str, **body: Any) -> str:
        asked = {"model": model, "prompt": "once upon", "max_tokens": 6, "temperature": 0, **body}
        found = server.post("/v1/completions", asked)
        assert found.status_code == 200, found.text
        return str(found.json()["choices"][0]["text"])

    said = text_of("base:e0+l0")
    assert (
        said == text_of("e0+l0") == text_of("base:l0+e0") == text_of("base", adapter=["l0", "e0"])
    )
    assert len({said, text_of("e0"), text_of("l0"), text_of("base")}) == 4


def bad_loras(root: Path, base: Path) -> Iterator[tuple[str, Path, str]]:
    """(name, folder, what the error says)."""
    yield "rank", write_random_lora(root / "r", base, 1, rank=16), "has rank 16"
    experts = write_random_lora(root / "m", base, 1, targets=("o_proj",))
    rename(experts, "self_attn.o_proj", "mlp.experts.0.down_proj")
    yield "experts", experts, "routed experts take no LoRA"
    unknown = write_random_lora(root / "u", base, 1, targets=("o_proj",))
    rename(unknown, "o_proj", "z_proj")
    yield "unknown", unknown, "this base takes LoRA in"
    other = write_random_base(root / "other", "DeepseekV2ForCausalLM", seed=5, hidden_size=64)
    yield "other", write_random_lora(root / "o", other, 1), "made for another model"
    dora = write_random_lora(root / "d", base, 1, use_dora=True)
    yield "dora", dora, "use_dora"
    both = write_random_lora(root / "both", base, 1)
    (both / "expert_cfg.json").write_text('{"experts": {"1": [0]}}')
    yield "both", both, "an adapter is of one kind"
    pickled = write_random_lora(root / "p", base, 1)
    (pickled / "adapter_model.bin").write_bytes(b"PK\x03\x04")
    yield "pickle", pickled, "never read"


def rename(folder: Path, old: str, new: str) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "adapter_model.safetensors"
    tensors = {name.replace(old, new): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace(old.rpartition(".")[2], new.rpartition(".")[2]))


def test_bad_loras_change_nothing(
    served: tuple[MixedFamily, Reference, Server], tmp_path: Path
) -> None:
    family, reference, server = served
    before = listing(server)["adapters"]
    for name, folder, said in bad_loras(tmp_path, family.base):
        found = server.load(name, folder)
        assert found.status_code == 400, name
        assert said in found.json()["error_message"], (name, found.text)
    again = server.load("l0", family.loras["l1"])
    assert "is loaded already" in again.json()["error_message"]
    after = [a for a in listing(server)["adapters"] if a["state"] != "failed"]
    assert [a["name"] for a in after] == [a["name"] for a in before]
    asked = server.token_ids([reference.prompts[1]], ["l0"], NUM_NEW_TOKENS)[0]
    assert asked == reference.answers["l0"][1]
