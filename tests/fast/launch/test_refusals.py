"""The launcher refuses, by name and with exit status 2, what must not be served.

Whole launches first. Then each row of launch/resolved.py, on what SGLang itself makes of a value:

    a config file with a value that the row does not allow
        -> plan, SGLang's parser, SGLang's resolution -> the row's own message

What the plan alone refuses is in test_plan.py.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_esft.errors import ConfigError
from sgl_esft.ports import pick_free_port
from sgl_esft_launch import resolved
from sgl_esft_launch.resolved import Needed
from tests.support.adapter_factory import (
    BAD_ADAPTERS,
    BAD_WEIGHTS,
    corrupt,
    write_random_adapter,
    write_random_base,
)
from tests.support.families import Families, Family
from tests.support.launches import refusal_of, verdicts_on
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


@pytest.mark.parametrize("kind", [*sorted(BAD_ADAPTERS)[::4], *BAD_WEIGHTS])
def test_damaged_adapter(kind: str, family: Family, tmp_path: Path, refuse: Refuse) -> None:
    folder = write_random_adapter(tmp_path / "bad", family.base, seed=3)
    expected = corrupt(folder, kind)
    refuse(ServerSpec(family.base, (("bad", folder),)), expected.__name__)


def test_plugin_left_out(family: Family, refuse: Refuse) -> None:
    """Without the hooks adapters would be ignored: no server then."""
    spec = ServerSpec(family.base, family.named)
    assert "SGLANG_PLUGINS" in refuse(spec, "HookError", {"SGLANG_PLUGINS": "another"})


def test_sglangs_lora_flags(family: Family, refuse: Refuse) -> None:
    spec = ServerSpec(family.base, args=("--lora-backend", "triton"))
    assert "--lora-backend" in refuse(spec, "ConfigError")
    spec = ServerSpec(family.base, args=("--lora-paths", f"math={family.named[0][1]}"))
    assert "adapter 'math'" in refuse(spec, "AdapterFormatError")


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((*TP2_EP2, "--enable-epl"), "--enable-eplb"),  # SGLang takes abbreviations
        (("--page-size", "16"), "--page-size"),
        (("--quantization", "fp8"), "--quantization"),
        (("--load-format", "dummy"), "--load-format"),
        (("--enable-torch-compile",), "--enable-torch-compile"),
        (("--moe-runner", "flashinfer_cutlass"), "--moe-runner-backend 'flashinfer_cutlass'"),
        (("--enable-hierarchical-cache",), "--enable-hierarchical-cache"),
        (("--disaggregation-mode", "decode"), "--disaggregation-mode"),
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


def test_elastic_with_quantised_kv(tmp_path: Path) -> None:
    """Before a memory worker is started."""
    argv = ["--elastic", "--kv-cache-dtype=fp8_e5m2", "--port", str(pick_free_port())]
    status, stderr = refusal_of(argv, {}, tmp_path / "stderr")
    assert status == 2
    assert "sgl_elastic: ConfigError: --kv-cache-dtype 'fp8_e5m2' cannot be used: " in stderr


# A value that is not allowed, of the fields that are no switches.
VALUES: Mapping[str, Any] = {
    "moe_a2a_backend": "deepep",
    "moe_runner_backend": "flashinfer_cutlass",
    "device": "cuda",
    "quantization": "fp8",
    "model_impl": "transformers",
    "ep_num_redundant_experts": 2,
    "init_expert_location": "random",
    "ep_dispatch_algorithm": "static",
    "elastic_ep_backend": "mooncake",
    "ep_join_mode": "recover",
    "max_ep_size": 4,
    "kt_weight_path": "somewhere",
    "expert_distribution_recorder_mode": "stat",
    "speculative_algorithm": "NGRAM",
    "decoupled_spec_role": "drafter",
    "dllm_algorithm": "LowConfidence",
    "pp_size": 2,
    "nnodes": 2,
    "moe_dp_size": 2,
    "attn_cp_size": 2,
    "attn_dp_size": 2,
    "dcp_size": 2,
    "dwdp_size": 2,
    "hicache_storage_backend": "file",
    "radix_cache_backend": "theirs",
    "custom_weight_loader": ["theirs"],
    "weight_cache_mode": "client",
    "startup_weight_load_mode": "overlap",
    "load_format": "dummy",
    "cpu_offload_gb": 1,
    "offload_group_size": 2,
    "kv_cache_dtype": "fp8_e5m2",
    "page_size": 16,
    "ep_size": 2,
    "detokenizer_worker_num": 2,
    "tp_size": 2,
    "cuda_graph_config.decode.backend": "breakable",
}
SWITCHES = frozenset(
    {
        "enable_eplb",
        "enable_elastic_expert_backup",
        "enable_waterfill",
        "enable_paged_experts",
        "enable_return_routed_experts",
        "enable_fused_moe_sum_all_reduce",
        "enable_nvidia_megakernel",
        "enable_amd_monokernel",
        "enable_two_batch_overlap",
        "enable_single_batch_overlap",
        "enable_pdmux",
        "enable_layernorm_sp",
        "enable_attn_tp_input_scattered",
        "enable_torch_compile",
        "enable_prefill_cp",
        "enable_kv_cache_sharding",
        "enable_hierarchical_cache",
        "enable_hisparse",
        "enable_lmcache",
        "enable_flexkv",
        "enable_unified_cache_external_linker",
        "enable_session_radix_cache",
        "enable_lora_overlap_loading",
        "lora_use_virtual_experts",
        "enable_memory_saver",
        "enable_weights_cpu_backup",
        "remote_instance_weight_loader_start_seed_via_transfer_engine",
        "enable_unified_memory",
        "enable_page_major_kv_layout",
        "prefill_only_disable_kv_cache",
        "enable_streaming_session",
        "smg_grpc_mode",
        "encoder_only",
        "use_ray",
    }
)
TABLES = {
    "weaving": resolved.of_device("cpu") + resolved.WEAVING + resolved.of_base(None),
    "virtual": resolved.VIRTUAL,
    "elastic": resolved.ELASTIC,
    "no DP attention": resolved.NO_DP_ATTENTION,
    "server": resolved.SERVER,
    "cpu": resolved.CPU,
}
ROWS = [(table, need) for table, rows in TABLES.items() for need in rows]
IDS = [f"{table}-{need.field}" for table, need in ROWS]
# What the launcher gives itself, after whatever a file says; SGLang takes abbreviations.
ON_THE_COMMAND_LINE = {
    "tp_size": ("--tp-s", "2"),
    "device": ("--device", "cuda"),
}


# Other ways to the same values, and launches that are refused nothing.
ALSO: Mapping[str, tuple[str, ...]] = {
    "nothing": (),
    "nothing, elastic": ("--elastic",),
    "abbreviated": ("--enable-pdm",),
    "abbreviated, with =": ("--moe-run=deep_gemm",),
    "elastic, abbreviated": ("--elastic", "--kv-cache=fp8_e4m3"),
    "elastic, hierarchical cache": ("--elastic", "--enable-hierarchical-c"),
    "adapters of LoRA's": ("--lora-pat", "mine=somewhere"),
    "adapter slots of LoRA's": ("--max-loras-per=1",),
}
WORDS: Mapping[str, tuple[str, str]] = {
    "nothing": ("", ""),
    "nothing, elastic": ("", ""),
    "abbreviated": ("ConfigError: --enable-pdmux True cannot be used: ", "; leave it out"),
    "abbreviated, with =": (
        "ConfigError: --moe-runner-backend 'deep_gemm' cannot be used: ",
        "; use --moe-runner-backend triton",
    ),
    "elastic, abbreviated": ("ConfigError: --kv-cache-dtype 'fp8_e4m3' cannot ", "leave it out"),
    "elastic, hierarchical cache": (
        "ConfigError: --enable-hierarchical-cache True",
        "leave it out",
    ),
    "adapters of LoRA's": (
        "ConfigError: --lora-paths ['mine=somewhere'] cannot be used: ",
        "; name adapters by --esft-adapters",
    ),
    "adapter slots of LoRA's": (
        "ConfigError: --max-loras-per-batch 1 cannot be used: ",
        "; write --max-adapters",
    ),
}


def is_installed(need: Needed) -> bool:
    from sglang.srt.server_args import ServerArgs

    return all(hasattr(ServerArgs, part) for part in need.field.split(".")[:1])


def bad_value(need: Needed) -> Any:
    return VALUES.get(need.field, True)


def argv_of(need: Needed, table: str, folder: Path) -> list[str]:
    argv = ["--port", str(pick_free_port()), *(["--elastic"] if table == "elastic" else [])]
    if need.field in ON_THE_COMMAND_LINE:
        return [*argv, *ON_THE_COMMAND_LINE[need.field]]
    value = bad_value(need)
    text = str(value).lower() if isinstance(value, bool) else value
    config = folder / f"{table}-{need.field}.yaml"
    config.write_text(f"{need.name.removeprefix('--')}: {text}\n", encoding="utf-8")
    return [*argv, "--config", str(config)]


def expected(need: Needed) -> str:
    return f"{need.name} {bad_value(need)!r} cannot be used: {need.reason}; {need.remedy}"


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, str], str]:
    """(table, field) -> what a launch with a bad value of it is refused with; "" = it is not."""
    folder = tmp_path_factory.mktemp("configs")
    rows = [row for row in ROWS if is_installed(row[1]) and not row[1].is_of_resolving]
    asked = {(table, need.field): argv_of(need, table, folder) for table, need in rows}
    for name, extra in ALSO.items():
        asked["also", name] = ["--port", str(pick_free_port()), *extra]
    return dict(zip(asked, verdicts_on(list(asked.values())), strict=True))


@pytest.mark.parametrize(("table", "need"), ROWS, ids=IDS)
def test_a_row_refuses(table: str, need: Needed, verdicts: Mapping[tuple[str, str], str]) -> None:
    if (table, need.field) in verdicts:
        assert verdicts[table, need.field] == f"ConfigError: {expected(need)}"
        return
    assert need.since or need.is_of_resolving, f"SGLang has no {need.field}"
    assert_refused(need, bad_value(need))


@pytest.mark.parametrize("name", ALSO)
def test_however_it_arrives(name: str, verdicts: Mapping[tuple[str, str], str]) -> None:
    start, end = WORDS[name]
    seen = verdicts["also", name]
    assert (seen.startswith(start), seen.endswith(end)) == (True, True)
    assert bool(seen) == bool(start)


def assert_refused(need: Needed, value: object) -> None:
    """Of a record that has the field, whatever SGLang is installed."""
    record: Any = value
    for part in reversed(need.field.split(".")):
        record = SimpleNamespace(**{part: record})
    message = re.escape(f"{need.name} {value!r} cannot be used: {need.reason}; {need.remedy}")
    with pytest.raises(ConfigError, match=f"^{message}$"):
        resolved.check_resolved(record, (need,))


def test_graphs_are_those_that_sglang_resolved() -> None:
    """On a CPU SGLang resolves all to none, so its record is made here."""
    from sglang.srt.model_executor.cuda_graph_config import (
        ALLOWED_BACKENDS_PER_PHASE,
        CudaGraphConfig,
        Phase,
        with_phase,
    )

    (need,) = (each for each in resolved.WEAVING if each.is_of_resolving)
    refused = []
    for backend in ALLOWED_BACKENDS_PER_PHASE[Phase.DECODE]:
        made = with_phase(CudaGraphConfig(), Phase.DECODE, backend=backend)
        try:
            resolved.check_resolved(SimpleNamespace(cuda_graph_config=made), (need,))
        except ConfigError:
            refused.append(backend)
    assert refused == ["breakable"]
    assert not {"full", "disabled"} & set(refused)
    resolved.check_given(SimpleNamespace(cuda_graph_config=None), (need,))


def test_every_moe_backend_but_tritons_is_refused() -> None:
    from sglang.srt.arg_groups.choices import MOE_RUNNER_BACKEND_CHOICES

    assert {"flashinfer_cutlass", "deep_gemm", "marlin"} <= set(MOE_RUNNER_BACKEND_CHOICES)
    for device, own in (("cpu", "triton"), ("cuda", "triton"), ("npu", "ascend")):
        (need,) = (n for n in resolved.of_device(device) if n.field == "moe_runner_backend")
        for backend in MOE_RUNNER_BACKEND_CHOICES:
            if backend in ("auto", own):
                resolved.check_resolved(SimpleNamespace(moe_runner_backend=backend), (need,))
            else:
                assert_refused(need, backend)


def test_float32_is_refused_on_cuda_only() -> None:
    """`auto` makes float16 of a checkpoint in float32."""
    import torch
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    dtypes = parser._option_string_actions["--dtype"].choices
    assert dtypes is not None
    (need,) = (n for n in resolved.of_device("cuda") if n.field == "dtype")
    refused = [dtype for dtype in dtypes if dtype not in need.allowed]
    assert [getattr(torch, dtype) for dtype in refused] == [torch.float32] * 2
    for dtype in refused:
        assert_refused(need, dtype)
    assert all(n.field != "dtype" for n in resolved.of_device("cpu"))


def test_what_auto_becomes_on_a_gpu_counts(tmp_path: Path) -> None:
    """SGLang takes flashinfer_trtllm for these models on Blackwell, and is not asked to."""
    argvs = []
    for architecture in ("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"):
        write_random_base(tmp_path / architecture, architecture, seed=1)
        argv = ["--model-path", str(tmp_path / architecture), "--port", str(pick_free_port())]
        argvs += [argv, [*argv, "--moe-runner-backend", "triton"]]
    found = verdicts_on(argvs, {"is_sm100": True})
    refused = "ConfigError: --moe-runner-backend 'flashinfer_trtllm' cannot be used: on cpu weaving"
    for by_default, by_name in (found[:2], found[2:]):
        assert by_default.startswith(refused)
        assert by_default.endswith("; use --moe-runner-backend triton")
        assert "moe-runner-backend" not in by_name


def test_no_row_is_gone() -> None:
    assert {need.field for _, need in ROWS} == set(VALUES) | SWITCHES


def test_rows_are_flags_and_fields_of_the_installed_sglang() -> None:
    """A renamed one would be let through."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    for table, need in ROWS:
        assert need.since or is_installed(need), (table, need)
        assert need.since or need.name in parser._option_string_actions, (table, need)
