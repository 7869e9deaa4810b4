"""Other architectures than the demo's scale too: KV of grouped heads, sigmoid routers with a bias.

Base and adapters in mixed batches, while the number of devices changes; what is right is what
plain SGLang answers with the merged checkpoints. Sixteen experts over three devices: uneven.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.elasticmoe.load import scale
from tests.support.families import Families
from tests.support.references import NUM_NEW_TOKENS, Reference, reference_of
from tests.support.servers import Server, ServerPool, ServerSpec

pytestmark = pytest.mark.server

ARGS = ("--elastic", "--max-devices", "3", "--device-memory", "64MiB", "--standby-ranks", "0")
WALK = (2, 3, 1)


@pytest.fixture(
    params=["Qwen3MoeForCausalLM", pytest.param("DeepseekV3ForCausalLM", marks=pytest.mark.soak)]
)
def served(
    request: pytest.FixtureRequest, families: Families, server_pool: ServerPool, tmp_path: Path
) -> Iterator[tuple[Server, Reference]]:
    family = families.get(request.param)
    reference = reference_of(family, server_pool)
    server = Server(ServerSpec(family.base, family.named, ARGS), tmp_path / "log")
    try:
        server.wait_until_ready()
        yield server, reference
    finally:
        server.stop()


def wrong(server: Server, reference: Reference) -> list[tuple[str | None, int]]:
    """All requests in one batch; those whose tokens are not the merged model's."""
    numbers = range(len(reference.prompts))
    asked = list(itertools.product(reference.answers, numbers))
    found = server.token_ids(
        [reference.prompts[i] for _, i in asked], [name for name, _ in asked], NUM_NEW_TOKENS
    )
    pairs = zip(asked, found, strict=True)
    return [(name, i) for (name, i), tokens in pairs if tokens != reference.answers[name][i]]


def wrong_until(
    is_over: threading.Event, server: Server, reference: Reference
) -> list[tuple[str | None, int]]:
    """Over and over."""
    found = []
    while not is_over.is_set():
        found += wrong(server, reference)
    return found


def test_answers_are_the_merged_models_while_devices_come_and_go(
    served: tuple[Server, Reference],
) -> None:
    server, reference = served
    assert wrong(server, reference) == []
    with ThreadPoolExecutor(1) as pool:
        for size in WALK:
            is_over = threading.Event()
            meanwhile = pool.submit(wrong_until, is_over, server, reference)
            operation = asyncio.run(scale(server.url, {"dp_size": size}))
            is_over.set()
            assert meanwhile.result() == []
            assert operation["state"] == "succeeded", (operation, server.log())
            assert wrong(server, reference) == []
