"""`score` and `tune` on small random bases: what is read, learned, changed, and gone on from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sgl_esft.errors import AdapterMismatchError, ConfigError, UnsupportedModelError
from sgl_esft.formats.adapter_config import write_expert_config
from sgl_esft.formats.model_spec import read_moe_spec
from sgl_esft.tools.select import read_scores
from sgl_esft.tune.base import load_base, load_encoder
from sgl_esft.tune.examples import parse_example, read_examples
from sgl_esft.tune.experts import adapter_tensors, tune_only
from sgl_esft.tune.run_folder import Settings, training_folder
from sgl_esft.tune.score import Sampling, score
from sgl_esft.tune.tokens import IGNORED, TokenRow, collate
from sgl_esft.tune.trainer import tune
from tests.support.base_factory import EOS, SERVED_ARCHITECTURES, write_random_base

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 32}
CHAT = {
    "messages": [
        {"role": "user", "content": "cat"},
        {"role": "assistant", "content": "cats"},
        {"role": "user", "content": "dog"},
        {"role": "assistant", "content": "dogs"},
    ]
}
PAIR = {"prompt": "cat", "answer": "cats"}


def quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tune") / "base"
    return write_random_base(folder, "Qwen3MoeForCausalLM", seed=1, **SMALL)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    lines = [{"prompt": f"{i} + ", "completion": str(i * 7)} for i in range(10)]
    path.write_text("".join(json.dumps(line) + "\n" for line in [CHAT, PAIR, *lines]))
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_expert_config(tmp_path / "expert_cfg.json", {0: (1, 5), 1: tuple(range(8))})
    return tmp_path / "expert_cfg.json"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("not json", "not JSON"),
        ("[]", "not an object"),
        ('{"prompt": "a"}', "none of"),
        ('{"prompt": "a", "answer": 1}', "answer is no string"),
        ('{"prompt": "", "answer": "a"}', "prompt is no string"),
        ('{"prompt": "a", "answer": "b", "completion": "c"}', "none of"),
        ('{"messages": []}', "messages is not"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "has no answer"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "no prompt"),
        ('{"messages": [{"role": "user", "content": [1]}]}', "message 0 has content"),
        ('{"messages": ["a"]}', "message 0 is not"),
        (
            '{"messages": [{"role": "user", "content": "a"}, '
            '{"role": "assistant", "content": ""}]}',
            "message 1 is an answer of the assistant without text",
        ),
    ],
)
def test_a_bad_line_is_named_by_its_number(line: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f"{json.dumps(PAIR)}\n\n{line}\n")
    with pytest.raises(ConfigError, match=rf"data.jsonl, line 3: .*{reason}"):
        list(read_examples(path))


def test_files_without_examples_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="holds no examples"):
        list(read_examples(tmp_path / "empty.jsonl"))
    with pytest.raises(ConfigError, match="does not exist"):
        list(read_examples(tmp_path / "nowhere.jsonl"))


def learned(row: TokenRow) -> bytes:
    assert [
        i for i, label in zip(row.ids, row.labels, strict=True) if label not in (IGNORED, i)
    ] == []
    return "".join(chr(i) if i < 256 else "$" for i in row.labels if i != IGNORED).encode()


def test_only_answers_and_their_ends_are_learned(base: Path) -> None:
    encoder, pad = load_encoder(base)
    (pair,) = encoder.encode(parse_example("x", json.dumps(PAIR)))
    assert [label == IGNORED for label in pair.labels] == [True] * 3 + [False] * 5
    assert pair.ids[-1] == EOS
    (chat,) = encoder.encode(parse_example("x", json.dumps(CHAT)))
    mask = [label != IGNORED for label in chat.labels]
    assert mask == [False] * 3 + [True] * 5 + [False] * 3 + [True] * 5
    assert not pair.cut(3).is_learned
    batch = collate([pair, chat], pad)
    assert batch["labels"][0, len(pair.ids) :].eq(IGNORED).all()
    assert batch["attention_mask"].sum(1).tolist() == [len(pair.ids), len(chat.ids)]


@pytest.mark.parametrize("architecture", [*SERVED_ARCHITECTURES, "DeepseekV3ForCausalLM"])
def test_every_architecture_is_scored_and_computes_what_it_did(
    architecture: str, data: Path, tmp_path: Path
) -> None:
    """Both scores as ESFT publishes them; experts that were put apart give the same logits."""
    folder = write_random_base(tmp_path / "base", architecture, seed=1, num_hidden_layers=2)
    spec = read_moe_spec(folder)
    assert score(folder, data, tmp_path / "scores.json", Sampling(8), "cpu", quiet) == 8
    token = read_scores(tmp_path / "scores.json", "token")
    gate = read_scores(tmp_path / "scores.json", "gate")
    assert sorted(token) == sorted(gate) == list(spec.moe_layer_ids)
    assert all(sum(layer.values()) == pytest.approx(1) for layer in token.values())
    top = 1.0 if architecture != "DeepseekV2ForCausalLM" else 0.999
    assert all(0 < sum(layer.values()) <= top + 1e-6 for layer in gate.values())
    loaded = load_base(folder, "cpu")
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        before = loaded.model(ids).logits
        tune_only(loaded.blocks, dict.fromkeys(spec.moe_layer_ids, (0, 3)))
        assert torch.equal(loaded.model(ids).logits, before)


def test_every_expert_is_written_under_its_own_name(base: Path) -> None:
    """Untrained, the chosen experts are the base's, each of them."""
    loaded, was = load_base(base, "cpu"), load_file(base / "model.safetensors")
    layers = loaded.spec.moe_layer_ids
    tensors = dict(
        adapter_tensors(tune_only(loaded.blocks, dict.fromkeys(layers, (4, 1, 6))), loaded.spec)
    )
    assert len(tensors) == 3 * 3 * len(layers)
    assert all(torch.equal(tensor, was[name]) for name, tensor in tensors.items())


