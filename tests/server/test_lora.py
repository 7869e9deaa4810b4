"""ESFT adapters, LoRA adapters, and both in one request, beside the base on one server.

Correct is what plain SGLang answers on the checkpoint with W + scaling * B A and the ESFT adapter's
experts written in, in float32 and greedily: in one mixed batch, with chunked prefills and the
prefix cache on, and under load while adapters of both kinds come and go.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
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
LAYOUTS = {"one-rank": CHUNKED, "tp2-ep2": TP2_EP2, "replicas": ("--dp-size", "2")}
BATCH = 40
LOUDNESS = 0.4  # of LoRA's change: experts still decide too
NUM_PROMPTS = 20  # of each of nine models


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
    return MixedFamily(f"{architecture} with LoRA", base, esft, NUM_PROMPTS)


MixedFamilies = Callable[[str], MixedFamily]


@pytest.fixture(scope="session")
def mixed_family(tmp_path_factory: pytest.TempPathFactory) -> MixedFamilies:
    """Architecture -> family, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("mixed")
    return cache(lambda architecture: make_mixed(architecture, folder / architecture))


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
    mixed_family: MixedFamilies,
    server_pool: ServerPool,
) -> None:
    family = mixed_family(architecture)
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
    mixed_family: MixedFamilies, server_pool: ServerPool
) -> tuple[MixedFamily, Reference, Server]:
    family = mixed_family("DeepseekV2ForCausalLM")
    reference = reference_of(family, server_pool)
    return family, reference, server_pool.get(spec_of(family, "one-rank"))


# Copies of the adapters, and what they mean one after the other: each pair of versions that a
# request may meet is one of PAIRS.
WALK = (("esft-copy", "e1"), ("lora-copy", "l1"), ("esft-copy", "e0"), ("lora-copy", "l0"))
COPIES = {
    "esft-copy": ("e1", "e0"),
    "lora-copy": ("l1", "l0"),
    "lora-copy+esft-copy": ("e1+l1", "e0+l1", "e0+l0"),
}
NUM_WALKS = 3


class Traffic:
    """Requests of one prompt, whose answers are compared; `wrong` has those that differ."""

    def __init__(self, reference: Reference, server: Server) -> None:
        self.reference = reference
        self.server = server
        self.stop = threading.Event()
        self.wrong: list[object] = []
        self.num_answers: Counter[str] = Counter()  # by what was asked for

    def ask(
        self, prompt: int, adapter: Any, models: Sequence[str | None], *, may_be_gone: bool = False
    ) -> None:
        """The answer must be one of the models'; a name that comes and goes may be unknown."""
        sampling = {"temperature": 0, "max_new_tokens": NUM_NEW_TOKENS, "ignore_eos": True}
        body = {"text": self.reference.prompts[prompt], "adapter": adapter}
        found = self.server.post("/generate", {**body, "sampling_params": sampling})
        if may_be_gone and found.status_code in (400, 404) and "UnknownAdapter" in found.text:
            return
        allowed = [self.reference.answers[model][prompt] for model in models]
        if found.status_code != 200 or tuple(found.json()["output_ids"]) not in allowed:
            self.wrong.append((models, adapter, prompt, found.text[:300]))
        self.num_answers[str(adapter)] += 1

    def client(self, seed: int) -> None:
        """Asks for everything that stays."""
        rng = random.Random(seed)
        while not self.stop.is_set():
            model = rng.choice(list(self.reference.answers))
            adapter = as_asked(model)
            if isinstance(adapter, list):
                rng.shuffle(adapter)
            self.ask(rng.randrange(len(self.reference.prompts)), adapter, [model])

    def client_of_copies(self, seed: int) -> None:
        """Asks for what comes and goes, and must never meet a half of it."""
        rng = random.Random(seed)
        while not self.stop.is_set():
            adapter = rng.choice(list(COPIES))
            prompt = rng.randrange(len(self.reference.prompts))
            self.ask(prompt, adapter, COPIES[adapter], may_be_gone=True)


def change(server: Server, method: str, place: str = "", **body: Any) -> None:
    """POST, PATCH or DELETE, and wait for its end."""
    url = f"{server.url}/v1/adapters{place}?wait=true"
    found = requests.request(method, url, json=body or None, timeout=120)
    assert found.status_code in (200, 201, 204), (method, place, body, found.text)


def walk(traffic: Traffic, family: MixedFamily, turn: int) -> None:
    """Both copies come, change while they are used, and go; after each change they are asked."""
    server, means = traffic.server, dict[str, str]()
    for name, model in WALK:
        path = str({**family.adapters, **family.loras}[model])
        if name in means:
            change(server, "PATCH", f"/{name}", path=path, pinned=bool(turn % 2))
        else:
            change(server, "POST", name=name, path=path)
        means[name] = model
        traffic.ask(turn, name, [model])
        if len(means) == 2:
            pair = f"{means['esft-copy']}+{means['lora-copy']}"
            traffic.ask(turn, ["lora-copy", "esft-copy"], [pair])
    listed = {a["name"]: (a["kind"], a["pinned"]) for a in listing(server)["adapters"]}
    for name in means:
        assert listed[name] == (name.removesuffix("-copy"), bool(turn % 2))
    for name in sorted(means, reverse=bool(turn % 2)):
        change(server, "DELETE", f"/{name}")
        traffic.ask(turn, name, [], may_be_gone=True)


