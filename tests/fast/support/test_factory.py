"""The random checkpoints are whole for transformers too, and an adapter shows in the output."""

from pathlib import Path

import pytest
import torch

from sgl_esft.tools.merge import merge_adapter
from tests.support.adapter_factory import (
    SERVED_ARCHITECTURES,
    write_random_adapter,
    write_random_base,
)

PROMPTS = ("hello world", "The quick brown fox", "éß")


def greedy(folder: Path, new_tokens: int = 12) -> list[list[int]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        assert tokenizer.decode(ids[0]) == prompt
        with torch.inference_mode():
            out = model.generate(ids, max_new_tokens=new_tokens, do_sample=False)
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SERVED_ARCHITECTURES)
def test_transformers_loads_it_and_experts_matter(architecture: str, tmp_path: Path) -> None:
    base = write_random_base(tmp_path / "base", architecture, seed=1)
    adapter = write_random_adapter(tmp_path / "adapter", base, seed=2)
    merge_adapter(base, adapter, tmp_path / "merged")
    before, after = greedy(base), greedy(tmp_path / "merged")
    assert len({tuple(answer) for answer in before}) == len(PROMPTS)
    assert all(len(set(answer)) > 6 for answer in before), "no answer repeats itself"
    assert all(one != other for one, other in zip(before, after, strict=True))


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_random_base(tmp_path / name, "Qwen3MoeForCausalLM", seed=seed)
        write_random_adapter(tmp_path / f"x{name}", tmp_path / name, seed=seed)
    for prefix in ("", "x"):
        a, b, c = ((tmp_path / f"{prefix}{n}/model.safetensors").read_bytes() for n in "abc")
        assert a == b != c
