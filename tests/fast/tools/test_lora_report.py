"""`sgl-esft inspect` of LoRA folders: which kind it is, and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_esft.tools.cli import main
from tests.support.base_factory import write_random_base
from tests.support.lora_factory import LORA_WEIGHTS, write_random_lora

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_base(tmp_path_factory.mktemp("tools") / "base", "Qwen2MoeForCausalLM", 1)


@pytest.fixture
def lora(base: Path, tmp_path: Path) -> Path:
    return write_random_lora(
        tmp_path / "tone", base, 2, rank=4, targets=("q_proj", "down_proj"), layers=(0, 3)
    )


def test_with_and_without_a_base(base: Path, lora: Path, capsys: Capture) -> None:
    for more, named in (([], None), (["--base", str(base)], str(base))):
        assert main(["inspect", str(lora), "--json", *more]) == 0
        assert json.loads(capsys.readouterr().out) == {
            "kind": "lora",
            "path": str(lora.resolve()),
            "base": named,
            "rank": 4,
            "scaling": 2.0,
            "num_bytes": sum(t.nbytes for t in load_file(lora / LORA_WEIGHTS).values()),
            "targets": {"down_proj": 2, "q_proj": 2},
        }


def test_the_table_says_what_it_is(lora: Path, capsys: Capture) -> None:
    assert main(["inspect", str(lora)]) == 0
    out = capsys.readouterr().out
    assert "kind      LoRA" in out
    assert "rank      4, scaling 2" in out
    assert "     2  q_proj" in out


@pytest.mark.parametrize("has_base", [True, False])
def test_faults_are_called_as_the_server_calls_them(
    has_base: bool, base: Path, lora: Path, tmp_path: Path, capsys: Capture
) -> None:
    more = ["--base", str(base)] if has_base else []
    held = load_file(lora / LORA_WEIGHTS)
    name = next(name for name in held if "lora_B" in name)
    save_file({**held, name: torch.full_like(held[name], torch.inf)}, lora / LORA_WEIGHTS)
    assert main(["inspect", str(lora), *more]) == 2
    assert "NaN or an infinity" in capsys.readouterr().err
    (lora / "expert_cfg.json").write_text("{}")
    assert main(["inspect", str(lora), *more]) == 2
    assert "an adapter is of one kind" in capsys.readouterr().err


def test_of_another_base(lora: Path, tmp_path: Path, capsys: Capture) -> None:
    other = write_random_base(tmp_path / "other", "Qwen3MoeForCausalLM", 1)
    assert main(["inspect", str(lora), "--base", str(other)]) == 2
    assert "this base takes LoRA in k_proj, o_proj, q_proj, v_proj" in capsys.readouterr().err
