"""An elastic launch is worked out and refused before anything is started."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from sgl_elastic.errors import ElasticConfigError
from sgl_esft import platform
from sgl_esft.errors import ConfigError, UnsupportedAdapterError
from sgl_esft.formats.manifest import read_manifest
from sgl_esft.formats.model_spec import read_moe_spec
from sgl_esft.ports import pick_free_port
from sgl_esft_launch import elastic, server
from sgl_esft_launch.elastic import ElasticPlan
from tests.support.adapter_factory import write_random_adapter


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "is_active", lambda: True)


Make = Callable[[str], ElasticPlan]


@pytest.fixture
def make(root: Path) -> Make:
    """Plan a command line of a woven base; ROOT stands for the folder of adapters."""
    port = pick_free_port()

    def make(line: str) -> ElasticPlan:
        argv = shlex.split(f"--elastic --model-path ROOT/base --port {port} {line}")
        return elastic.plan_elastic([arg.replace("ROOT", str(root)) for arg in argv])

    return make


def test_adapters_are_the_first_instances_to_load(make: Make, root: Path) -> None:
    planned = make("--dp-size 2 --esft-adapters math=ROOT/math law=ROOT/law")
    paths = [f"math={root}/math", f"law={root}/law"]
    assert list(planned.first_argv) == ["--lora-paths", *paths]
    assert "--lora-paths" not in planned.engine_argv
    assert not set(paths) & set(planned.engine_argv)
    spec = read_moe_spec(root / "base")
    assert [(a.name, a.adapter_slot, a.pinned) for a in planned.first_adapters] == [
        ("math", 0, False),
        ("law", 1, False),
    ]
    for adapter in planned.first_adapters:
        assert adapter.experts == read_manifest(root / adapter.name, spec).experts


def test_what_follows_the_adapters_is_kept() -> None:
    argv = ["--a", "1", "--lora-paths", "x=X", "y=Y", "--b", "2"]
    assert elastic._without_adapters(argv) == ("--a", "1", "--b", "2")
    assert elastic._without_adapters([*argv[:5]]) == ("--a", "1")


def test_every_instance_gets_the_tree_that_can_be_handed_over(make: Make) -> None:
    planned = make("--dp-size 2 --max-devices 3")
    argv = planned.engine_argv
    assert argv[argv.index("--radix-cache-backend") + 1] == "sgl_elastic"
    assert planned.options.dp_size == 2
    assert argv[argv.index("--dp-size") + 1] == "1", "sizes are each instance's own"
    assert planned.backend == "host"


def test_an_accelerator_has_its_own_backend(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "is_active", lambda: False)
    monkeypatch.setattr(elastic, "num_cuda_devices", lambda: 4)
    planned = make("--expert-page-size 64KiB --max-devices 1")
    assert (planned.backend, planned.page_bytes) == ("cuda", 2 << 20)
    assert make("--max-devices 4").backend == "cuda"
    monkeypatch.setattr(elastic, "num_cuda_devices", lambda: 0)
    with pytest.raises(ElasticConfigError, match="--max-devices 1: torch sees 0; lower it"):
        make("--max-devices 1")


def test_pages_and_no_adapters(make: Make) -> None:
    """By default the largest that is not larger than an expert's w2: 16 * 8 * 4 bytes, so 4 KiB."""
    planned = make("")
    assert (planned.first_argv, planned.first_adapters, planned.page_bytes) == ((), (), 4096)
    assert make("--expert-page-size 64KiB").page_bytes == 64 << 10


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("--no-esft", "--no-esft"),
        ("--tp-size 2", "--tp-size 2: elastic ranks have TP 1"),
        ("--expert-memory padded", "--expert-memory padded"),
        ("--ep-size 2", "--ep-size: --elastic decides"),
        ("--ep-size=2", "--ep-size: --elastic decides"),
        ("--enable-dp-attention", "--enable-dp-attention: --elastic decides"),
        ("--attn-dp-size 2", "--attn-dp-size: --elastic decides"),
        ("--load-format dummy", "--load-format: --elastic decides"),
        ("--radix-cache-backend x --ep-size 1", "--ep-size, --radix-cache-backend: --elastic"),
        ("--dp-size 9", "--dp-size 9"),
        ("--redundant-experts 2 --heat-every 0", "copies are chosen by heat"),
        ("--redundant-experts 2 --reroute router", "copies are chosen by heat"),
    ],
)
def test_what_cannot_work(make: Make, line: str, complaint: str) -> None:
    with pytest.raises(ElasticConfigError) as raised:
        make(line)
    assert complaint in str(raised.value)


def test_adapters_of_shared_experts(make: Make, root: Path, tmp_path: Path) -> None:
    folder = write_random_adapter(tmp_path / "tone", root / "base", seed=5, shared_layers=(1,))
    with pytest.raises(UnsupportedAdapterError, match=r"'tone' has .*: leave --elastic out"):
        make(f"--esft-adapters tone={folder}")


def test_weavings_own_refusals_stand(make: Make) -> None:
    with pytest.raises(ConfigError, match="--enable-eplb"):
        make("--enable-eplb")
    with pytest.raises(ConfigError, match="write NAME=DIR"):
        make("--esft-adapters math")
    with pytest.raises(ConfigError, match="--max-adapters 2, or leave some to --adapter-root"):
        make("--esft-adapters math=ROOT/math law=ROOT/law --max-adapters 1")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("--elastic --no-esft", "sgl_elastic: ElasticConfigError: --no-esft"),
        ("--elastic --model-path BASE --enable-eplb", "sgl_elastic: ConfigError: --enable-eplb"),
    ],
)
def test_a_refused_launch_says_why_and_ends(
    root: Path, line: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert server.main(["--elastic", *line.replace("BASE", str(root / "base")).split()]) == 2
    assert complaint in capsys.readouterr().err
