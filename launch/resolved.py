"""What SGLang made of the arguments, held against what was shown to work.

    plan.py refuses flags by their names -> SGLang parses -> [check] -> resolves -> [check] -> start

A flag can also arrive abbreviated, in a --config file, or as a default that
depends on the model and the device, so the values count. They are looked at
twice: what SGLang itself would fail on is still called by its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sgl_esft.config import EsftConfig
from sgl_esft.errors import ConfigError
from sgl_esft.formats.expert_scheme import ExpertScheme, SchemeName
from sgl_esft.support import MOE_BACKENDS


@dataclass(frozen=True)
class Needed:
    """One of SGLang's arguments and the values that are allowed."""

    field: str  # with a dot: of a record that only resolving makes
    allowed: tuple[object, ...]
    reason: str
    remedy: str = "leave it out"
    flag: str = ""  # where it is not the field's name
    since: str = ""  # the first SGLang that has the field; before it there is nothing to refuse

    @property
    def is_of_resolving(self) -> bool:
        return "." in self.field

    @property
    def is_switch(self) -> bool:
        return self.allowed == (False, None)

    @property
    def name(self) -> str:
        """The flag as it is written on a command line."""
        return self.flag or "--" + self.field.replace("_", "-")


def _off(*fields: str, reason: str, since: str = "") -> tuple[Needed, ...]:
    """Switches that must stay off, all for one reason."""
    return tuple(Needed(field, (False, None), reason, since=since) for field in fields)


def switches(needed: Iterable[Needed]) -> dict[str, str]:
    """flag -> reason, of those that take no value: plan.py refuses them before SGLang is loaded."""
    return {need.name: need.reason for need in needed if need.is_switch and not need.since}


_OWN_IDS = "the expert map is in the model's own expert ids"
_NO_TIERS = "that another cache than SGLang's radix cache keeps adapters apart was not shown"
_PARALLEL = "weaving was shown under TP, EP and DP attention only"
_LOADERS = "expert weights are created, filled and bound by SGLang's own loader only"

