"""What the prefix cache tells one key of another's prompts, isolated by key and not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgl_esft import zoo
from tests.server.streams import body, post
from tests.support.guarded import CLIENT_KEY, TENANT_KEY, Guarded
from tests.support.servers import Server, ServerPool, ServerSpec

pytestmark = pytest.mark.server

SECRET = "the launch code of the other key is " + "seven " * 12


@pytest.fixture
def isolated(tmp_path_factory: pytest.TempPathFactory, server_pool: ServerPool) -> Server:
    keys = tmp_path_factory.mktemp("isolated") / "keys.json"
    both = (("client", CLIENT_KEY), ("tenant", TENANT_KEY))
    keys.write_text(json.dumps({"keys": [{"name": name, "key": key} for name, key in both]}))
    keys.chmod(0o600)
    return server_pool.get(_spec(keys))


def _spec(keys: Path) -> ServerSpec:
    adapters = (("reverse", zoo.adapter_paths()["reverse"]),)
    args = ("--api-keys-file", str(keys), "--isolate-prefix-cache", "--enable-cache-report")
    return ServerSpec(zoo.base_path(), adapters, args)


def cached(server: Server, key: str, text: str = SECRET, **fields: object) -> int:
    """Tokens of a prompt that the cache had."""
    answer = post(server, key, "/generate", body(1, text, **fields))
    assert answer.status_code == 200, answer.text
    return int(answer.json()["meta_info"]["cached_tokens"])


def test_another_keys_prompt_is_seen_without(guarded: Guarded) -> None:
    assert cached(guarded.server, TENANT_KEY) == 0
    assert cached(guarded.server, CLIENT_KEY) > 0
    assert cached(guarded.server, CLIENT_KEY, cache_salt="word") == 0
    assert cached(guarded.server, CLIENT_KEY, cache_salt="word") > 0
    assert cached(guarded.server, TENANT_KEY, cache_salt="word") == 0


def test_another_keys_prompt_is_not_seen_with(isolated: Server) -> None:
    """On every route that has it from its own key."""
    assert cached(isolated, TENANT_KEY) == 0
    assert cached(isolated, TENANT_KEY) > 0
    assert cached(isolated, CLIENT_KEY) == 0
    batch = body(1, [SECRET, SECRET + "more "])  # type: ignore[arg-type]
    answers = post(isolated, CLIENT_KEY, "/generate", batch).json()
    assert all(each["meta_info"]["cached_tokens"] > 0 for each in answers)
    for route, asked in (
        ("/v1/completions", {"prompt": "openai " + SECRET}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}]}),
    ):
        seen = [_cached_of_openai(isolated, key, route, asked) for key in (TENANT_KEY, CLIENT_KEY)]
        assert seen == [0, 0]
        assert _cached_of_openai(isolated, CLIENT_KEY, route, asked) > 0


def _cached_of_openai(server: Server, key: str, route: str, asked: dict[str, object]) -> int:
    sent = {"model": "base", "max_tokens": 1, **asked}
    usage = post(server, key, route, sent).json()["usage"]
    return int((usage["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"])
