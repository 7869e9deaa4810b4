"""What a newcomer and an operator meet over HTTP, with keys: names, folders, errors, versions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import anthropic
import openai
import pytest
import requests

from sgl_esft import __version__, zoo
from tests.support.optional_metrics import lora_metrics, tier_metrics
from tests.support.servers import ROOT, Server, ServerPool, ServerSpec

pytestmark = pytest.mark.server

ADMIN, CLIENT, TENANT = (f"{name}-0123456789abcdef" for name in ("admin", "client", "tenant"))
KEYS: list[dict[str, Any]] = [
    {"name": "admin", "key": ADMIN, "admin": True},
    {"name": "client", "key": CLIENT},
    {"name": "tenant", "key": TENANT, "adapters": ["caesar"], "base_model": False},
]
FIELDS = {"message", "type", "param", "code"}
BASE = zoo.base_path()


@pytest.fixture(scope="module")
def server(server_pool: ServerPool, tmp_path_factory: pytest.TempPathFactory) -> Server:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    file.touch(0o600)
    file.write_text(json.dumps({"keys": KEYS}))
    return server_pool.get(ServerSpec(args=("--api-keys-file", str(file), "--enable-metrics")))


def ask(server: Server, method: str, path: str, key: str, body: Any = None) -> requests.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return requests.request(method, server.url + path, headers=headers, json=body, timeout=60)


def test_a_fresh_server_has_every_metric_of_the_grafana_file(server: Server) -> None:
    """First here: nothing has been asked of the model yet. Scaling's come with --elastic, those of
    experts in tiers with --expert-cache (test_tiers.py), LoRA's with its flags (test_lora.py).
    """
    asked = set(re.findall(r"\b(?:sgl_esft|sglang):\w+", grafana()))
    asked -= tier_metrics() | lora_metrics()
    told = set(re.findall(r"^([\w:]+)[{ ]", ask(server, "GET", "/metrics", ADMIN).text, re.M))
    assert len(asked) > 20
    assert asked - told == set()


def grafana() -> str:
    """All expressions of the dashboard."""
    document = json.loads((ROOT / "docs" / "grafana" / "sgl-esft.json").read_text())
    targets = (target for panel in document["panels"] for target in panel.get("targets", ()))
    return "\n".join(target["expr"] for target in targets)


@cache
def client_of(server: Server, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module", autouse=True)
def _clients_are_closed(server: Server) -> Iterator[None]:
    """Else their connections are garbage in another test."""
    yield
    for key in (CLIENT, ADMIN, TENANT):
        client_of(server, key).close()
    client_of.cache_clear()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("caesar", "caesar"),
        ("base:caesar", "caesar"),
        ("base", BASE.name),
        ("default", BASE.name),
        (str(BASE), BASE.name),
    ],
)
def test_a_model_is_retrieved_by_each_of_its_names(name: str, found: str, server: Server) -> None:
    """And answers requests by it."""
    client = client_of(server, CLIENT)
    model = client.models.retrieve(name)
    assert model.id == found
    assert found in [each.id for each in client.models.list()]
    assert client.completions.create(model=name, prompt="coffee -> ", max_tokens=1).choices


def test_a_key_of_one_adapter_sees_no_other(server: Server) -> None:
    client = client_of(server, TENANT)
    assert [model.id for model in client.models.list()] == ["caesar"]
    assert client.models.retrieve("base:caesar").id == "caesar"
    for name in ("reverse", "nobody", "base", str(BASE)):
        with pytest.raises(openai.PermissionDeniedError):
            client.models.retrieve(name)
    with pytest.raises(openai.PermissionDeniedError, match="did you mean 'caesar'"):
        client.completions.create(model="base:ceasar", prompt="x")
    with pytest.raises(openai.PermissionDeniedError) as refused:
        client.completions.create(model="revers", prompt="x")
    assert "reverse" not in str(refused.value)
    with pytest.raises(openai.NotFoundError, match="did you mean 'reverse'"):
        client_of(server, CLIENT).completions.create(model="revers", prompt="x")


@pytest.mark.parametrize("key", [ADMIN, CLIENT, TENANT])
def test_only_admins_see_folders(key: str, server: Server) -> None:
    calls: list[tuple[str, str, Any]] = [
        ("GET", "/model_info", None),
        ("GET", "/get_model_info", None),
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/caesar", None),
        ("GET", "/v1/adapters", None),
        ("GET", "/v1/adapters/caesar", None),
        ("GET", "/server_info", None),
        ("POST", "/generate", {"text": 5, "adapter": "caesar"}),
        ("POST", "/v1/completions", {"model": "caesar"}),
    ]
    told = "".join(ask(server, method, path, key, body).text for method, path, body in calls)
    assert (str(BASE) in told) is (key == ADMIN)
    assert (str(ROOT) in told) is (key == ADMIN)


ERRORS: list[tuple[str, str, str, Any, int]] = [
    ("GET", "/nowhere", ADMIN, None, 404),
    ("DELETE", "/generate", ADMIN, None, 405),
    ("POST", "/generate", "unknown-0123456789", {}, 401),
    ("POST", "/flush_cache", CLIENT, None, 403),
    ("POST", "/generate", CLIENT, {"text": "x" * (3 << 20)}, 413),
    ("POST", "/generate", CLIENT, {}, 400),
    ("POST", "/v1/completions", CLIENT, {"model": "base"}, 400),
    ("POST", "/v1/chat/completions", CLIENT, {"model": "base", "messages": []}, 400),
    ("GET", "/v1/responses/none", CLIENT, None, 400),
    ("POST", "/v1/adapters", ADMIN, {"nam": "x"}, 400),
    ("POST", "/load_lora_adapter", ADMIN, {"lora_name": "x", "lora_path": "/none"}, 400),
    ("GET", "/v1/scale", ADMIN, None, 404),
    ("POST", "/v1/messages", CLIENT, {"model": "base"}, 400),
    ("GET", "/v1/messages", CLIENT, None, 405),
]


@pytest.mark.parametrize(("method", "path", "key", "body", "status"), ERRORS)
def test_every_error_has_one_shape(
    method: str, path: str, key: str, body: Any, status: int, server: Server
) -> None:
    answer = ask(server, method, path, key, body)
    assert answer.status_code == status, answer.text
    document: Mapping[str, Any] = answer.json()
    assert set(document["error"]) == FIELDS, document
    assert document["error"]["message"]
    assert document.get("type") == ("error" if path == "/v1/messages" else None)


def test_scaling_says_how_it_is_turned_on(server: Server) -> None:
    for method, body in (("GET", None), ("POST", {"dp_size": 2})):
        error = ask(server, method, "/v1/scale", ADMIN, body).json()["error"]
        assert "--elastic --max-devices" in error["message"]


def test_anthropics_client_reads_its_errors(server: Server) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key=CLIENT, max_retries=0)
    with client, pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(
            model="nobody", max_tokens=1, messages=[{"role": "user", "content": "x"}]
        )
    body: Any = missing.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")


def test_versions(server: Server) -> None:
    assert requests.get(f"{server.url}/version", timeout=30).status_code == 401
    told = ask(server, "GET", "/version", TENANT).json()
    assert told.keys() == {"version", "sglang", "torch"}
    assert (told["version"], told["sglang"]) == (__version__, "0.5.23")
    info = ask(server, "GET", "/openapi.json", CLIENT).json()["info"]
    assert (info["title"], info["version"]) == ("sgl-esft", __version__)
