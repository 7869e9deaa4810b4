"""Flags of experts in tiers: what they come to, and what is refused with which words."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gpu import run
from sgl_esft import support
from sgl_esft.config import EsftConfig, RecordConfig, TierConfig
from sgl_esft.errors import ConfigError, DeviceMemoryError, UnsupportedModelError, UserError
from sgl_esft.formats.model_spec import read_moe_spec
from sgl_esft.ports import pick_free_port
from sgl_esft.quant.write import quantise_checkpoint
from sgl_esft_launch import elastic, fit, flags, plan, resolved, summary, tiers
from sgl_esft_launch.plan import LaunchPlan
from tests.support.families import Families, Family

Plan = Callable[..., LaunchPlan]


@pytest.fixture
def family(families: Families) -> Family:
    return families.get("Qwen3MoeForCausalLM")


@pytest.fixture
def planned(family: Family) -> Plan:
    def make(*argv: str) -> LaunchPlan:
        base = ("--model-path", str(family.base), "--port", str(pick_free_port()))
        named = [f"{name}={folder}" for name, folder in family.named]
        return plan.plan_launch(*flags.parse([*base, "--esft-adapters", *named, *argv]))

    return make


def _tiers(launch: LaunchPlan) -> TierConfig:
    assert launch.config is not None
    assert launch.config.tiers is not None
    return launch.config.tiers


def test_without_the_flag_there_are_no_tiers(planned: Plan) -> None:
    launch = planned()
    assert launch.config is not None
    assert launch.config.tiers is None
    assert launch.config.record is None


def test_a_number_is_of_each_layer_and_a_size_of_all(planned: Plan, family: Family) -> None:
    spec = read_moe_spec(family.base)
    five = 5 * spec.expert_bytes * len(spec.moe_layer_ids)
    assert _tiers(planned("--expert-cache", "5")).num_rows == 5
    assert _tiers(planned("--expert-cache", f"{five}B")).num_rows == 5
    assert _tiers(planned("--expert-cache", f"{five - 1}B")).num_rows == 4
    # Each of two ranks has half of every expert, or whole ones of half of them.
    two = ("--tp-size", "2", "--expert-cache", f"{five}B")
    assert _tiers(planned(*two)).num_rows == 10
    assert _tiers(planned(*two, "--ep-size", "2")).num_rows == 5


def test_it_reaches_every_process(planned: Plan, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    launch = planned(
        *("--expert-cache", "6", "--expert-policy", "finemoe", "--store-by", "adapter"),
        *("--expert-read-bandwidth", "1MiB"),
        *("--record-routing", str(trace), "--record-routing-limit", "2MiB"),
    )
    config = launch.config
    assert config is not None
    assert config.record == RecordConfig(str(trace), 2 << 20)
    assert _tiers(launch).read_bytes_per_s == 1 << 20
    assert _tiers(launch).store_by == "adapter"
    from dataclasses import asdict

    assert EsftConfig.from_json(json.dumps(asdict(config))) == config


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--expert-cache", "3"), "3 experts of a layer, and one token needs 4"),
        (("--expert-cache", "1KiB"), "0 experts of a layer, and one token needs 4"),
        (("--expert-cache", "lots"), "--expert-cache is 'lots'"),
        (("--expert-policy", "lru"), "--expert-policy without --expert-cache"),
        (("--expert-pack", "x", "--prefetch-distance", "2"), "--expert-pack, --prefetch-distance"),
        (("--store-by", "adapter"), "--store-by without --expert-cache"),
        (("--expert-host-memory", "1GiB"), "--expert-host-memory without --expert-cache"),
        (("--expert-cache", "6", "--expert-host-memory", "lots"), "--expert-host-memory is 'lots'"),
        (("--expert-cache", "6", "--store-by", "task"), "invalid choice: 'task'"),
        (
            ("--expert-cache", "6", "--expert-policy", "lfu", "--store-by", "adapter"),
            "--store-by is for --expert-policy finemoe",
        ),
        (("--expert-cache", "6", "--reroute", "router"), "use --reroute fused"),
        (("--expert-cache", "6", "--adapter-memory", "1GiB"), "leave them out"),
        (("--expert-cache", "6", "--adapter-host-memory", "1GiB"), "leave them out"),
        (("--expert-cache", "6", "--expert-read-threads", "0"), "--expert-read-threads 0"),
        (("--expert-cache", "6", "--expert-loads-per-layer", "-1"), "0 or more"),
        (("--expert-cache", "6", "--expert-policy", "best"), "invalid choice: 'best'"),
        (("--record-routing-limit", "1GiB"), "without --record-routing"),
        (("--record-routing", "x", "--reroute", "router"), "knows no expert ids to record"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    planned: Plan, argv: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        planned(*argv)


def test_a_base_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    argv = ["--model-path", str(tmp_path / "nowhere"), "--expert-cache", "4"]
    with pytest.raises(UserError, match="there is no such folder"):
        plan.plan_launch(*flags.parse([*argv, "--port", str(pick_free_port())]))


def test_devices_that_come_and_go_are_refused(family: Family) -> None:
    argv = ["--model-path", str(family.base), "--expert-cache", "4", "--max-devices", "2"]
    with pytest.raises(elastic.ElasticConfigError, match="--expert-cache: that devices come"):
        elastic.plan_elastic([*argv, "--port", str(pick_free_port())])


def test_an_accelerator_is_refused_until_it_was_shown(
    planned: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "device_type", lambda: "cuda")
    with pytest.raises(ConfigError, match="--expert-cache on cuda: experts in tiers"):
        planned("--expert-cache", "6")


def test_host_memory_is_for_accelerators(planned: Plan) -> None:
    assert _tiers(planned("--expert-cache", "6")).host_bytes == 0
    assert _tiers(planned("--expert-cache", "6", "--expert-host-memory", "0")).host_bytes == 0
    with pytest.raises(ConfigError, match="--expert-host-memory on a CPU: there the rows are host"):
        planned("--expert-cache", "6", "--expert-host-memory", "1GiB")


def test_host_memory_on_an_accelerator(planned: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it had been shown there."""
    monkeypatch.setattr(plan, "device_type", lambda: "cuda")
    monkeypatch.setattr(tiers, "TIER_DEVICES", {"cuda"})
    found = _tiers(planned("--expert-cache", "6", "--expert-host-memory", "1GiB"))
    assert found.host_bytes == 1 << 30


