"""The launcher refuses, by name and with exit status 2, what must not be served.

What the plan alone refuses is in test_plan.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from sgl_esft.ports import pick_free_port
from tests.support.adapter_factory import BAD_ADAPTERS, corrupt, write_random_adapter
from tests.support.families import Families, Family
from tests.support.launches import refusal_of
from tests.support.servers import DP2_EP2, TP2_EP2, ServerSpec


@pytest.fixture
def family(families: Families) -> Family:
    return families.get("DeepseekV2ForCausalLM")


Refuse = Callable[..., str]


@pytest.fixture
def refuse(tmp_path: Path) -> Refuse:
    """The launch ends with the named error; what it printed."""

    def refused(spec: ServerSpec, error: str, env: Mapping[str, str] | None = None) -> str:
        argv = spec.argv(pick_free_port())[3:]  # without `python -m sgl_esft.launch_server`
        status, stderr = refusal_of(argv, env or {}, tmp_path / "stderr")
        assert status == 2, stderr[-2000:]
        assert f"sgl_esft: {error}: " in stderr
        assert "Traceback" not in stderr
        return stderr

    return refused


@pytest.mark.parametrize("kind", sorted(BAD_ADAPTERS)[::4])
def test_damaged_adapter(kind: str, family: Family, tmp_path: Path, refuse: Refuse) -> None:
    folder = write_random_adapter(tmp_path / "bad", family.base, seed=3)
    expected = corrupt(folder, kind)
    refuse(ServerSpec(family.base, (("bad", folder),)), expected.__name__)


def test_plugin_left_out(family: Family, refuse: Refuse) -> None:
    """Without the hooks adapters would be ignored: no server then."""
    spec = ServerSpec(family.base, family.named)
    assert "SGLANG_PLUGINS" in refuse(spec, "HookError", {"SGLANG_PLUGINS": "another"})


def test_sglangs_lora_flags(family: Family, refuse: Refuse) -> None:
    spec = ServerSpec(family.base, args=("--lora-paths", "x=y"))
    assert "--esft-adapters" in refuse(spec, "ConfigError")


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((*TP2_EP2, "--enable-epl"), "--enable-eplb"),  # SGLang takes abbreviations
        (("--page-size", "16"), "--page-size"),
        (("--quantization", "fp8"), "--quantization"),
        (("--load-format", "dummy"), "--load-format"),
        (("--enable-torch-compile",), "--enable-torch-compile"),
    ],
)
def test_what_sglang_resolves_is_checked(
    args: tuple[str, ...], named: str, family: Family, refuse: Refuse
) -> None:
    assert named in refuse(ServerSpec(family.base, args=args), "ConfigError")


@pytest.mark.parametrize(
    "args", [("--port", "70000"), ("--tp-size", "0"), (*DP2_EP2, "--max-adapters", "2")]
)
def test_sizes_that_cannot_work(args: tuple[str, ...], family: Family, refuse: Refuse) -> None:
    refuse(ServerSpec(family.base, family.named, args), "ConfigError")


def test_adapters_given_in_two_flags_are_all_checked(family: Family, refuse: Refuse) -> None:
    args = ("--esft-adapters", "a b=x")
    assert "a b" in refuse(ServerSpec(family.base, family.named, args), "AdapterNameError")
