"""The deep zoo: what its sizes come to, and that what training writes is what is served."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from sgl_esft import zoo
from sgl_esft.formats.adapter_config import write_expert_config
from sgl_esft.formats.checkpoint import all_experts, open_checkpoint
from sgl_esft.formats.manifest import read_manifest
from sgl_esft.formats.model_spec import read_moe_spec
from sgl_esft.offload.pack import ALIGNMENT
from sgl_esft.tools.extract import extract_adapter
from sgl_esft.zoo import __main__ as command
from sgl_esft.zoo import evaluate, own_task, train
from sgl_esft.zoo.model import DEEP, as_stored, load_model, new_model, save_model
from sgl_esft.zoo.train import PLANS, Training

pytestmark = pytest.mark.usefixtures("one_thread")

MOST_BYTES = 25e6  # of all of sgl_esft/zoo
MOST_EXPERTS = 8  # of a layer, on average, that the sizes leave room for
SHORT = Training(steps=2, tokens=128, peak=1e-3, warmup=1)


def short_plan() -> train.ZooPlan:
    deep = PLANS["deep"]
    recipes = {name: replace(recipe, training=SHORT) for name, recipe in deep.recipes.items()}
    return replace(deep, base=SHORT, recipes=recipes, num_held_out=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder after a few steps, and the lines of progress."""
    out, lines = tmp_path_factory.mktemp("deep"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "REPORTED_STEPS", 1)
        patch.setattr(train, "SCORED_EXAMPLES", 16)
        train.train_zoo(short_plan(), out, 0, 1, False, lines.append)
    return out, lines


def test_the_sizes_are_deep_and_small_beside_the_demo() -> None:
    assert DEEP.num_moe_layers >= 12
    assert DEEP.num_experts >= 32
    num_parameters = sum(p.numel() for p in new_model(0, DEEP).parameters())
    assert num_parameters == 3_046_912, "as the comment at DEEP counts them"
    projection = 2 * DEEP.hidden_size * DEEP.expert_width
    assert projection % ALIGNMENT == 0
    assert len(PLANS["deep"].recipes) >= 2
    adapter = DEEP.num_moe_layers * MOST_EXPERTS * 3 * projection
    demo = zoo.MODELS["demo"].rglob("*")
    names = 0.4e6  # of tensors, in the files' headers
    own = 2 * num_parameters + len(PLANS["deep"].recipes) * adapter + names
    assert sum(f.stat().st_size for f in demo if f.is_file()) + own < MOST_BYTES


def test_training_writes_a_base_that_can_be_served(trained: tuple[Path, list[str]]) -> None:
    base = trained[0] / "base"
    spec = read_moe_spec(base)
    assert spec.moe_layer_ids == tuple(range(1, 13))
    assert (spec.num_experts, spec.dtype) == (32, "bfloat16")
    assert spec.expert_bytes == 12_288
    checkpoint = open_checkpoint(base)
    assert {len(ids) for ids in all_experts(checkpoint.spec).values()} == {32}


def test_training_writes_adapters_that_fit_it(trained: tuple[Path, list[str]]) -> None:
    out = trained[0]
    spec = read_moe_spec(out / "base")
    folders = sorted((out / "adapters").iterdir())
    assert [folder.name for folder in folders] == sorted(PLANS["deep"].recipes)
    for folder in folders:
        manifest = read_manifest(folder, spec)
        assert set(manifest.experts) == set(spec.moe_layer_ids)
        assert all(manifest.experts.values())


def test_training_tells_how_far_it_is_and_records_itself(trained: tuple[Path, list[str]]) -> None:
    out, lines = trained
    assert lines[0].startswith("base: step 1/2 loss ")
    assert lines[0].endswith(" s left")
    record = json.loads((out / "zoo.json").read_text())
    assert record["command"].startswith("python -m sgl_esft.zoo train --model deep --out DIR")
    assert sorted(record["adapters"]) == sorted(PLANS["deep"].recipes)


def test_a_model_in_memory_is_what_its_checkpoint_holds(tmp_path: Path) -> None:
    model = new_model(3, DEEP)
    assert next(model.parameters()).dtype == torch.float32
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert next(loaded.parameters()).dtype == torch.float32
    before, after = model.get_parameter("lm_head.weight"), loaded.get_parameter("lm_head.weight")
    assert not torch.equal(before, after)
    assert torch.equal(as_stored(model).get_parameter("lm_head.weight"), after)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {file.get_tensor(key).dtype for key in list(file.keys())[:50]} == {torch.bfloat16}


def test_a_tuned_bfloat16_model_stays_one(trained: tuple[Path, list[str]], tmp_path: Path) -> None:
    """`extract` compares it with its base."""
    base = trained[0] / "base"
    examples = tmp_path / "own.jsonl"
    examples.write_text('{"prompt": "cat -> ", "answer": "cats"}\n')
    scores = tmp_path / "scores.json"
    own_task.score(base, examples, "token", scores)
    used = json.loads(scores.read_text())["token_scores"]["1"]
    best = max(used, key=lambda expert: used[expert])
    write_expert_config(tmp_path / "expert_cfg.json", {1: (int(best),)})
    own_task.tune(
        base, examples, tmp_path / "expert_cfg.json", 2, tmp_path / "tuned", lambda _: None
    )
    found = extract_adapter(base, tmp_path / "tuned", tmp_path / "adapter")
    assert dict(found.experts) == {1: (int(best),)}


def test_paths_go_by_the_model() -> None:
    assert zoo.base_path() == zoo.base_path("demo") == zoo.MODELS["demo"] / "base"
    assert zoo.adapter_paths() == zoo.adapter_paths("demo")
    assert zoo.base_path("deep").parent.name == "deep"
    assert not set(zoo.adapter_paths("deep")) - set(PLANS["deep"].recipes)
    with pytest.raises(KeyError):
        zoo.base_path("shallow")
    assert list(PLANS) == list(zoo.MODELS)


def test_the_command_trains_the_plan_of_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(train, "train_zoo", lambda *arguments: given.append(arguments[:4]))
    command.main(["train", "--model", "deep", "--out", str(tmp_path), "--threads", "2"])
    command.main(["train", "--out", str(tmp_path)])
    assert given == [(PLANS["deep"], tmp_path, 0, 2), (PLANS["demo"], tmp_path, 0, 1)]


def test_evaluate_asks_for_the_adapters_that_are_there(
    monkeypatch: pytest.MonkeyPatch, trained: tuple[Path, list[str]]
) -> None:
    asked: list[list[str]] = []

    def no_rows(base: Path, adapters: dict[str, Path], *_: Any) -> list[evaluate.Row]:
        asked.append(list(adapters))
        return []

    monkeypatch.setattr(evaluate, "evaluate", no_rows)
    command.main(["evaluate", "--checkpoints", str(trained[0])])
    command.main(["evaluate", "--tasks", "sum"])
    assert asked == [sorted(PLANS["deep"].recipes), ["sum"]]