def test_a_bench_on_a_gpu_may_try_what_it_is_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only CUDA, only what is named, and only where the bench's variable is set."""
    assert support.TRY_VARIABLE not in os.environ
    assert support._shown("tiers", "cpu") == support.TIER_DEVICES == {"cpu"}
    named = run.environment_of(Path("folder"), "", tiny=False)[support.TRY_VARIABLE]
    monkeypatch.setattr(support, "TRIED", frozenset(named.split(",")))
    assert support._shown("tiers", "cpu") == support._shown("quantised", "cpu") == {"cpu", "cuda"}
    assert support._shown("other", "cpu") == {"cpu"}


def given(*argv: str) -> Any:
    """SGLang's arguments, parsed and not resolved."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return ServerArgs.from_cli_args(parser.parse_args(["--model-path", "dummy", *argv]))


# What is given -> the backend of decode graphs that SGLang makes of it with --expert-cache on CUDA.
DECODE_GRAPHS = {
    (): "breakable",
    ("--cuda-graph-backend-prefill", "disabled"): "breakable",
    ("--cuda-graph-max-bs-decode", "8"): "breakable",
    ("--cuda-graph-config", '{"decode": {"max_bs": 8}}'): "breakable",
    ("--cuda-graph-backend-decode", "breakable"): "breakable",
    ("--cuda-graph-backend-decode", "disabled"): "disabled",
    ("--disable-cuda-graph",): "disabled",
    ("--disable-decode-cuda-graph",): "disabled",
    ("--cuda-graph-config", '{"decode": {"backend": "disabled"}}'): "disabled",
    ("--cuda-graph-backend-decode", "full"): "full",
    ("--cuda-graph-config", '{"decode": {"backend": "full"}}'): "full",
}


@pytest.mark.parametrize("argv", DECODE_GRAPHS)
def test_decode_graphs_have_breaks_unless_the_user_says_otherwise(argv: tuple[str, ...]) -> None:
    """By SGLang's own reading of its flags; whole ones are refused, and the words name the flag."""
    from sglang.srt.arg_groups.cuda_graph_hook import parse_cuda_graph_config
    from sglang.srt.arg_groups.overrides import resolving_view

    arguments = given(*argv)
    backend = tiers.decode_backend(arguments, "cuda")
    if backend is not None:
        arguments.cuda_graph_backend_decode = backend
    parse_cuda_graph_config(arguments)
    view = resolving_view(arguments)
    assert view.cuda_graph_config.decode.backend == DECODE_GRAPHS[argv]
    rows = [row for row in resolved.weaving("cuda", has_tiers=True) if row.is_of_resolving]
    if DECODE_GRAPHS[argv] != "full":
        resolved.check_resolved(view, rows)
        return
    with pytest.raises(ConfigError, match=r"--cuda-graph-backend-decode 'full' .* use breakable"):
        resolved.check_resolved(view, rows)