WEAVING: tuple[Needed, ...] = (
    Needed("moe_a2a_backend", ("none", None), "weaving needs SGLang's standard dispatcher"),
    Needed("model_impl", ("auto", "sglang"), "only SGLang's own models have layers to weave"),
    # Which experts there are, and where.
    Needed("ep_num_redundant_experts", (0, None), _OWN_IDS),
    Needed("init_expert_location", ("trivial", None), _OWN_IDS),
    Needed("ep_dispatch_algorithm", (None,), _OWN_IDS),
    Needed("elastic_ep_backend", (None,), f"{_OWN_IDS}; --elastic is another thing"),
    Needed(
        "ep_join_mode",
        (None,),
        f"{_OWN_IDS}; --elastic is another thing",
        flag="--elastic-ep-join-mode",
    ),
    Needed("max_ep_size", (None,), f"{_OWN_IDS}; --elastic is another thing"),
    *_off("enable_eplb", "enable_elastic_expert_backup", "enable_waterfill", reason=_OWN_IDS),
    Needed("kt_weight_path", (None,), "KTransformers computes experts by their own ids"),
    *_off("enable_paged_experts", reason="it moves experts between slots", since="0.5.23"),
    Needed("expert_distribution_recorder_mode", (None,), "GET /v1/heat counts woven experts"),
    *_off("enable_return_routed_experts", reason="which ids woven layers return was not shown"),
    *_off("enable_fused_moe_sum_all_reduce", reason="it replaces the end of the Triton experts"),
    *_off(
        "enable_nvidia_megakernel",
        "enable_amd_monokernel",
        reason="it replaces the MoE layers",
        since="0.5.23",
    ),
    # Which batch the tags are of.
    *_off(
        "enable_two_batch_overlap",
        "enable_single_batch_overlap",
        reason="the batch's adapter tags are not split",
    ),
    *_off("enable_pdmux", reason="it runs two batches at a time, and tags are of one"),
    Needed("speculative_algorithm", (None,), "draft models are not woven"),
    Needed("decoupled_spec_role", ("null", None), "draft models are not woven"),
    Needed("dllm_algorithm", (None,), "weaving in diffusion models was not shown"),
    *_off(
        "enable_layernorm_sp",
        "enable_attn_tp_input_scattered",
        reason="tags are gathered as hidden states are without it",
    ),
    # Graphs.
    Needed(
        "cuda_graph_config.decode.backend",
        ("full", "disabled"),
        "rerouting was shown in whole decode graphs only",
        "use full, or disabled",
        flag="--cuda-graph-backend-decode",
    ),
    *_off("enable_torch_compile", reason="it replaces the MoE layers by code without slots"),
    # Ranks.
    Needed("pp_size", (1,), "a pipeline stage has only some of the MoE layers"),
    Needed("nnodes", (1,), "adapters were not loaded on several nodes yet"),
    Needed("moe_dp_size", (1,), _PARALLEL),
    Needed("attn_cp_size", (1,), _PARALLEL),
    Needed("dcp_size", (1,), _PARALLEL),
    Needed("dwdp_size", (1,), _PARALLEL),
    *_off("enable_prefill_cp", reason=_PARALLEL),
    *_off("enable_kv_cache_sharding", reason=_PARALLEL, since="0.5.23"),
    # The prefix cache: KV of one adapter is never another's.
    *_off(
        "enable_hierarchical_cache",
        "enable_hisparse",
        "enable_lmcache",
        "enable_flexkv",
        "enable_unified_cache_external_linker",
        "enable_session_radix_cache",
        reason=_NO_TIERS,
    ),
    Needed("hicache_storage_backend", (None,), _NO_TIERS),
    Needed("radix_cache_backend", (None,), _NO_TIERS),
    # Where weights and adapters come from.
    Needed("custom_weight_loader", (None, []), _LOADERS),
    Needed("weight_cache_mode", ("off",), _LOADERS),
    Needed("startup_weight_load_mode", ("serial",), _LOADERS),
    *_off("enable_lora_overlap_loading", reason="adapters have a loader of their own"),
    *_off("lora_use_virtual_experts", reason="ESFT adapters take LoRA's place"),
)
# --quantization of a base whose experts are quantised so.
QUANTIZATIONS: Mapping[SchemeName, str] = {
    "int8": "w8a8_int8",
    "fp8": "fp8",
    "fp8-tensor": "fp8",
    "int4": "moe_wna16",
}
_FILLS_ALL = "it reads or writes every slot, also those without memory"
_PADDED = "use --expert-memory padded"
VIRTUAL: tuple[Needed, ...] = (
    Needed(
        "load_format",
        ("auto", "safetensors", "fastsafetensors", "pt", "npcache", "mistral"),
        _FILLS_ALL,
        _PADDED,
    ),
    Needed("cpu_offload_gb", (0,), _FILLS_ALL, _PADDED),
    Needed("offload_group_size", (-1, 0), _FILLS_ALL, _PADDED),
    *_off("enable_memory_saver", reason="expert pages are not the memory saver's"),
    Needed("enable_weights_cpu_backup", (False,), _FILLS_ALL, _PADDED),
    Needed(
        "remote_instance_weight_loader_start_seed_via_transfer_engine",
        (False,),
        _FILLS_ALL,
        _PADDED,
    ),
)
TIERS: tuple[Needed, ...] = (
    Needed(
        "load_format",
        ("auto", "safetensors"),
        "experts in tiers are read from safetensors files",
        "convert the checkpoint, or leave --expert-cache out",
    ),
    Needed(
        "disable_overlap_schedule",
        (True,),
        "a step that could not read an expert must end before the next one begins",
        "use --disable-overlap-schedule",
    ),
    Needed("enable_weights_cpu_backup", (False,), "experts in tiers are not all in memory"),
)
# The same field as WEAVING's, on an accelerator.
BREAKS = Needed(
    "cuda_graph_config.decode.backend",
    ("breakable", "disabled"),
    "with --expert-cache the host decides in every layer which experts to load, and a graph of a "
    "whole step would hold one step's decision for ever",
    "use breakable, which --expert-cache takes by itself, or disabled",
    flag="--cuda-graph-backend-decode",
)
RECORDED = replace(
    BREAKS,
    allowed=("disabled",),
    reason="--record-routing has the host see every layer's choice, and a graph runs without it",
    remedy="use --disable-cuda-graph, or leave --record-routing out",
)
_NESTED = "it runs the whole step as one break of the graph, and experts in tiers are breaks too"
_KV_ROWS = "KV is handed over as rows of the model's own type, in pools as SGLang makes them"
_ITS_OWN = "--elastic decides that itself"
ELASTIC: tuple[Needed, ...] = (
    Needed("kv_cache_dtype", ("auto",), _KV_ROWS),
    Needed("page_size", (1, None), _KV_ROWS),
    *_off(
        "enable_unified_memory",
        "enable_page_major_kv_layout",
        "prefill_only_disable_kv_cache",
        reason=_KV_ROWS,
    ),
    Needed("load_format", ("auto",), _ITS_OWN),
    Needed("tp_size", (1,), "elastic ranks have TP 1"),
    Needed("ep_size", (1,), _ITS_OWN),
    Needed("attn_dp_size", (1,), _ITS_OWN),
    *_off("enable_streaming_session", reason="sessions are not handed over"),
)
SERVER: tuple[Needed, ...] = (
    *_off("smg_grpc_mode", reason="adapters are named over HTTP"),
    *_off("encoder_only", reason="there are no experts in an encoder"),
    *_off("use_ray", reason="SGLang's Ray server is another program"),
    Needed("detokenizer_worker_num", (1,), "GET /readyz watches one detokenizer"),
)
# Where the command line does not ask for DP attention, by which ranks and slots are counted.
NO_DP_ATTENTION: tuple[Needed, ...] = (
    Needed(
        "attn_dp_size",
        (1,),
        "the launcher has counted ranks and adapters without it",
        "write it out on the command line",
    ),
)
CPU: tuple[Needed, ...] = (
    Needed("page_size", (1, None), "SGLang's paged KV allocator is a kernel for accelerators"),
)


