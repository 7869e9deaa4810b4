"""What a supervisor tells its ranks by the environment, and what instances are started with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgl_elastic.errors import ElasticConfigError
from sgl_elastic.instance import engine_config, supervise
from sgl_elastic.instance.engine_config import EngineConfig
from sgl_elastic.instance.process import InstanceSpec
from sgl_elastic.instance.supervise import EngineSettings

CONFIG = EngineConfig("i3", "/run/elastic", (2, 0), "host", page_bytes=4096, max_kv_tokens=64)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(engine_config.VARIABLE, raising=False)
    engine_config.current.cache_clear()
    yield
    engine_config.current.cache_clear()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        json.dumps({**json.loads(CONFIG.to_json()), "more": 1}),
        json.dumps({**json.loads(CONFIG.to_json()), "device_ids": 3}),
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ElasticConfigError, match="ELASTIC_ENGINE is not an engine's"):
        EngineConfig.from_json(text)


def test_a_rank_finds_its_own_and_another_process_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_config.current() is None
    with pytest.raises(ElasticConfigError, match="ELASTIC_ENGINE is not set"):
        engine_config.required()
    engine_config.current.cache_clear()
    monkeypatch.setenv(engine_config.VARIABLE, CONFIG.to_json())
    assert engine_config.current() == CONFIG == engine_config.required()
    assert CONFIG.front_socket == Path("/run/elastic/ranks.sock")


def test_a_supervisor_is_told_what_its_instance_needs(tmp_path: Path) -> None:
    argv = ("--model-path", "base")
    settings = EngineSettings(tmp_path, argv, "ipc://t", "ipc://d", "host", 4096, 64, 32)
    spec = supervise.spec_of(settings, "i3", (2, 0), ("--lora-paths", "a=b"))
    engine = EngineConfig.from_json(spec.engine)
    assert engine == EngineConfig("i3", str(tmp_path), (2, 0), "host", 4096, 64)
    assert spec.input_ipc == f"ipc://{tmp_path}/i3.in"
    assert spec.sglang_argv[:4] == (*argv, "--lora-paths", "a=b")
    assert InstanceSpec.from_json(spec.to_json()) == spec


def test_one_rank_has_no_dp_attention() -> None:
    assert supervise.size_argv(1, 32) == (
        ["--tp-size", "1", "--attn-dp-size", "1", "--max-total-tokens", "32"]
    )
    assert "--enable-dp-lm-head" in supervise.size_argv(2, 32)


def test_sockets_of_an_instance_are_removed_and_no_others(tmp_path: Path) -> None:
    for name in ("i1.in", "i1.in.rpc", "i10.in", "ranks.sock"):
        (tmp_path / name).touch()
    supervise.remove_sockets(tmp_path, "i1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["i10.in", "ranks.sock"]
