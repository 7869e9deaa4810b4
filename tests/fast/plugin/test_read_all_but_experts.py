"""What SGLang's loader is given with tiers: every tensor of every file but the routed experts'."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.model_loader import loader

from sgl_esft import hook_ledger, sglang_api
from sgl_esft.plugin import hook_table, weave_hooks
from sgl_esft.quant.write import quantise_checkpoint
from tests.fast.conftest import SMALL
from tests.support.adapter_factory import write_random_base


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_api, "tp_rank", lambda: 0)


def read(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(map(str, folder.glob("*.safetensors")))
    return dict(weave_hooks.read_all_but_experts(files, 8, drop_cache_after_load=True))


@pytest.mark.parametrize("architecture", ["DeepseekV2ForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("scheme", [None, "int8"])
def test_all_but_routed_experts_are_given(
    tmp_path: Path, architecture: str, scheme: str | None
) -> None:
    """Shared experts and gates are: their names say `experts` or `gate` too."""
    base = tmp_path / "base"
    write_random_base(base, architecture, seed=1, num_shards=2, **SMALL)
    if scheme is not None:
        quantise_checkpoint(base, scheme, tmp_path / scheme)
        base = tmp_path / scheme
    stored = {k: v for file in base.glob("*.safetensors") for k, v in load_file(file).items()}
    given = read(base)
    left = stored.keys() - given.keys()
    assert left == {name for name in stored if ".experts." in name}
    assert left
    assert all(torch.equal(given[name], stored[name]) for name in given)


def test_both_of_sglangs_readers_are_replaced() -> None:
    """Which one runs is said by flags of SGLang's; what they call is what the hooks name."""
    source = inspect.getsource(loader.DefaultModelLoader._get_weights_iterator)
    names = [hook.target.rpartition(".")[2] for hook in hook_table.TIER_HOOKS]
    assert len(names) == 2
    assert all(f"= {name}(" in source for name in names)
    for hook in hook_table.TIER_HOOKS:
        hook_ledger.check_signature(hook)
