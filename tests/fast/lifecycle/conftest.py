"""The adapters and the library that most tests ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fast.lifecycle.site import Site
from tests.support.adapter_factory import write_random_adapter, write_random_base

SMALL = {"hidden_size": 16, "moe_intermediate_size": 8, "n_routed_experts": 8, "vocab_size": 300}


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and three adapters of at most two experts a layer, not to be written to."""
    root = tmp_path_factory.mktemp("small")
    write_random_base(root / "base", "DeepseekV2ForCausalLM", seed=1, **SMALL)
    for seed, name in enumerate(("math", "law", "code")):
        write_random_adapter(root / name, root / "base", seed=seed, max_experts=2)
    return root


@pytest.fixture
def site(root: Path) -> Site:
    return Site(root)