def test_a_batch_that_visits_no_trained_expert_is_trained_on(base: Path) -> None:
    loaded = load_base(base, "cpu")
    (tuned,) = tune_only(loaded.blocks, {0: (7,)}).values()
    ids = torch.arange(6).reshape(3, 2)  # of six other experts
    out = tuned(torch.randn(3, SMALL["hidden_size"]), ids, torch.full((3, 2), 0.5))
    out.sum().backward()
    assert tuned.down.grad is not None
    assert not tuned.down.grad.any()


def test_nothing_but_the_chosen_experts_has_gradients_or_changes(
    base: Path, data: Path, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sgl_esft.tune import trainer

    loaded = load_base(base, "cpu")
    before = {name: t.clone() for name, t in loaded.model.state_dict().items()}
    monkeypatch.setattr(trainer, "load_base", lambda *_: loaded)
    tune(base, data, config, tmp_path / "out", Settings(learning_rate=1e-2), report=quiet)
    after = loaded.model.state_dict()
    for name, tensor in before.items():
        held = name if name in after else name.replace(".experts.", ".experts.frozen.")
        assert torch.equal(after[held], tensor), name
    trained = {n: p for n, p in loaded.model.named_parameters() if p.requires_grad}
    assert sorted(len(p) for p in trained.values()) == [2, 2, 8, 8]
    written, was = (
        load_file(tmp_path / "out/model.safetensors"),
        load_file(base / "model.safetensors"),
    )
    assert len(written) == 10 * 3
    assert all(not torch.equal(tensor, was[name]) for name, tensor in written.items())
    assert not training_folder(tmp_path / "out").exists()


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(
    base: Path, data: Path, config: Path, tmp_path: Path
) -> None:
    settings = Settings(epochs=4, batch_size=4, learning_rate=1e-2, save_steps=5)
    tune(base, data, config, tmp_path / "whole", settings, report=quiet)

    def interrupt(line: str) -> None:
        if line.startswith("step 7/"):
            raise KeyboardInterrupt

    out = tmp_path / "resumed"
    with pytest.raises(KeyboardInterrupt):
        tune(base, data, config, out, settings, report=interrupt)
    with pytest.raises(ConfigError, match="Add --resume"):
        tune(base, data, config, out, settings, report=quiet)
    other = Settings(epochs=4, batch_size=4, learning_rate=1e-3, save_steps=5)
    with pytest.raises(ConfigError, match=r"another learning_rate \(then 0.01\)"):
        tune(base, data, config, out, other, resume=True, report=quiet)
    lines: list[str] = []
    tune(base, data, config, out, settings, resume=True, report=lines.append)
    assert "12 steps, going on after 5" in lines
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "resumed"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_what_cannot_be_trained_is_refused(
    base: Path, data: Path, config: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    write_expert_config(tmp_path / "other.json", {7: (1,)})
    with pytest.raises(AdapterMismatchError, match="another model"):
        tune(base, data, tmp_path / "other.json", out, Settings(), report=quiet)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(UnsupportedModelError, match="Supported"):
        tune(tmp_path / "llama", data, config, out, Settings(), report=quiet)
    with pytest.raises(ConfigError, match="--epochs"):
        Settings(epochs=0)
    with pytest.raises(ConfigError, match="no run to resume"):
        tune(base, data, config, out, Settings(), resume=True, report=quiet)
