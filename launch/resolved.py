"""What SGLang made of the arguments, held against what weaving can work with.

    plan.py refuses flags by their names -> SGLang parses -> [check_resolved] -> start

A flag can also arrive abbreviated, in a --config file, or as a default that
depends on the model, so the values count.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_esft.errors import ConfigError


@dataclass(frozen=True)
class Needed:
    """One of SGLang's resolved arguments and the values that are allowed."""

    field: str
    allowed: tuple[object, ...]
    reason: str


WEAVING: tuple[Needed, ...] = (
    Needed("enable_eplb", (False, None), "the expert map is in the model's own expert ids"),
    Needed("ep_num_redundant_experts", (0, None), "the expert map is in the model's own ids"),
    Needed("init_expert_location", ("trivial", None), "the expert map is in the model's own ids"),
    Needed("ep_dispatch_algorithm", (None,), "the expert map is in the model's own expert ids"),
    Needed("speculative_algorithm", (None,), "draft models are not woven"),
    Needed("enable_two_batch_overlap", (False, None), "the batch's adapter tags are not split"),
    Needed("tokenizer_worker_num", (1,), "adapter names are resolved in one process"),
    Needed("moe_a2a_backend", ("none", None), "weaving needs SGLang's standard dispatcher"),
    Needed("enable_lora_overlap_loading", (False, None), "adapters have a loader of their own"),
    Needed("quantization", (None,), "only unquantised experts can be woven"),
    Needed("pp_size", (1,), "a pipeline stage has only some of the MoE layers"),
    Needed("enable_torch_compile", (False, None), "rerouting in a compiled model was not shown"),
)
_FILLS_ALL = "it reads or writes every slot, also those without memory: --expert-memory padded"
VIRTUAL: tuple[Needed, ...] = (
    Needed(
        "load_format",
        ("auto", "safetensors", "fastsafetensors", "pt", "npcache", "mistral"),
        _FILLS_ALL,
    ),
    Needed("cpu_offload_gb", (0,), _FILLS_ALL),
    Needed("offload_group_size", (-1, 0), _FILLS_ALL),
    Needed("enable_memory_saver", (False,), "expert pages are not the memory saver's"),
    Needed("enable_weights_cpu_backup", (False,), _FILLS_ALL),
)
SERVER: tuple[Needed, ...] = (
    Needed("smg_grpc_mode", (False, None), "adapters are named over HTTP"),
    Needed("encoder_only", (False, None), "there are no experts in an encoder"),
    Needed("use_ray", (False, None), "SGLang's Ray server is another program"),
)
CPU: tuple[Needed, ...] = (
    Needed("page_size", (1, None), "SGLang's paged KV allocator is a kernel for accelerators"),
)


def check_resolved(arguments: object, needed: tuple[Needed, ...]) -> None:
    """Raises ConfigError for the first argument whose value is not allowed."""
    for need in needed:
        value = getattr(arguments, need.field)
        if value not in need.allowed:
            flag = "--" + need.field.replace("_", "-")
            raise ConfigError(f"{flag} {value!r} cannot be used: {need.reason}")