_CUDA: tuple[Needed, ...] = (
    Needed(
        "dtype",
        ("auto", "half", "float16", "bfloat16"),
        "SGLang's kernels for CUDA compute no float32",
        "leave it out, or use bfloat16",
    ),
)
_NPU: tuple[Needed, ...] = (
    Needed(
        "cuda_graph_config.decode.backend",
        ("disabled",),
        "rerouting in graphs was not shown on npu",
        "use --disable-cuda-graph",
        flag="--cuda-graph-backend-decode",
    ),
)


def of_device(device: str) -> tuple[Needed, ...]:
    """What weaving needs where the launcher has found this device: cpu, cuda or npu."""
    backends = tuple(sorted(MOE_BACKENDS[device]))
    return (
        Needed(
            "device",
            (device, None),
            f"this machine was found to have {device}, and there is no other launch of it",
            "leave it out; ESFT_PLATFORM=cpu takes the CPU",
        ),
        Needed(
            "moe_runner_backend",
            ("auto", *backends),
            f"on {device} weaving was not shown with it",
            f"use --moe-runner-backend {backends[0]}",
        ),
        *{"cuda": _CUDA, "npu": _NPU}.get(device, ()),
    )


def weaving(device: str, *, has_tiers: bool, records: bool = False) -> tuple[Needed, ...]:
    """WEAVING, of a server whose experts are in tiers, and that records its routing, or not."""
    if device == "cpu" or not (has_tiers or records):
        return WEAVING
    graphs = RECORDED if records else BREAKS
    rows = tuple(graphs if row.field == graphs.field else row for row in WEAVING)
    return rows + (_off("debug_cuda_graph", reason=_NESTED) if has_tiers else ())


def of_base(scheme: ExpertScheme | None) -> tuple[Needed, ...]:
    """How the experts are quantised: as the base's config.json says."""
    method = None if scheme is None else QUANTIZATIONS[scheme.name]
    return (
        Needed(
            "quantization",
            (None, method) if method != "moe_wna16" else (method,),
            f"the base's config.json says {scheme.name if scheme else 'unquantised'} experts",
            "leave it out; `sgl-esft quantise` writes a quantised base",
        ),
    )


def of_adapters(config: EsftConfig, adapters: Mapping[str, Path]) -> tuple[Needed, ...]:
    """LoRA's place as the launcher opens it, in arguments that are parsed and not resolved."""
    paths = [f"{name}={path}" for name, path in adapters.items()]
    reason = "ESFT adapters take LoRA's place"
    return (
        Needed("enable_lora", (True,), reason),
        Needed("lora_paths", (paths or None,), reason, "name adapters by --esft-adapters"),
        Needed("max_loras_per_batch", (config.max_adapters,), reason, "write --max-adapters"),
    )


def check_names(arguments: Any, config: EsftConfig) -> None:
    """SGLang would end with a bare AssertionError. Raises ConfigError."""
    most = arguments.max_loaded_loras
    if most is not None and most < config.max_adapters:
        raise ConfigError(
            f"--max-loaded-loras {most} is less than the {config.max_adapters} ESFT slots: write "
            f"--max-adapters {most}, or raise it"
        )


def check_given(arguments: object, needed: Iterable[Needed]) -> None:
    """As `check_resolved`, of arguments that SGLang has parsed and not resolved yet."""
    check_resolved(arguments, (need for need in needed if not need.is_of_resolving))


def check_resolved(arguments: object, needed: Iterable[Needed]) -> None:
    """Raises ConfigError for the first argument whose value is not allowed."""
    for need in needed:
        value = _value_of(arguments, need)
        if value not in need.allowed:
            raise ConfigError(f"{need.name} {value!r} cannot be used: {need.reason}; {need.remedy}")


def _value_of(arguments: object, need: Needed) -> object:
    """The argument's value. Raises AttributeError where this SGLang should have it."""
    value = arguments
    for part in need.field.split("."):
        if need.since and not hasattr(value, part):
            return need.allowed[0]
        value = getattr(value, part)
    return value
