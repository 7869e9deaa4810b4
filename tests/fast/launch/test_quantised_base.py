"""A launch over a quantised base: what SGLang is told, and where it is refused before it starts."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from sgl_esft import platform
from sgl_esft.errors import ConfigError, UnsupportedModelError
from sgl_esft.ports import pick_free_port
from sgl_esft.quant.write import quantise_checkpoint
from sgl_esft_launch import flags, plan, resolved
from sgl_esft_launch.plan import LaunchPlan
from tests.support.base_factory import write_random_base

METHODS = {"int8": "w8a8_int8", "fp8": "fp8", "fp8-tensor": "fp8", "int4": "moe_wna16"}
SMALL = {"hidden_size": 128, "moe_intermediate_size": 128, "n_routed_experts": 4}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for each scheme, and `base`."""
    root = tmp_path_factory.mktemp("bases")
    base = write_random_base(
        root / "base", "DeepseekV2ForCausalLM", seed=1, dtype="bfloat16", **SMALL
    )
    for scheme in METHODS:
        quantise_checkpoint(base, scheme, root / scheme)
    return root


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "is_active", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


def planned(base: Path, *argv: str) -> LaunchPlan:
    line = ["--port", str(pick_free_port()), "--model-path", str(base), *argv]
    return plan.plan_launch(*flags.parse(line))


@pytest.mark.parametrize("scheme", METHODS)
def test_what_sglang_is_told(bases: Path, scheme: str) -> None:
    launch = planned(bases / scheme)
    assert launch.scheme is not None
    assert launch.scheme.name == scheme
    told = "--quantization" in launch.sglang_argv
    assert told == (scheme == "int4")
    if told:
        assert launch.sglang_argv[launch.sglang_argv.index("--quantization") + 1] == "moe_wna16"


def test_of_an_unquantised_base_it_is_told_nothing(bases: Path) -> None:
    launch = planned(bases / "base")
    assert launch.scheme is None
    assert "--quantization" not in launch.sglang_argv


def test_without_weaving_the_cpu_platform_has_one_method_for_int4(bases: Path) -> None:
    """What the user says comes before it."""
    launch = planned(bases / "int4", "--no-esft")
    assert launch.scheme is None
    argv = launch.sglang_argv
    assert argv[argv.index("--quantization") + 1] == "moe_wna16"
    argv = planned(bases / "int4", "--no-esft", "--quantization", "gptq").sglang_argv
    assert [argv[i + 1] for i, word in enumerate(argv) if word == "--quantization"] == ["gptq"]


def test_without_weaving_sglang_is_told_nothing_elsewhere(
    bases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "device_type", lambda: "cuda")
    monkeypatch.setattr(platform, "is_active", lambda: False)
    assert "--quantization" not in planned(bases / "int4", "--no-esft").sglang_argv


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_elsewhere_it_was_not_shown(
    bases: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "device_type", lambda: device)
    with pytest.raises(UnsupportedModelError, match=rf"\(fp8-128x128\).* of type {device}: "):
        planned(bases / "fp8")
    assert planned(bases / "base").device == device
    assert planned(bases / "fp8", "--no-esft").config is None


@pytest.mark.parametrize("scheme", [None, *METHODS])
@pytest.mark.parametrize("method", [None, *sorted({*METHODS.values(), "gptq", "awq"})])
def test_the_checkpoint_says_how_it_is_quantised(
    bases: Path, scheme: str | None, method: str | None
) -> None:
    launch = planned(bases / (scheme or "base"))
    own = None if scheme is None else METHODS[scheme]
    is_right = method == own or (method is None and scheme != "int4")
    arguments = SimpleNamespace(quantization=method)
    if is_right:
        resolved.check_given(arguments, resolved.of_base(launch.scheme))
        return
    with pytest.raises(ConfigError, match=f"--quantization .* {scheme or 'unquantised'} experts"):
        resolved.check_given(arguments, resolved.of_base(launch.scheme))
