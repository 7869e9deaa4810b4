"""Every command of the documents is run, and prints what the documents show.

`tests/repo/docs/blocks.py` says how a block is marked. A document is run in one shell; the server
is the
one that all tests share, or the one that the document starts. What needs an elastic server is run
by tests/server/test_elastic.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.repo.docs import session
from tests.repo.docs.blocks import pages_run_with, run_blocks
from tests.support.servers import ServerPool, ServerSpec

WITH_OWN_SERVER = pages_run_with("own server")
WITH_SERVER = [page for page in pages_run_with("server") if page not in WITH_OWN_SERVER]
WITH_ELASTIC_SERVER = pages_run_with("elastic server")
LONG = {"docs/guide_adapters.md"}  # a minute: it trains an adapter
WITHOUT_SERVER = [
    page
    for page in pages_run_with("shell")
    if page not in (*WITH_OWN_SERVER, *WITH_SERVER, *WITH_ELASTIC_SERVER)
]


@pytest.mark.parametrize("page", WITHOUT_SERVER)
def test_documents_without_a_server(page: str, tmp_path: Path) -> None:
    assert session.run(session.steps_of(run_blocks(page)), tmp_path) == []


@pytest.mark.server
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.full if page in LONG else ()) for page in WITH_SERVER],
)
def test_documents_with_the_shared_server(
    page: str, tmp_path: Path, server_pool: ServerPool
) -> None:
    server = server_pool.get(ServerSpec())
    steps = session.steps_of(run_blocks(page))
    assert session.run(steps, tmp_path, f"127.0.0.1:{server.port}") == []


@pytest.mark.full
@pytest.mark.parametrize("page", WITH_OWN_SERVER)
def test_documents_that_start_a_server(page: str, tmp_path: Path) -> None:
    assert session.run(session.steps_of(run_blocks(page)), tmp_path) == []
