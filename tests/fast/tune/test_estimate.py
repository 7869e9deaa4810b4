"""What `sgl-esft tune --plan` says, against arithmetic by hand and against what PyTorch keeps."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_esft.errors import AdapterMismatchError, UnsupportedModelError
from sgl_esft.formats.adapter_config import read_expert_config, write_expert_config
from sgl_esft.tools import cli
from sgl_esft.tune.base import load_base
from sgl_esft.tune.estimate import DataSize, TunePlan, lines, plan_tuning
from sgl_esft.tune.experts import tune_only
from sgl_esft.tune.run_folder import Settings
from sgl_esft.tune.trainer import tune
from tests.support.base_factory import write_random_base
from tests.support.servers import ROOT

V2_LITE = ROOT / "tests" / "data" / "deepseek-v2-lite.json"
INTENT = ROOT / "tests" / "data" / "esft" / "token-intent.json"
FACTOR = 1.8  # by which the estimate of activations may be off; in float32 it is high


def test_v2_lite() -> None:
    plan = plan_tuning(V2_LITE, read_expert_config(INTENT), Settings(batch_size=1))
    expert = 3 * 2048 * 1408
    assert plan.num_trained == 124 * expert
    assert plan.trained == 124 * expert * (16 + 2)
    assert plan.weights == pytest.approx(15.706e9 * 2, rel=1e-3)  # what its model card says
    routed = 26 * 6 * expert
    others = 15.706e9 - 26 * 64 * expert - 102400 * 2048
    assert plan.flops_per_token == pytest.approx(4 * (routed + others) + 2 * routed, rel=1e-3)


def test_recomputing_keeps_less_and_does_more() -> None:
    experts = read_expert_config(INTENT)
    kept, again = (
        plan_tuning(V2_LITE, experts, Settings(recompute=recompute)) for recompute in (False, True)
    )
    assert again.activations < kept.activations / 3
    assert 1.3 < again.flops_per_token / kept.flops_per_token < 1.5
    assert (again.weights, again.trained) == (kept.weights, kept.trained)


def test_a_batch_of_half_the_tokens_keeps_half() -> None:
    experts = read_expert_config(INTENT)
    whole = plan_tuning(V2_LITE, experts, Settings(max_length=2048))
    half = plan_tuning(V2_LITE, experts, Settings(max_length=1024))
    assert whole.activations == 2 * half.activations


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("vocab_size", [512, 8192])
@pytest.mark.parametrize("first_layer", [1, 3])
def test_activations_are_about_what_pytorch_keeps(
    tmp_path: Path, first_layer: int, vocab_size: int, dtype: str
) -> None:
    width = {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 4}
    more = {"vocab_size": vocab_size, "torch_dtype": dtype}
    base = write_random_base(tmp_path / "base", "Qwen3MoeForCausalLM", seed=0, **width, **more)
    experts = dict.fromkeys(range(first_layer, 4), (0, 1))
    settings = Settings(batch_size=2, max_length=64)
    plan = plan_tuning(base, experts, settings)
    estimated = plan.activations + (plan.num_trained * 2 if dtype == "bfloat16" else 0)
    gradients = 2 * 128 * vocab_size * 4  # of the logits, in float32: made in the backward pass
    kept = kept_by_pytorch(base, experts, settings) + gradients
    assert kept / FACTOR < estimated < kept * FACTOR, (kept, estimated)


def kept_by_pytorch(base: Path, experts: Any, settings: Settings) -> int:
    """Bytes that autograd keeps for the backward pass of one batch, each storage once."""
    loaded = load_base(base, "cpu")
    tune_only(loaded.blocks, experts)
    weights = {each.untyped_storage().data_ptr() for each in loaded.model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.randint(3, 200, (settings.batch_size, settings.max_length))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loaded.model(input_ids=ids, labels=ids).loss
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_it_is_printed_without_a_base(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["tune", "--plan", "--base", str(V2_LITE), "--experts", str(INTENT), "--batch-size", "1"]
    assert cli.main(argv) == 0
    printed = capsys.readouterr().out
    assert "1,072.7 M parameters" in printed
    assert "29.26 GiB" in printed


def test_experts_of_another_base_are_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(V2_LITE.read_text()), "n_routed_experts": 8}))
    with pytest.raises(AdapterMismatchError):
        plan_tuning(config, read_expert_config(INTENT), Settings())
    config.write_text("{}")
    with pytest.raises(UnsupportedModelError):
        plan_tuning(config, read_expert_config(INTENT), Settings())


def test_padding_is_what_random_batches_have() -> None:
    """Against batches that are drawn, as the Trainer draws them."""
    lengths, draw = [*range(1, 60), *[5] * 80, 900], random.Random(0)
    epochs = 300
    padded = 0
    for _ in range(epochs):
        draw.shuffle(lengths)
        padded += sum(4 * max(lengths[i : i + 4]) for i in range(0, len(lengths), 4))
    size = DataSize.of(lengths, 4)
    assert (size.num_rows, size.longest) == (140, 900)
    assert size.padded == pytest.approx(padded / epochs, rel=0.03)
    assert DataSize.of(lengths, 1).padded == sum(lengths)
    assert DataSize.of([3, 5], 99).padded == pytest.approx(10, abs=1)


def test_with_data_the_tokens_are_those_that_are_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same rows as `tune` reports, with rows that are cut; without the base's weights."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 32}
    base = write_random_base(tmp_path / "base", "Qwen3MoeForCausalLM", seed=1, **sizes)
    data, experts = tmp_path / "data.jsonl", tmp_path / "expert_cfg.json"
    rows = [{"prompt": "a" * n, "answer": "b"} for n in (1, 2, 3, 10, 50)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_expert_config(experts, {0: (1,)})
    settings = Settings(epochs=2, batch_size=1, max_length=20)
    told: list[str] = []
    tune(base, data, experts, tmp_path / "out", settings, report=told.append)
    bare = tmp_path / "bare"
    shutil.copytree(base, bare, ignore=shutil.ignore_patterns("*.safetensors*"))
    argv = ["tune", "--plan", "--base", str(bare), "--data", str(data), "--experts", str(experts)]
    more = ["--epochs", "2", "--batch-size", "1", "--max-length", "20", "--tflops", "1e-9"]
    assert cli.main([*argv, *more]) == 0
    printed, reported = capsys.readouterr()
    assert reported.splitlines() == told[:2]
    tokens = int(re.findall(r"4 rows, (\d+) tokens", told[0])[0])
    assert f"{tokens:,} tokens an epoch, padded, in 4 rows" in printed
    assert "1 rows of 12 tokens" in printed  # ten, the answer, its end
    flops = plan_tuning(bare, {0: (1,)}, settings).flops_per_token * tokens * 2
    assert f"{flops / 1e3 / 3600:,.2f} h" in printed
    assert "PFLOP for 2 epochs" in printed


def test_data_needs_a_folder_with_a_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    argv = ["tune", "--plan", "--base", str(V2_LITE), "--experts", str(INTENT)]
    assert cli.main([*argv, "--data", str(tmp_path / "data.jsonl")]) == 2
    assert "leave --data out" in capsys.readouterr().err


def test_little_work_is_not_none() -> None:
    plan = TunePlan(1, 2, 4, 0, 1000, DataSize(1, 10, 10))
    *_, work, hours = lines(plan, Settings(epochs=1), 100)
    assert "0.00000000001 PFLOP" in work
    assert float(hours.split()[0]) > 0


def test_what_is_needed_is_the_sum() -> None:
    assert TunePlan(1, 2, 4, 0, 0).total == 7
