"""The demo zoo: its tasks, the ESFT method, and the committed checkpoints themselves."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors import safe_open

from sgl_esft import zoo
from sgl_esft.errors import ConfigError
from sgl_esft.formats.adapter_config import write_expert_config
from sgl_esft.tools.extract import extract_adapter
from sgl_esft.tools.select import ScoreKind, read_scores
from sgl_esft.zoo import corpus as base_corpus
from sgl_esft.zoo import esft, evaluate, lexicon, own_task, serving, taskset, tokenizer, train
from sgl_esft.zoo.batches import batches, by_length, to_batch
from sgl_esft.zoo.model import exact_match, greedy_answers, load_model, moe_layers, new_model
from tests.support.processes import assert_gone

if TYPE_CHECKING:
    from transformers import DeepseekV2ForCausalLM

ADAPTERS = sorted(zoo.adapter_paths())


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def base() -> DeepseekV2ForCausalLM:
    return load_model(zoo.base_path())


def adapter_config(name: str) -> dict[str, dict[str, list[int]]]:
    config = json.loads((zoo.adapter_paths()[name] / "expert_cfg.json").read_text())
    assert isinstance(config, dict)
    return config


def expert_counts(name: str) -> list[int]:
    return [len(ids) for ids in adapter_config(name)["experts"].values()]


def with_adapter(base: DeepseekV2ForCausalLM, name: str) -> DeepseekV2ForCausalLM:
    """`base` with the adapter's experts written over its own, by the names in its file."""
    model = copy.deepcopy(base)
    blocks = moe_layers(model)
    with safe_open(zoo.adapter_paths()[name] / "model.safetensors", "pt") as file:
        for key in list(file.keys()):
            _, _, layer, _, _, expert, matrix, _ = key.split(".")
            gate_up = blocks[int(layer)].get_parameter("experts.gate_up_proj").data[int(expert)]
            down = blocks[int(layer)].get_parameter("experts.down_proj").data[int(expert)]
            gate, up = gate_up.chunk(2)
            target = {"gate_proj": gate, "up_proj": up, "down_proj": down}[matrix]
            target.copy_(file.get_tensor(key))
    return model


# --- tasks -------------------------------------------------------------------------------


def test_importing_the_zoo_imports_no_torch() -> None:
    # The parent package may import torch for its start-up shim, so a bare one stands in for it.
    script = (
        "import sys, types\n"
        "package = types.ModuleType('sgl_esft')\n"
        f"package.__path__ = [{str(Path(zoo.__file__).parent.parent)!r}]\n"
        "sys.modules['sgl_esft'] = package\n"
        "import sgl_esft.zoo as zoo\n"
        "assert zoo.held_out('sum', 3)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy import'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize(
    ("task", "text", "answer"),
    [
        ("caesar", "hello", "khoor"),
        ("caesar", "xyz", "abc"),
        ("date", "2024-03-07", "7 Mar 2024"),
        ("intent", "please play some jazz tonight", "music"),
        ("reverse", "hello", "olleh"),
        ("sum", "27+85", "112"),
        ("translate", "old wolf sings here", "tiro yoni topa wopu"),
    ],
)
def test_task_answers(task: str, text: str, answer: str) -> None:
    assert taskset.TASKS[task].example(text) == zoo.Example(f"{text} -> ", answer)


def test_every_intent_is_found_again() -> None:
    seen = set()
    for patterns, fillers in lexicon.INTENTS.values():
        for filler in fillers:
            seen |= {pattern.format(filler) for pattern in patterns}
    for intent, (patterns, fillers) in lexicon.INTENTS.items():
        for text in (pattern.format(filler) for pattern in patterns for filler in fillers):
            assert taskset.intent_of(f"please {text} tonight") == intent
    assert len(seen) == 240  # no request belongs to two intents
    with pytest.raises(ValueError, match="no intent"):
        taskset.intent_of("sing me to sleep")


@pytest.mark.parametrize("name", zoo.tasks())
def test_held_out_is_never_trained_on(name: str) -> None:
    held = {example.prompt for example in zoo.held_out(name, 200)}
    assert len(held) == 200
    trained = {e.prompt for e in islice(taskset.training_examples(taskset.TASKS[name], 0), 20_000)}
    assert len(trained) > 1000
    assert not held & trained


