"""What every unit test needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sgl_esft.weave import expert_tensor
from tests.support.adapter_factory import write_random_adapter, write_random_base

SMALL = {"hidden_size": 16, "moe_intermediate_size": 8, "n_routed_experts": 8, "vocab_size": 300}


@pytest.fixture(autouse=True)
def _own_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has one arena a device, a test has none of another test's."""
    monkeypatch.setattr(expert_tensor, "_arenas", {})


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small matrices on shared cores: OpenMP's threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and three adapters of at most two experts a layer, not to be written to."""
    root = tmp_path_factory.mktemp("small")
    write_random_base(root / "base", "DeepseekV2ForCausalLM", seed=1, **SMALL)
    for seed, name in enumerate(("math", "law", "code")):
        write_random_adapter(root / name, root / "base", seed=seed, max_experts=2)
    return root
