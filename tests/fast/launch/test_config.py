"""The configuration: every bad value is refused by name, and every process reads what was meant."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_esft import config, env
from sgl_esft.config import EsftConfig
from sgl_esft.errors import ConfigError


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No configuration in the environment, none remembered."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in (env.CONFIG, env.PLATFORM):
        os.environ.pop(name, None)
    config.current_config.cache_clear()
    yield
    config.current_config.cache_clear()


COUNTS = (-1, 1.0, True, "4", None)
BAD: list[tuple[str, str, tuple[Any, ...], str]] = [
    ("max_adapters", "--max-adapters", (0, *COUNTS), "must be a whole number"),
    ("max_experts_per_adapter", "--max-experts-per-adapter", (0, *COUNTS), "must be a whole"),
    ("max_overtakes", "--max-overtakes", COUNTS, "must be a whole number"),
    ("quantised_adapters_bytes", "--quantised-adapters-bytes", (0, *COUNTS), "must be a whole"),
    ("expert_memory", "--expert-memory", ("", "Padded", "paged", None), "choose one of .*padded"),
    ("reroute", "--reroute", ("", "Padded", "paged", None), "choose one of .*unfused"),
]


@pytest.mark.parametrize(("field", "flag", "values", "said"), BAD)
def test_a_bad_value_is_refused_by_its_flag(
    field: str, flag: str, values: tuple[Any, ...], said: str
) -> None:
    good: dict[str, Any] = {"max_adapters": 2, "max_experts_per_adapter": 3, "max_overtakes": 0}
    EsftConfig(**good)
    for value in values:
        with pytest.raises(ConfigError, match=f"{flag} {value!r}: {said}"):
            EsftConfig(**{**good, field: value})


@given(
    st.builds(
        EsftConfig,
        max_adapters=st.integers(1, 1000),
        max_experts_per_adapter=st.integers(1, 1000),
        expert_memory=st.sampled_from(config.EXPERT_MEMORY_KINDS),
        reroute=st.sampled_from(config.REROUTE_KINDS),
        adapter_root=st.none() | st.text(min_size=1),
        quantised_adapters=st.none() | st.text(min_size=1),
        quantised_adapters_bytes=st.integers(1, 10**15),
        max_overtakes=st.integers(0, 1000),
    )
)
def test_json_round_trip(given_config: EsftConfig) -> None:
    text = json.dumps(dataclasses.asdict(given_config))
    assert EsftConfig.from_json(text) == given_config


def test_children_read_what_the_launcher_exported() -> None:
    exported = EsftConfig(3, 5, adapter_root="/adapters with ü")
    exported.export()
    assert config.current_config() == exported
    assert config.required_config() == exported
    assert exported.adapter_root_path == Path("/adapters with ü")


def test_where_quantised_copies_are_kept(tmp_path: Path) -> None:
    given = EsftConfig(1, 1, quantised_adapters=str(tmp_path))
    assert given.quantised_adapters_path == tmp_path
    default = EsftConfig(1, 1)
    assert default.quantised_adapters_bytes == 64 * 10**9
    for value, home in {
        str(tmp_path): tmp_path,
        "": Path.home() / ".cache",
        "relative": Path.home() / ".cache",
    }.items():
        os.environ["XDG_CACHE_HOME"] = value
        assert default.quantised_adapters_path == home / "sgl-esft" / "quantised-adapters"


def test_weaving_is_off_without_a_configuration() -> None:
    for unset in ("", None):
        os.environ.pop(env.CONFIG, None)
        if unset is not None:
            os.environ[env.CONFIG] = unset
        config.current_config.cache_clear()
        assert config.current_config() is None
    with pytest.raises(ConfigError, match=env.CONFIG):
        config.required_config()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "not json",
        "[]",
        "3",
        "null",
        "{}",
        '{"max_adapters": 2}',
        '{"max_adapters": 2, "max_experts_per_adapter": 3, "surplus": 1}',
        '{"max_adapters": 0, "max_experts_per_adapter": 3}',
        '{"max_adapters": 2, "max_experts_per_adapter": 3, "reroute": "magic"}',
    ],
)
def test_a_damaged_variable_is_refused(text: str) -> None:
    os.environ[env.CONFIG] = text
    with pytest.raises(ConfigError):
        config.current_config()


@pytest.mark.parametrize("value", ["", "CPU", "cuda", " cpu", "auto,cpu"])
def test_a_bad_platform_is_refused_with_the_good_ones(value: str) -> None:
    assert env.platform() == "auto"
    for good in ("auto", "cpu", "native"):
        os.environ[env.PLATFORM] = good
        assert env.platform() == good
    os.environ[env.PLATFORM] = value
    with pytest.raises(ConfigError, match="auto, cpu, native"):
        env.platform()


def test_every_variable_is_documented() -> None:
    names = [value for name, value in vars(env).items() if name.isupper() and name[0] != "_"]
    assert len(names) >= 2
    assert [name for name in names if f"| {name} |" not in env.__doc__] == []
