"""Woven over a quantised base: answers of the merged checkpoint, quantised alike, on plain SGLang.

For every scheme, the base and four adapters in mixed batches: three of them in bfloat16, quantised
when they are loaded, one stored quantised. Then what a client may send that does not fit.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from safetensors.torch import load_file, save_file

from sgl_esft import zoo
from tests.support.quantised_zoo import NAMES, WIDTH, QuantisedZoo
from tests.support.servers import DP2_EP2, TP2_EP2, Server, ServerPool, ServerSpec
from tests.support.waiting import wait_until

pytestmark = pytest.mark.server

HIDDEN = 128  # of the demo
NUM_PROMPTS = 12
NUM_NEW_TOKENS = 12
# A bfloat16 has 8 bits, and another batch rounds the linear layers otherwise: what is closer is a
# tie. Logarithms of probabilities.
TIE_LOGPROB = 0.25
MIN_CLEAR = 24  # of the answers of one model, all tasks together
STORED = "sum"  # the adapter that is stored quantised
RANKS = {"tp2-ep2": TP2_EP2, "dp2-ep2": DP2_EP2}
LAYOUTS = {"one-rank": (), **RANKS}
QUANTISATION = {"int4": ("--quantization", "moe_wna16")}  # what plain SGLang must be told
CASES = [
    pytest.param("int8", "one-rank"),
    *(
        pytest.param(scheme, layout, marks=pytest.mark.full)
        for scheme, layout in (
            ("fp8", "one-rank"),
            ("fp8-tensor", "one-rank"),
            ("int4", "one-rank"),
            ("int8", "router"),
            ("int8", "padded"),
            ("int8", "tp2-ep2"),
            ("fp8", "tp2-ep2"),
            ("fp8-tensor", "tp2-ep2"),
            ("int4", "tp2-ep2"),
            ("int8", "dp2-ep2"),
            ("fp8", "dp2-ep2"),
            ("fp8-tensor", "dp2-ep2"),
            ("int4", "dp2-ep2"),
        )
    ),
]
LAYOUTS |= {"router": ("--reroute", "router"), "padded": ("--expert-memory", "padded")}
ALIKE = ("one-rank", "padded")  # which add up in the order of a plain rank
QUICK = ("int8", "one-rank")

Model = str | None  # an adapter's name; None = the base
Answer = tuple[str, float]  # text, least distance of the best two tokens


def prompts() -> list[str]:
    """Of every task: a model that was trained for one says something else to the others."""
    return [zoo.held_out(task, NUM_PROMPTS)[i].prompt for task in NAMES for i in range(NUM_PROMPTS)]


def ask(server: Server, models: list[Model], texts: list[str]) -> list[Answer]:
    found = server.generate(
        texts,
        models,
        NUM_NEW_TOKENS,
        body={"return_logprob": True, "top_logprobs_num": 2},
        stop=["\n"],
        ignore_eos=False,
    )
    return [(each["text"], gap(each["meta_info"]["output_top_logprobs"])) for each in found]


def gap(best_two: list[Any]) -> float:
    return min(float(first[0] - second[0]) for first, second in best_two)


def ask_alone(server: Server, model: Model) -> list[Answer]:
    """One request at a time, each with nothing cached: every batch is the same on every server."""
    found = []
    for text in prompts()[:: NUM_PROMPTS // 2]:
        # It is not while the last request's end is still being written down.
        wait_until(lambda: server.post("/flush_cache", {}).status_code == 200, 10.0)
        found += ask(server, [model], [text])
    return found


@dataclass(frozen=True)
class Reference:
    """What plain SGLang says on one checkpoint, to all prompts together and to some alone."""

    together: list[Answer]
    alone: list[Answer]


class References:
    """One server for each checkpoint: SGLang cannot load quantised weights anew."""

    def __init__(self, made: QuantisedZoo, pool: ServerPool) -> None:
        self._zoo, self._pool = made, pool
        self._made: dict[tuple[str, tuple[str, ...], Model], Reference] = {}

    def get(self, scheme: str, ranks: tuple[str, ...], model: Model) -> Reference:
        """`ranks`: flags; what is added up on two of them is rounded otherwise than on one."""
        key = scheme, ranks, model
        if key not in self._made:
            folder = self._zoo.quantised(model, scheme)
            args = (*QUANTISATION.get(scheme, ()), *ranks)
            spec = ServerSpec(folder, args=args, weave=False)
            server, texts = self._pool.get(spec), prompts()
            together = ask(server, [None] * len(texts), texts)
            self._made[key] = Reference(together, ask_alone(server, None))
        return self._made[key]


@pytest.fixture(scope="module")
def references(quantised_zoo: QuantisedZoo, server_pool: ServerPool) -> References:
    return References(quantised_zoo, server_pool)


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where adapters' quantised copies are kept."""
    return tmp_path_factory.mktemp("copies")