def test_the_base_corpus_holds_no_held_out_text_and_echoes_what_has_no_tag() -> None:
    lines = list(islice(base_corpus.corpus(0), 20_000))
    assert {line.prompt.split(":")[0] for line in lines} >= {s.tag for s in base_corpus.SKILLS}
    for line in lines:
        text = line.prompt.removesuffix(taskset.ARROW).split(": ")[-1]
        assert not taskset.is_held_out(text)
    untagged = [line for line in lines if ":" not in line.prompt]
    assert len(untagged) > 3000
    assert all(line.prompt == line.answer + taskset.ARROW for line in untagged)


def test_no_base_skill_is_an_adapter_task() -> None:
    for skill in base_corpus.SKILLS:
        texts = [skill.draw(Random(seed)) for seed in range(50)]
        for task in taskset.TASKS.values():
            if task.draw is skill.draw:
                same = sum(task.solve(text) == skill.solve(text) for text in texts)
                assert same < 10, (skill.tag, task.name)


def test_examples_are_the_same_for_the_same_seed_only() -> None:
    task = taskset.TASKS["reverse"]
    first, again = (list(islice(taskset.training_examples(task, 5), 50)) for _ in range(2))
    assert first == again
    assert first != list(islice(taskset.training_examples(task, 6), 50))
    assert zoo.held_out("reverse", 50) == zoo.held_out("reverse", 50)


def test_too_few_held_out_texts_is_an_error() -> None:
    constant = taskset.Task("constant", "", lambda _: "aaa", str)
    with pytest.raises(ValueError, match="fewer than 3"):
        taskset.held_out(constant, 3)


# --- tokenizer and batches ---------------------------------------------------------------


def test_the_saved_tokenizer_agrees_with_ours() -> None:
    from transformers import AutoTokenizer  # after sgl_esft, which repairs torchvision for it

    saved = AutoTokenizer.from_pretrained(zoo.base_path())
    text = "Hello, 27+15 -> ~!\n"
    assert saved(text)["input_ids"] == tokenizer.encode(text)
    assert saved.decode(tokenizer.encode("two  words -> ")) == "two  words -> "
    assert saved.eos_token_id == tokenizer.END_ID == saved("\n")["input_ids"][0]
    assert saved("é")["input_ids"] == [tokenizer.UNKNOWN_ID]
    messages = [{"role": "user", "content": "hello -> "}]
    assert saved.apply_chat_template(messages, tokenize=False) == "hello -> "


def test_a_batch_weighs_the_answer_and_its_end() -> None:
    batch = to_batch([zoo.Example("ab -> ", "ba"), zoo.Example("c -> ", "c")])
    assert batch.ids.shape == (2, 9)
    predicted = batch.ids[:, 1:][batch.weights[:, :-1] > 0]
    assert predicted.tolist() == tokenizer.encode("ba\nc\n")
    assert (batch.ids[1, 7:] == tokenizer.PAD_ID).all()


def test_batches_hold_every_example_once() -> None:
    window = list(islice(base_corpus.corpus(1), 2048))
    seen: list[str] = []
    for batch in batches(iter(window), 1024, 0.1, 0):
        seen += [tokenizer.decode(row) for row in batch.ids.tolist()]
        if len(seen) >= 2048:
            break
    assert sorted(seen) == sorted(example.prompt + example.answer for example in window)


# --- the ESFT method ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gate", "token"])
def test_scores_sum_to_one_and_follow_the_router(kind: ScoreKind) -> None:
    model = new_model(0).eval()
    for block in moe_layers(model).values():
        # A router of zeros ties all experts, so every token takes the same four, evenly.
        block.get_parameter("gate.weight").data.zero_()
    scores = esft.expert_scores(model, [torch.arange(20)[None]], kind)
    assert sorted(scores) == [1, 2, 3]
    for score in scores.values():
        assert sorted(score) == list(range(16))
        assert sorted(score.values()) == pytest.approx([0.0] * 12 + [0.25] * 4)