def test_answers_hold_while_adapters_of_both_kinds_come_and_go(
    served: tuple[MixedFamily, Reference, Server],
) -> None:
    """Clients ask for all models, one prompt a request; another loads, replaces and unloads."""
    family, reference, server = served
    traffic = Traffic(reference, server)
    with ThreadPoolExecutor(7) as pool:
        clients = [pool.submit(traffic.client, seed) for seed in range(4)]
        clients += [pool.submit(traffic.client_of_copies, seed) for seed in range(2)]
        try:
            for turn in range(NUM_WALKS):
                pool.submit(walk, traffic, family, turn).result(timeout=240)
        finally:
            traffic.stop.set()
        for each in clients:
            each.result()
    assert traffic.wrong == []
    assert set(traffic.num_answers) >= set(COPIES), "the copies were asked for while they came"
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


def bad_loras(root: Path, base: Path) -> Iterator[tuple[str, Path, str, str]]:
    """(name, folder, error, what it says)."""
    rank = write_random_lora(root / "r", base, 1, rank=16)
    yield "rank", rank, "AdapterMismatchError", "has rank 16"
    for place, parameter in enumerate(("mlp.experts.0.down_proj", "mlp.experts")):
        experts = write_random_lora(root / f"m{place}", base, 1, targets=("o_proj",))
        rename(experts, "self_attn.o_proj", parameter)
        yield "experts", experts, "UnsupportedAdapterError", "routed experts take no LoRA"
    unknown = write_random_lora(root / "u", base, 1, targets=("o_proj",))
    rename(unknown, "o_proj", "z_proj")
    yield "unknown", unknown, "UnsupportedAdapterError", "this base takes LoRA in"
    other = write_random_base(root / "other", "DeepseekV2ForCausalLM", seed=5, hidden_size=64)
    foreign = write_random_lora(root / "o", other, 1)
    yield "other", foreign, "AdapterMismatchError", "made for another model"
    dora = write_random_lora(root / "d", base, 1, use_dora=True)
    yield "dora", dora, "UnsupportedAdapterError", "use_dora"
    both = write_random_lora(root / "both", base, 1)
    (both / "expert_cfg.json").write_text('{"experts": {"1": [0]}}')
    yield "both", both, "UnsupportedAdapterError", "an adapter is of one kind"
    pickled = write_random_lora(root / "p", base, 1)
    (pickled / "adapter_model.bin").write_bytes(b"PK\x03\x04")
    yield "pickle", pickled, "AdapterFormatError", "never read"


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
    before = steady(server)
    for name, folder, error, said in bad_loras(tmp_path, family.base):
        found = server.load(name, folder)
        assert found.status_code == 400, name
        assert found.json()["error_message"].startswith(f"{error}: "), found.text
        assert said in found.json()["error_message"], (name, found.text)
        expect_refused(server, {"name": name, "path": str(folder)}, 400, error, said)
    again = server.load("l0", family.loras["l1"])
    assert "is loaded already" in again.json()["error_message"]
    assert steady(server) == before
    asked = server.token_ids([reference.prompts[1]], ["l0"], NUM_NEW_TOKENS)[0]
    assert asked == reference.answers["l0"][1]


def steady(server: Server) -> dict[str, Any]:
    """The listing, without what failed and without what is looked at again now and then."""
    found = listing(server)
    adapters = [a for a in found["adapters"] if a["state"] != "failed"]
    return {**found, "adapters": [{**a, "changed_on_disk": None} for a in adapters]}


def expect_refused(
    server: Server, body: dict[str, Any], status: int, error: str, said: str
) -> None:
    """By POST /v1/adapters."""
    found = server.post("/v1/adapters?wait=true", body)
    assert found.status_code == status, found.text
    assert found.json()["error"]["type"] == error, found.text
    assert said in found.json()["error"]["message"], found.text


def test_a_name_means_one_adapter_whatever_its_kind(
    served: tuple[MixedFamily, Reference, Server],
) -> None:
    """Loading is refused for a name in use, by either kind; replacing says so and may change it."""
    family, reference, server = served
    for name, folder in (("l0", family.adapters["e0"]), ("e0", family.loras["l0"])):
        body = {"name": name, "path": str(folder)}
        expect_refused(server, body, 409, "AdapterExistsError", "is loaded with other content")
        assert server.load(name, folder).status_code == 400
    kinds = {a["name"]: a["kind"] for a in listing(server)["adapters"]}
    assert (kinds["l0"], kinds["e0"]) == ("lora", "esft")
    change(server, "POST", name="turn", path=str(family.loras["l0"]))
    try:
        change(server, "PATCH", "/turn", path=str(family.adapters["e1"]))
        assert {a["name"]: a["kind"] for a in listing(server)["adapters"]}["turn"] == "esft"
        asked: list[Any] = ["turn", ["l1", "turn"]]
        found = server.token_ids([reference.prompts[0]] * 2, asked, NUM_NEW_TOKENS)
        assert found == [reference.answers[model][0] for model in ("e1", "e1+l1")]
        refused = server.post("/generate", {"text": "x", "adapter": ["e0", "turn"]})
        assert refused.json()["error"]["type"] == "TooManyAdaptersError", refused.text
    finally:
        change(server, "DELETE", "/turn")
