"""LoRA beside ESFT on the command line: what turns it on, what is checked, what is refused."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from sgl_esft import platform
from sgl_esft.config import EsftConfig, LoraLimits
from sgl_esft.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    AdapterNotFiniteError,
    ConfigError,
    EsftError,
    UnsupportedAdapterError,
    UnsupportedModelError,
)
from sgl_esft.ports import pick_free_port
from sgl_esft.quant.write import quantise_checkpoint
from sgl_esft_launch import elastic, flags, lora, plan, resolved, summary
from sgl_esft_launch.plan import LaunchPlan
from tests.support.adapter_factory import write_random_adapter, write_random_base
from tests.support.lora_factory import write_random_lora

SMALL = {"hidden_size": 64, "moe_intermediate_size": 64, "n_routed_experts": 8, "vocab_size": 300}

Make = Callable[[str], LaunchPlan]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lora-flags")
    base = write_random_base(root / "base", "DeepseekV2ForCausalLM", seed=1, **SMALL)
    write_random_adapter(root / "math", base, seed=1, max_experts=2)
    write_random_lora(root / "tone", base, seed=2, rank=4)
    write_random_lora(root / "mood", base, seed=3, rank=8, targets=("o_proj",))
    write_random_lora(root / "nan", base, seed=4, loudness=float("nan"))
    other = write_random_base(root / "other", "Qwen3MoeForCausalLM", seed=1)
    write_random_lora(root / "foreign", other, seed=5, targets=("o_proj",))
    return root


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "is_active", lambda: True)


@pytest.fixture
def make(root: Path) -> Make:
    def make(line: str) -> LaunchPlan:
        argv = shlex.split(line.replace("ROOT", str(root)))
        argv += ["--model-path", str(root / "base"), "--port", str(pick_free_port())]
        return plan.plan_launch(*flags.parse(argv))

    return make


def argv_of(launch: LaunchPlan, flag: str) -> list[str]:
    start = launch.sglang_argv.index(flag) + 1
    rest = launch.sglang_argv[start:]
    ends = (i for i, arg in enumerate(rest) if arg.startswith("--"))
    return list(rest[: next(ends, len(rest))])


def test_without_the_flags_there_is_no_lora(make: Make) -> None:
    launch = make("--esft-adapters math=ROOT/math")
    assert launch.config is not None
    assert launch.config.lora is None
    assert launch.loras == {}
    assert launch.config.adapter_files == ("expert_cfg.json",)
    assert argv_of(launch, "--max-lora-rank") == ["1"]


@pytest.mark.parametrize(
    ("line", "limits"),
    [
        ("--enable-lora", LoraLimits(lora.DEFAULT_MAX_LORAS, lora.DEFAULT_MAX_RANK)),
        ("--lora-paths tone=ROOT/tone mood=ROOT/mood", LoraLimits(2, 8)),
        ("--lora-paths tone=ROOT/tone --max-loras 5 --max-lora-rank 16", LoraLimits(5, 16)),
        ("--max-loras 3", LoraLimits(3, lora.DEFAULT_MAX_RANK)),
        ("--max-lora-rank 2", LoraLimits(lora.DEFAULT_MAX_LORAS, 2)),
        (
            "--enable-lora --lora-target-modules all --max-loras 1 --max-lora-rank 1",
            LoraLimits(1, 1),
        ),
        (
            "--lora-target-modules o_proj q_proj --max-loras 1 --max-lora-rank 1",
            LoraLimits(1, 1, ("o_proj", "q_proj")),
        ),
    ],
)
def test_any_of_the_flags_turns_it_on(make: Make, line: str, limits: LoraLimits) -> None:
    config = make(line).config
    assert config is not None
    assert config.lora == limits
    assert config.adapter_files == ("expert_cfg.json", "adapter_config.json")


def test_a_configuration_reaches_every_process_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    config = EsftConfig(1, 2, lora=LoraLimits(3, 4, ("o_proj",)))
    monkeypatch.setenv("ESFT_CONFIG", "")
    config.export()
    assert EsftConfig.from_json(os.environ["ESFT_CONFIG"]) == config


def test_both_kinds_go_the_same_way(make: Make, root: Path) -> None:
    launch = make("--esft-adapters math=ROOT/math --lora-paths tone=ROOT/tone")
    paths = [f"math={root / 'math'}", f"tone={root / 'tone'}"]
    assert argv_of(launch, "--lora-paths") == paths
    assert argv_of(launch, "--max-loras-per-batch") == ["1"], "ESFT's slots"
    assert argv_of(launch, "--max-lora-rank") == ["4"]
    assert plan.known_adapters(launch) == {"math", "tone"}
    told = "\n".join(summary.lines(launch, None))
    assert "math, tone; 1 slots of 2 experts a layer, 1 LoRA slots of rank 4" in told


def test_a_root_has_both_kinds(make: Make) -> None:
    with_lora = make("--adapter-root ROOT --enable-lora")
    assert plan.known_adapters(with_lora) >= {"math", "tone", "mood"}
    assert "tone" not in plan.known_adapters(make("--adapter-root ROOT"))


@pytest.mark.parametrize(
    ("line", "error", "said"),
    [
        ("--lora-paths math=ROOT/math", AdapterFormatError, "adapter 'math': .*no LoRA adapter"),
        (
            "--esft-adapters tone=ROOT/tone",
            UnsupportedAdapterError,
            "adapter 'tone': .*--lora-paths",
        ),
        (
            "--esft-adapters a=ROOT/math --lora-paths a=ROOT/tone",
            ConfigError,
            "both name 'a': a name means one adapter",
        ),
        ("--lora-paths a=ROOT/tone a=ROOT/mood", ConfigError, "--lora-paths names 'a' twice"),
        ("--lora-paths ROOT/tone", ConfigError, "write NAME=DIR"),
        ("--lora-paths a=ROOT/nan", AdapterNotFiniteError, "adapter 'a': .*NaN"),
        ("--lora-paths a=ROOT/foreign", AdapterMismatchError, "made for another model"),
        (
            "--lora-paths a=ROOT/mood --max-lora-rank 4",
            AdapterMismatchError,
            "rank 8, and the server has room for rank 4",
        ),
        (
            "--lora-paths a=ROOT/tone --lora-target-modules o_proj",
            UnsupportedAdapterError,
            "takes LoRA in o_proj",
        ),
        ("--lora-target-modules experts", ConfigError, "--lora-target-modules experts"),
        ("--max-loras 0", ConfigError, "--max-loras 0"),
        ("--max-lora-rank 0", ConfigError, "--max-lora-rank 0"),
        ("--enable-lora --expert-cache 4", ConfigError, "--enable-lora and --expert-cache"),
        (
            "--enable-lora --tp-size 2 --attn-dp-size 2",
            ConfigError,
            "--enable-lora and --attn-dp-size",
        ),
        ("--enable-lora --lora-backend triton", ConfigError, "--lora-backend cannot be used"),
        ("--no-esft --max-loras 2", ConfigError, "--no-esft and --max-loras"),
    ],
)
def test_what_is_refused(make: Make, line: str, error: type[EsftError], said: str) -> None:
    with pytest.raises(error, match=said):
        make(line)


def test_elastic_servers_take_none(root: Path) -> None:
    argv = ["--elastic", "--max-devices", "1", "--model-path", str(root / "base"), "--enable-lora"]
    with pytest.raises(Exception, match="--enable-lora and --elastic"):
        elastic.plan_elastic(argv)


def test_other_devices_take_none(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "device_type", lambda: "cuda")
    argv = ["--model-path", str(root / "base"), "--port", str(pick_free_port())]
    plan.plan_launch(*flags.parse(argv))
    with pytest.raises(ConfigError, match="--enable-lora on a device of type cuda"):
        plan.plan_launch(*flags.parse([*argv, "--enable-lora"]))


def test_quantised_bases_take_none(root: Path, tmp_path: Path) -> None:
    quantise_checkpoint(root / "base", "int8", tmp_path / "int8")
    argv = ["--model-path", str(tmp_path / "int8"), "--port", str(pick_free_port())]
    with pytest.raises(UnsupportedModelError, match="--enable-lora cannot be used"):
        plan.plan_launch(*flags.parse([*argv, "--enable-lora"]))


def test_plain_sglang_gets_its_own_flags(make: Make) -> None:
    line = "--enable-lora --lora-paths a=X --max-lora-rank 8 --lora-target-modules q_proj v_proj"
    launch = make(f"--no-esft {line}")
    assert launch.config is None
    assert launch.loras == {}
    assert list(launch.sglang_argv[-8:]) == shlex.split(line)
    slots = make(f"--no-esft {line} --max-loras-per-batch 2").sglang_argv
    assert list(slots[-10:]) == shlex.split(f"{line} --max-loras-per-batch 2")


def test_fewer_names_than_slots_are_refused_by_their_flags(root: Path) -> None:
    """SGLang would end with an AssertionError."""
    config = EsftConfig(max_adapters=4, max_experts_per_adapter=1)
    for most in (None, 4, 5):
        resolved.check_names(SimpleNamespace(max_loaded_loras=most), config)
    with pytest.raises(ConfigError, match=r"--max-loaded-loras 3 .* write --max-adapters 3"):
        resolved.check_names(SimpleNamespace(max_loaded_loras=3), config)