@pytest.mark.parametrize("has_tiers", [False, True])
def test_a_graph_hides_what_is_to_be_recorded(has_tiers: bool) -> None:
    """Of any kind: in one with breaks, what a layer chose is computed within the graph."""
    rows = resolved.weaving("cuda", has_tiers=has_tiers, records=True)
    (row,) = (row for row in rows if row.field == resolved.BREAKS.field)
    for backend in ("full", "breakable", "disabled"):
        decode = SimpleNamespace(backend=backend)
        view = SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=decode))
        if backend == "disabled":
            resolved.check_resolved(view, (row,))
            continue
        with pytest.raises(ConfigError, match="--record-routing out"):
            resolved.check_resolved(view, (row,))
    assert resolved.weaving("cpu", has_tiers=has_tiers, records=True) == resolved.WEAVING


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_other_devices_are_left_as_they_are(device: str) -> None:
    assert tiers.decode_backend(given(), device) is None
    assert resolved.weaving("cpu", has_tiers=True) == resolved.WEAVING
    assert resolved.weaving("cuda", has_tiers=False) == resolved.WEAVING


def test_a_step_that_is_one_break_is_refused() -> None:
    rows = [row for row in resolved.weaving("cuda", has_tiers=True) if "debug" in row.field]
    with pytest.raises(ConfigError, match="--debug-cuda-graph True cannot be used"):
        resolved.check_given(given("--debug-cuda-graph"), rows)


def test_adapters_are_not_read_at_start(planned: Plan, family: Family, tmp_path: Path) -> None:
    """Their headers are; a weight that is no number is found when it is routed to."""
    from tests.support.adapter_factory import BAD_WEIGHTS, corrupt, write_random_adapter

    folder = write_random_adapter(tmp_path / "bad", family.base, seed=77)
    corrupt(folder, next(iter(BAD_WEIGHTS)))
    named = ("--esft-adapters", f"bad={folder}")
    with pytest.raises(UserError, match="bad"):
        planned(*named)
    assert planned(*named, "--expert-cache", "6").adapters["bad"] == folder


def test_a_device_must_hold_its_rows_and_no_more(planned: Plan, family: Family) -> None:
    """A base that does not fit whole is the very case; what rows take is counted."""
    spec = read_moe_spec(family.base)
    whole = fit.served_sizes(family.base, ("--dtype", "float32"))
    assert whole is not None
    budget = f"{whole.total_bytes - spec.expert_bytes}B"
    tight = ("--device-memory", budget, "--dtype", "float32", "--mem-fraction-static", "1")
    with pytest.raises(DeviceMemoryError, match="does not fit"):
        fit.check(planned(*tight))
    fit.check(planned(*tight, "--expert-cache", "4"))
    most = spec.num_experts + 4 * spec.num_experts
    with pytest.raises(DeviceMemoryError, match="does not fit"):
        fit.check(planned(*tight, "--expert-cache", str(most)))


def test_what_is_ready_says_how_many_are_in_memory(planned: Plan) -> None:
    lines = list(summary.lines(planned("--expert-cache", "6", "--expert-policy", "lfu"), 100))
    [line] = [line for line in lines if line.startswith("experts")]
    assert "6 of each layer in memory" in line
    assert "policy lfu" in line
    assert not any(line.startswith("experts") for line in summary.lines(planned(), 100))


def planned_over(base: Path, *argv: str) -> LaunchPlan:
    options = ("--model-path", str(base), "--port", str(pick_free_port()))
    return plan.plan_launch(*flags.parse([*options, *argv]))


def test_a_quantised_expert_is_counted_with_its_scales(family: Family, tmp_path: Path) -> None:
    quantise_checkpoint(family.base, "int8", tmp_path / "int8")
    spec = read_moe_spec(tmp_path / "int8")
    num_layers = len(spec.moe_layer_ids)
    five = 5 * spec.expert_bytes * num_layers
    assert spec.expert_bytes < 2 * read_moe_spec(family.base).expert_bytes / 4
    for num_bytes, num_rows in ((five, 5), (five - 1, 4)):
        launch = planned_over(tmp_path / "int8", "--expert-cache", f"{num_bytes}B")
        assert _tiers(launch).num_rows == num_rows
    # Each of two ranks has half of the numbers, and all scales of down.
    share = (spec.expert_bytes + 4 * spec.hidden_size) // 2
    for num_bytes, num_rows in ((5 * share * num_layers, 5), (5 * share * num_layers - 1, 4)):
        argv = ("--tp-size", "2", "--expert-cache", f"{num_bytes}B")
        assert _tiers(planned_over(tmp_path / "int8", *argv)).num_rows == num_rows


def test_other_schemes_are_refused(family: Family, tmp_path: Path) -> None:
    quantise_checkpoint(family.base, "fp8-tensor", tmp_path / "fp8")
    with pytest.raises(UnsupportedModelError, match=r"--expert-cache .* in fp8-tensor.* in int8"):
        planned_over(tmp_path / "fp8", "--expert-cache", "6")
