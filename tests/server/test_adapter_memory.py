"""Less memory for adapters than adapters: they take turns, and one that never fits is refused."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import requests

from sgl_esft.memory.report import MemoryReport, PoolMemory
from tests.support.adapter_factory import write_random_adapter
from tests.support.families import Families, Family
from tests.support.references import NUM_NEW_TOKENS, reference_of
from tests.support.servers import Server, ServerPool, ServerSpec

pytestmark = [pytest.mark.server, pytest.mark.full]

ARCHITECTURE = "DeepseekV2ForCausalLM"


def num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.fixture(scope="module")
def budget(families: Families) -> int:
    """Room for the largest adapter, pages that end between experts included, but not for two."""
    sizes = sorted(num_bytes(folder) for _, folder in families.get(ARCHITECTURE).named)
    budget = sizes[-1] * 5 // 4
    assert sizes[0] + sizes[1] > budget
    return budget


@pytest.fixture
def family(families: Families) -> Family:
    return families.get(ARCHITECTURE)


@pytest.fixture
def server(family: Family, server_pool: ServerPool, budget: int) -> Server:
    return server_pool.get(
        ServerSpec(family.base, family.named, ("--adapter-memory", f"{budget}B"))
    )


def pool_of(server: Server) -> PoolMemory:
    report = MemoryReport.from_json(requests.get(f"{server.url}/v1/memory", timeout=60).json())
    pool = report.devices[0].pool
    assert pool is not None
    return pool


def test_adapters_take_turns(
    server: Server, family: Family, server_pool: ServerPool, budget: int
) -> None:
    """There are slots for all of them, but pages for one at a time."""
    reference = reference_of(family, server_pool)
    requests_ = [(name, i) for name in (None, *family.adapters) for i in range(8)]
    random.Random(3).shuffle(requests_)
    answers = server.token_ids(
        [reference.prompts[i] for _, i in requests_],
        [name for name, _ in requests_],
        NUM_NEW_TOKENS,
    )
    assert answers == [reference.answers[name][i] for name, i in requests_]
    pool = pool_of(server)
    assert pool.used_bytes + pool.free_bytes == pool.budget_bytes, "made at start, and kept"
    assert pool.num_destroyed == 0


def test_an_adapter_that_never_fits_is_refused(
    server: Server, family: Family, tmp_path: Path
) -> None:
    before = pool_of(server), server.adapter_names()
    experts = {layer: tuple(range(4)) for layer in (1, 2, 3)}
    folder = write_random_adapter(tmp_path / "large", family.base, seed=9, experts=experts)
    response = server.load("large", folder)
    assert response.status_code == 400
    message = response.json()["error_message"]
    assert message.startswith("DeviceMemoryError: adapter 'large' needs up to")
    assert message.endswith("raise --adapter-memory")
    assert (pool_of(server), server.adapter_names()) == before
