"""A server that composes its batches by adapter answers as before, and says what it does."""

from __future__ import annotations

import re

import pytest
import requests

from sgl_esft import zoo
from tests.support.servers import ServerPool, ServerSpec

METRIC = re.compile(r"^sgl_esft:(\w+)\{[^}]*\} (\S+)$", re.MULTILINE)
PROMPTS = [f"{word} -> " for word in ("coffee", "river")]


@pytest.fixture
def few_at_once() -> ServerSpec:
    """Four requests run at once, so that others wait."""
    return ServerSpec(args=("--max-running-requests", "4", "--enable-metrics"))


def test_later_requests_go_ahead_and_answers_stay(
    few_at_once: ServerSpec, server_pool: ServerPool
) -> None:
    server = server_pool.get(few_at_once)
    names = [None, *sorted(zoo.adapter_paths())]
    asked = [(prompt, name) for prompt in PROMPTS for name in names]
    alone = [server.token_ids([prompt], [name])[0] for prompt, name in asked]
    together = server.token_ids([p for p, _ in asked], [n for _, n in asked])
    assert together == alone
    found = dict(METRIC.findall(requests.get(f"{server.url}/metrics", timeout=30).text))
    assert float(found["overtaking_admissions_total"]) > 0
