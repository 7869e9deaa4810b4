"""Bad input gets a named error and changes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from sgl_esft.http.adapter_names import ROUTES_OVER_ALL_SLOTS
from tests.support.adapter_factory import BAD_ADAPTERS, BAD_WEIGHTS, corrupt, write_random_adapter
from tests.support.one_rank import MAX_EXPERTS, OneRank

pytestmark = pytest.mark.server


def refuse_load(one_rank: OneRank, name: str, path: Path | str, error: str) -> str:
    """The load fails with the named error; the server is as it was. Returns the message."""
    before = one_rank.server.adapter_names()
    response = one_rank.server.load(name, Path(path))
    assert response.status_code == 400
    message: str = response.json()["error_message"]
    assert message.startswith(f"{error}: "), message
    assert one_rank.server.adapter_names() == before
    return message


@pytest.mark.parametrize("kind", sorted([*BAD_ADAPTERS, *BAD_WEIGHTS]))
def test_damaged_adapter(kind: str, one_rank: OneRank) -> None:
    folder = one_rank.root / f"bad-{kind.replace(' ', '-')}"
    write_random_adapter(folder, one_rank.family.base, seed=7)
    expected = corrupt(folder, kind)
    refuse_load(one_rank, "bad", folder, expected.__name__)
    assert one_rank.ask(0, "a0") == one_rank.expected["a0"][0]
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "..", "x" * 65, "a\n", "ä"])
def test_bad_name(name: str, one_rank: OneRank) -> None:
    refuse_load(one_rank, name, one_rank.family.adapters["a3"], "AdapterNameError")


def test_name_in_use(one_rank: OneRank) -> None:
    refuse_load(one_rank, "a0", one_rank.family.adapters["a3"], "AdapterExistsError")


def test_path_outside_the_root(one_rank: OneRank, tmp_path: Path) -> None:
    outside = write_random_adapter(tmp_path / "outside", one_rank.family.base, seed=8)
    refuse_load(one_rank, "out", outside, "AdapterPathError")
    refuse_load(one_rank, "out", "../../etc", "AdapterPathError")
    link = one_rank.root / "link"
    link.symlink_to(outside)
    refuse_load(one_rank, "out", link, "AdapterPathError")
    link.unlink()


def test_more_experts_than_slots(one_rank: OneRank) -> None:
    folder = one_rank.root / "large"
    experts = {1: tuple(range(MAX_EXPERTS + 1))}
    write_random_adapter(folder, one_rank.family.base, seed=9, experts=experts)
    message = refuse_load(one_rank, "large", folder, "AdapterMismatchError")
    assert f"--max-experts-per-adapter {MAX_EXPERTS + 1}" in message
    shutil.rmtree(folder)


def test_unloading_what_is_not_loaded(one_rank: OneRank) -> None:
    assert one_rank.server.unload("nobody").status_code == 400


def test_unloaded_adapter_is_unknown(one_rank: OneRank) -> None:
    server = one_rank.server
    assert server.load("a3", one_rank.family.adapters["a3"]).status_code == 200
    assert server.unload("a3").status_code == 200
    response = server.post("/generate", {"text": "x", "lora_path": "a3"})
    assert response.status_code == 404


UNKNOWN = [
    ("/generate", {"text": "x", "adapter": "nobody"}),
    ("/generate", {"text": "x", "lora_path": "nobody"}),
    ("/generate", {"text": ["x", "y"], "lora_path": ["a0", "nobody"]}),
    ("/v1/completions", {"model": "base:nobody", "prompt": "x"}),
    ("/v1/completions", {"model": "nobody", "prompt": "x"}),
    ("/v1/completions", {"model": "default", "prompt": "x", "adapter": "nobody"}),
    ("/v1/chat/completions", {"model": "base:nobody", "messages": []}),
    ("/v1/messages", {"model": "nobody", "messages": [], "max_tokens": 1}),
]


@pytest.mark.parametrize(("route", "body"), UNKNOWN)
def test_unknown_adapter_is_404(route: str, body: dict[str, Any], one_rank: OneRank) -> None:
    response = one_rank.server.post(route, body)
    assert response.status_code == 404
    error = response.json()["error"]
    of_anthropics_clients = route == "/v1/messages"
    assert error["type"] == ("not_found_error" if of_anthropics_clients else "UnknownAdapterError")
    assert "nobody" in error["message"]


REFUSED = [
    ("/generate", {"text": "x", "adapter": "a0", "lora_path": "a1"}),
    ("/v1/completions", {"model": "base:a0", "prompt": "x", "adapter": "a1"}),
    ("/generate", {"text": "x", "adapter": 7}),
    ("/generate", {"text": "x", "adapter": ["a0"]}),
    ("/generate", {"text": ["x", "y"], "adapter": ["a0"]}),
    ("/generate", {"text": ["x"], "lora_path": ["a0", "a1"]}),
    ("/generate", {"input_ids": [1, 2], "lora_path": ["a0", "a1"]}),
    ("/generate", {"text": "x", "lora_path": []}),
    ("/generate", {"text": "x", "lora_path": [None]}),
    ("/v1/chat/completions", {"model": "default", "messages": [], "lora_path": ["a0"]}),
    ("/generate", {"text": "x", "adapter": {"name": "a0"}}),
    ("/v1/responses", {"model": "a0", "input": "x"}),
    ("/v1/embeddings", {"model": "default", "input": "x", "adapter": "a0"}),
]


@pytest.mark.parametrize(("route", "body"), REFUSED)
def test_contradictions_and_routes_without_adapters(
    route: str, body: dict[str, Any], one_rank: OneRank
) -> None:
    assert one_rank.server.post(route, body).status_code == 400


def test_adapters_are_not_loaded_from_tensors(one_rank: OneRank) -> None:
    body = {"lora_name": "t", "config_dict": {}, "serialized_named_tensors": []}
    response = one_rank.server.post("/load_lora_adapter_from_tensors", body)
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "UnknownRouteError"
    assert "t" not in one_rank.server.adapter_names()


@pytest.mark.parametrize("route", sorted(ROUTES_OVER_ALL_SLOTS))
def test_routes_that_would_read_slots_without_memory(route: str, one_rank: OneRank) -> None:
    response = one_rank.server.post(route, {"action": "checksum"})
    assert response.status_code == 400
    assert "--expert-memory padded" in response.json()["error"]["message"]


def test_server_still_answers_as_before(one_rank: OneRank) -> None:
    one_rank.check_answers()