def spec_of(made: QuantisedZoo, scheme: str, layout: str, copies: Path) -> ServerSpec:
    adapters = tuple(
        (name, made.stored(name, scheme) if name == STORED else made.adapter(name))
        for name in NAMES
    )
    args = (*LAYOUTS[layout], "--quantised-adapters", str(copies))
    return ServerSpec(made.quantised(None, scheme), adapters, args)


def models_of(case: tuple[str, str]) -> list[Model]:
    """A plain server is started for each of them: on two ranks, and in `make test`, for fewer."""
    if case == QUICK:
        return ["date"]
    return [None, "date", STORED] if case[1] in RANKS else [None, *NAMES]


@pytest.mark.parametrize(("scheme", "layout"), CASES)
def test_woven_equals_merged_and_quantised(
    scheme: str,
    layout: str,
    quantised_zoo: QuantisedZoo,
    references: References,
    server_pool: ServerPool,
    copies: Path,
) -> None:
    ranks = RANKS.get(layout, ())
    models = models_of((scheme, layout))
    expected = {model: references.get(scheme, ranks, model) for model in models}
    answers = {model: reference.together for model, reference in expected.items()}
    server = server_pool.get(spec_of(quantised_zoo, scheme, layout, copies))
    texts = prompts()
    asked: list[tuple[Model, int]] = [
        (model, i) for model in [None, *NAMES] for i in range(len(texts))
    ]
    random.Random(layout).shuffle(asked)
    found = ask(server, [model for model, _ in asked], [texts[i] for _, i in asked])
    seen = {key: answer[0] for key, answer in zip(asked, found, strict=True)}
    clear = {
        m: [i for i, a in enumerate(every) if a[1] > TIE_LOGPROB] for m, every in answers.items()
    }
    wrong = [(m, i) for m in answers for i in clear[m] if seen[m, i] != answers[m][i][0]]
    assert wrong == []
    assert {m: len(c) for m, c in clear.items() if len(c) < MIN_CLEAR} == {}
    assert_models_differ({m: [seen[m, i] for i in range(len(texts))] for m in [None, *NAMES]})
    if layout in ALIKE:
        for model, reference in expected.items():
            assert ask_alone(server, model) == reference.alone, "not a bit differs there"


def assert_models_differ(seen: dict[Model, list[str]]) -> None:
    """The test would prove nothing if adapters did not change what is generated."""
    for model, answers in seen.items():
        for other, others in seen.items():
            if other != model:
                same = sum(a == b for a, b in zip(answers, others, strict=True))
                assert same < len(answers) * 0.8


@pytest.fixture
def server(quantised_zoo: QuantisedZoo, server_pool: ServerPool, copies: Path) -> Server:
    return server_pool.get(spec_of(quantised_zoo, *QUICK, copies))


def test_what_does_not_fit_is_refused_and_changes_nothing(
    server: Server, quantised_zoo: QuantisedZoo, tmp_path: Path
) -> None:
    before = server.adapter_names(), ask(server, ["date"], prompts()[:1])
    no_scale = tmp_path / "no_scale"
    shutil.copytree(quantised_zoo.stored("date", "int8"), no_scale)
    (file,) = no_scale.glob("*.safetensors")
    tensors = load_file(file)
    gone = next(name for name in tensors if name.endswith("weight_scale"))
    del tensors[gone]
    save_file(tensors, file, metadata={"format": "pt"})
    refused = {
        "other": (quantised_zoo.stored("date", "fp8-tensor"), "AdapterMismatchError", "int8"),
        "no_scale": (no_scale, "AdapterFormatError", gone),
    }
    for name, (folder, kind, said) in refused.items():
        answer = server.load(name, folder)
        assert answer.status_code == 400
        assert kind in answer.text
        assert said in answer.text
    assert (server.adapter_names(), ask(server, ["date"], prompts()[:1])) == before
    for folder in (quantised_zoo.adapter("date"), quantised_zoo.stored("date", "int8")):
        assert server.load("again", folder).status_code == 200
        assert ask(server, ["again"], prompts()[:1]) == before[1]
        assert server.unload("again").status_code == 200


def test_memory_is_counted_with_scales(server: Server) -> None:
    report = requests.get(f"{server.url}/v1/memory", timeout=30).json()
    (device,) = report["devices"]
    # Numbers, and a float32 for each row of gate, up and down.
    slot_bytes = 3 * WIDTH * HIDDEN + (2 * WIDTH + HIDDEN) * 4
    assert {layer["slot_bytes"] for layer in device["layers"]} == {slot_bytes}
    for layer in device["layers"]:
        mapped = sum(run["count"] for run in layer["runs"])
        assert layer["used_bytes"] == mapped * slot_bytes


def test_an_adapters_copy_is_kept_on_disk(server: Server, copies: Path) -> None:
    """One for each adapter that was not stored quantised; the next server finds it."""
    folders = [folder for folder in copies.iterdir() if folder.is_dir()]
    of_scheme = [folder for folder in folders if "int8" in folder.name]
    assert len(of_scheme) == len(NAMES) - 1
    assert all(json.loads((f / "expert_cfg.json").read_text())["experts"] for f in of_scheme)