def test_gate_and_token_scores_are_different_measures(base: DeepseekV2ForCausalLM) -> None:
    ids = [to_batch(group).ids for group in by_length(zoo.held_out("reverse", 30))]
    gate, token = esft.expert_scores(base, ids, "gate"), esft.expert_scores(base, ids, "token")
    assert any(gate[layer] != pytest.approx(token[layer], abs=1e-3) for layer in gate)


def test_finetuning_changes_the_chosen_experts_and_nothing_else(
    base: DeepseekV2ForCausalLM, tmp_path: Path
) -> None:
    recipe = train.Recipe("gate", 0.3, train.Training(steps=2, tokens=256, peak=1e-3, warmup=1))
    before = copy.deepcopy(base.state_dict())
    model, experts = train.finetune(base, taskset.TASKS["sum"], recipe, 0, lambda _: None)
    assert all(torch.equal(before[name], now) for name, now in base.state_dict().items())
    for name, after in model.state_dict().items():
        if ".mlp.experts." not in name:
            assert torch.equal(before[name], after), name
            continue
        chosen = set(experts[int(name.split(".")[2])])
        assert 0 < len(chosen) < len(after)
        changed = {e for e in range(len(after)) if not torch.equal(before[name][e], after[e])}
        assert changed == chosen
    esft.save_adapter(model, experts, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert len(list(file.keys())) == 3 * sum(map(len, experts.values()))


def test_the_balancing_loss_is_one_when_even_and_more_when_not() -> None:
    even = esft.Routing(torch.full((4, 4), 0.25), torch.arange(4)[:, None])
    skewed = esft.Routing(torch.tensor([[0.97, 0.01, 0.01, 0.01]] * 4), torch.zeros(4, 1).long())
    assert train._imbalance(even).item() == pytest.approx(1)
    assert train._imbalance(skewed).item() == pytest.approx(0.97 * 4)


# --- the committed checkpoints -----------------------------------------------------------


def test_there_is_an_adapter_for_every_task_and_the_zoo_is_small() -> None:
    assert list(zoo.tasks()) == ADAPTERS
    assert len(ADAPTERS) >= 4
    folder = zoo.base_path().parent
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert 1e6 < size < 25e6


def test_expert_counts_differ_by_layer_and_by_adapter() -> None:
    counts = {name: expert_counts(name) for name in ADAPTERS}
    assert all(len(set(per_layer)) > 1 for per_layer in counts.values()), counts
    assert len({max(per_layer) for per_layer in counts.values()}) > 1, counts
    assert len({tuple(per_layer) for per_layer in counts.values()}) > 2, counts


@pytest.mark.parametrize("name", zoo.tasks())
def test_an_adapter_folder_holds_the_experts_it_names(name: str) -> None:
    config = adapter_config(name)
    assert not config["shared_experts"]
    assert not config["non_expert_modules"]
    wanted = {
        f"model.layers.{layer}.mlp.experts.{expert}.{matrix}_proj.weight"
        for layer, ids in config["experts"].items()
        for expert in ids
        for matrix in ("gate", "up", "down")
    }
    assert len(wanted) > 9
    with (
        safe_open(zoo.adapter_paths()[name] / "model.safetensors", "pt") as adapter,
        safe_open(zoo.base_path() / "model.safetensors", "pt") as whole,
    ):
        assert set(adapter.keys()) == wanted
        for key in wanted:
            tuned, original = adapter.get_tensor(key), whole.get_tensor(key)
            assert tuned.shape == original.shape
            assert tuned.dtype == original.dtype == torch.float32
            assert not torch.equal(tuned, original)


def test_the_base_checkpoint_names_every_expert_apart() -> None:
    config = json.loads((zoo.base_path() / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV2ForCausalLM"]
    assert config["model_type"] == "deepseek_v2"
    with safe_open(zoo.base_path() / "model.safetensors", "pt") as file:
        experts = [key for key in list(file.keys()) if ".mlp.experts." in key]
    layers = config["num_hidden_layers"] - config["first_k_dense_replace"]
    assert len(experts) == 3 * layers * config["n_routed_experts"]


@pytest.mark.parametrize("name", zoo.tasks())
def test_an_adapter_solves_its_task_and_the_base_does_not(
    base: DeepseekV2ForCausalLM, name: str
) -> None:
    examples = zoo.held_out(name, 40)
    assert exact_match(base, examples) < 0.3
    assert exact_match(with_adapter(base, name), examples) > 0.9


def test_base_and_two_adapters_answer_one_prompt_in_three_ways(
    base: DeepseekV2ForCausalLM,
) -> None:
    models = [base, with_adapter(base, "reverse"), with_adapter(base, "caesar")]
    answers = [greedy_answers(model, ["stone -> "]) for model in models]
    assert answers == [["stone"], ["enots"], ["vwrqh"]]


def test_the_record_is_of_what_is_here() -> None:
    record = json.loads((zoo.base_path().parent / "zoo.json").read_text())
    assert sorted(record["adapters"]) == ADAPTERS
    for name, entry in record["adapters"].items():
        assert list(entry["experts_per_layer"].values()) == expert_counts(name)
        assert entry["base_exact_match"] < 0.3
        assert entry["adapter_exact_match"] > 0.9


# --- evaluate ----------------------------------------------------------------------------


def test_score_ends_an_answer_at_the_newline() -> None:
    examples = [zoo.Example("a -> ", "a"), zoo.Example("b -> ", "b")]
    assert evaluate.score(["a\nmore", "bb"], examples) == 0.5
    with pytest.raises(ValueError, match="longer"):
        evaluate.score(["a"], examples)


def test_agreement_is_a_share_and_the_table_shows_percent_and_dashes() -> None:
    assert evaluate.agreement(["a", "b", "c", "d"], ["a", "b", "c", "x"]) == 0.75
    rows = [evaluate.Row("sum", 0.0, 0.985, 0.985, 1.0), evaluate.Row("date", 0.01, 1.0)]
    table = evaluate.format_table(rows, 200).splitlines()
    assert table[2] == "| sum | 0.0 | 98.5 | 98.5 | 100.0 |"
    assert table[3] == "| date | 1.0 | - | 100.0 | - |"


def test_ending_a_server_ends_the_processes_it_started() -> None:
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        child = int(process.stdout.readline())
        os.kill(child, 0)
        serving._end_group(process)
        assert process.returncode is not None
    assert_gone([child])


OWN = [{"prompt": f"{word} -> ", "answer": f"{word}s"} for word in ("cat", "house", "tree")]


def write_lines(path: Path, lines: list[object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_own_examples_are_scored_and_train_the_listed_experts_only(tmp_path: Path) -> None:
    """A layer may have none; `extract` finds exactly those that were listed."""
    examples = write_lines(tmp_path / "own.jsonl", [*OWN])
    out = tmp_path / "scores.json"
    assert own_task.score(zoo.base_path(), examples, "token", out) == 3
    scores = read_scores(out, "token")
    assert sorted(scores) == [1, 2, 3]
    assert all(sum(layer.values()) == pytest.approx(1) for layer in scores.values())
    # Those that the examples do use: an expert that no token visits does not change.
    best = {layer: max(scores[layer], key=lambda e: scores[layer][e]) for layer in (1, 3)}
    experts = {layer: (expert,) for layer, expert in best.items()}
    config, tuned = tmp_path / "expert_cfg.json", tmp_path / "tuned"
    write_expert_config(config, experts)
    own_task.tune(zoo.base_path(), examples, config, 2, tuned, lambda _: None)
    found = extract_adapter(zoo.base_path(), tuned, tmp_path / "adapter")
    assert dict(found.experts) == experts
    with pytest.raises(ConfigError, match="exists"):
        own_task.score(zoo.base_path(), examples, "token", out)
    with pytest.raises(ConfigError, match="exists"):
        own_task.tune(zoo.base_path(), examples, config, 2, tuned, lambda _: None)


GOOD = json.dumps(OWN[0]) + "\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no examples"),
        (GOOD + "not json", "line 2"),
        (GOOD + '{"prompt": "a"}', "line 2"),
        (GOOD + '["prompt", "answer"]', "line 2"),
        (GOOD + '{"prompt": "a", "answer": 1}', "line 2"),
        (GOOD + '{"prompt": "", "answer": "a"}', "line 2"),
        (GOOD + '{"prompt": "caf\u00e9", "answer": "a"}', "ASCII"),
    ],
)
def test_bad_examples_are_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=reason):
        list(own_task.read_examples(tmp_path / "own.jsonl"))
