"""What weaving calls in SGLang: every such name, once, with what it must be.

Imported only where SGLang runs. plugin/hook_table.py names what is hooked, this file what is
called.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import msgspec
import torch
from sglang.srt.disaggregation.utils import prepare_abort
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.entrypoints.openai import protocol
from sglang.srt.layers.dp_attention import dp_gather_replicate, dp_slot_in
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.token_dispatcher.standard import (
    StandardCombineInput,
    StandardDispatcher,
)
from sglang.srt.layers.moe.topk import StandardTopKOutput, TopK
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.io_struct import (
    AbortReq,
    GetInternalStateReq,
    LoadLoRAAdapterReqInput,
    LoRAUpdateOutput,
    ShutdownReq,
    UnloadLoRAAdapterReqInput,
)
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
    eager_on_graph,
    is_in_breakable_cuda_graph,
)
from sglang.srt.runtime_context import (
    get_context,
    get_exec,
    get_lora,
    get_model,
    get_observability,
    get_parallel,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer
from transformers import PretrainedConfig

from sgl_esft.errors import InvariantError, UnsupportedModelError
from sgl_esft.memory.report import KvMemory

# (weights, ids, router logits) -> what SGLang's router hands to the dispatcher
make_topk_output = StandardTopKOutput
# (gathered [num_global, ...], local rows, forward batch): all ranks' rows, as hidden states lie
dp_gather = dp_gather_replicate
# (hidden states) -> what a MoE layer's experts hand to the dispatcher's combine
make_combine_input = StandardCombineInput
# (a function of tensors that answers in one of them) -> the same, at which a capture of SGLang's
# breakable graphs ends one graph and begins the next: a replay calls it between them, with the very
# tensors. A capture does not call it, since none of its numbers are there yet.
graph_break = eager_on_graph(True, capture_stub=lambda *_: None)
# What a model's forward pass answers with, a dataclass.
logits_record = LogitsProcessorOutput
# () -> whether a breakable graph is being captured or replayed, or run to warm up
is_in_breakable_graph = is_in_breakable_cuda_graph
# () -> SGLang's request that all ranks end
make_shutdown_request = ShutdownReq


def served_model() -> tuple[str, str | None]:
    """(path or hub name, revision) of the base model."""
    model = get_model()
    return model.model_path, model.revision


def base_config(model_path: str, revision: str | None) -> dict[str, Any]:
    """The base checkpoint's config.json, from its folder or its cached hub copy."""
    config, _ = PretrainedConfig.get_config_dict(model_path, revision=revision)
    return dict(config)


def fused_moe_modules(model: torch.nn.Module) -> Iterator[Any]:
    """The model's routed-expert layers."""
    return (module for module in model.modules() if isinstance(module, FusedMoE))


def routers(model: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    """(TopKConfig, FusedMoE) of each routed-expert layer whose block has SGLang's own router."""
    for block in model.modules():
        children = list(block.children())
        found = [child.topk_config for child in children if isinstance(child, TopK)]
        experts = [child for child in children if isinstance(child, FusedMoE)]
        if len(found) == len(experts) == 1:
            yield found[0], experts[0]


def gates(model: torch.nn.Module) -> Iterator[tuple[int, torch.Tensor]]:
    """(layer id, router weights [J, H]) of each routed-expert layer whose block has a `gate`."""
    for block in model.modules():
        weight = getattr(getattr(block, "gate", None), "weight", None)
        experts = [child for child in block.children() if isinstance(child, FusedMoE)]
        if isinstance(weight, torch.Tensor) and len(experts) == 1:
            yield int(experts[0].layer_id), weight


def shared_experts(model: torch.nn.Module) -> Iterator[tuple[int, Any]]:
    """(layer id, MLP) of each routed-expert layer whose block runs shared experts on their own."""
    for block in model.modules():
        experts = [child for child in block.children() if isinstance(child, FusedMoE)]
        named = (getattr(block, name, None) for name in ("shared_experts", "shared_expert"))
        found = next((each for each in named if each is not None), None)
        if len(experts) == 1 and found is not None:
            yield int(experts[0].layer_id), found


def group_place(linear: Any) -> tuple[int, int]:
    """(rank, size) of the tensor parallel group that a linear layer is cut for."""
    rank, size = get_group_rank_size(linear.tp_group)
    return int(rank), int(size)


def records_experts() -> bool:
    """Whether SGLang was asked to report or record the experts that it routes to."""
    return (
        get_global_experts_capturer() is not None
        or get_exec().moe.expert_distribution_recorder_mode is not None
    )


def moe_backend(fused_moe: Any) -> str:
    """SGLang's name of what computes this layer's experts; the method's where it has no runner.

    ROCm's aiter runs beside the runner that SGLang shows.
    """
    method = fused_moe.quant_method
    runner = getattr(method, "_aiter_runner", None) or getattr(method, "runner", None)
    return type(method).__name__ if runner is None else str(runner.runner_backend.value)


def check_dispatcher(dispatcher: Any) -> None:
    """Raises UnsupportedModelError unless the layer uses SGLang's standard dispatcher."""
    if not isinstance(dispatcher, StandardDispatcher):
        raise UnsupportedModelError(
            f"dispatcher {type(dispatcher).__name__}: weaving works with --moe-a2a-backend none"
        )


def check_decode_graphs(*, breaks: bool) -> None:
    """Raises UnsupportedModelError for decode graphs of a kind that weaving was not shown with.

    breaks: layers decide on the host, so a graph must be left before their experts.
    """
    graphs = get_exec().graph.cuda_graph_config
    backend = None if graphs is None else graphs.decode.backend
    if breaks and backend == Backend.FULL:
        raise UnsupportedModelError(
            "--cuda-graph-backend-decode full: a graph of a whole step would hold what one step "
            "of --expert-cache has decided; use breakable, or disabled"
        )
    if not breaks and backend == Backend.BREAKABLE:
        raise UnsupportedModelError(
            "--cuda-graph-backend-decode breakable: weaving was shown with full graphs only; "
            "leave it out, or use --cuda-graph-backend-decode disabled"
        )


def initial_adapters() -> list[Any]:
    """The LoRARefs of the adapters the server was started with."""
    return list(get_lora().lora_paths or ())


def make_lora_result(success: bool, message: str, loaded: dict[str, str]) -> Any:
    """SGLang's answer to a load or an unload; `loaded` is name -> folder."""
    return LoRAUpdateOutput(success=success, error_message=message, loaded_adapters=loaded)


def make_adapter_ref(name: str, folder: str, pinned: bool, adapter_id: str | None = None) -> Any:
    """SGLang's LoRARef, by default with a new id."""
    if adapter_id is None:
        return LoRARef(lora_name=name, lora_path=folder, pinned=pinned)
    return LoRARef(lora_id=adapter_id, lora_name=name, lora_path=folder, pinned=pinned)


def make_load_request(ref: Any) -> Any:
    """SGLang's message that tells every rank to load an adapter."""
    return LoadLoRAAdapterReqInput(
        lora_name=ref.lora_name,
        lora_path=ref.lora_path,
        pinned=bool(ref.pinned),
        lora_id=ref.lora_id,
    )


def make_command_request(command: str) -> Any:
    """A load message with a command of lifecycle/commands.py for a path."""
    return LoadLoRAAdapterReqInput(lora_name="", lora_path=command, lora_id="")


def make_unload_request(ref: Any) -> Any:
    """SGLang's message that tells every rank to unload an adapter."""
    return UnloadLoRAAdapterReqInput(lora_name=ref.lora_name, lora_id=ref.lora_id)


def hide_lora_from_layers() -> None:
    """From now on this rank's layers read that LoRA is off; its scheduler has read that it is on.

    With LoRA on, SGLang adds up a MoE layer's output at once, because LoRA's own matrices need the
    sum. A woven layer leaves a partial sum like any other, which may be added up where the next
    layer begins. Call it when the model has been loaded: while it is, LoRA also keeps w13's rows
    where adapters are copied to.
    """
    get_context().override("sgl_esft.weaving", enable_lora=False)


def max_loaded_adapters() -> int | None:
    """--max-loaded-loras."""
    limit = get_lora().max_loaded_loras
    return None if limit is None else int(limit)


def is_dp_attention() -> bool:
    """Whether ranks attend to requests of their own and share the experts."""
    return bool(get_parallel().attn_dp_enabled)


def num_dp_ranks() -> int:
    """Ranks whose tokens meet in a MoE layer; 1 without DP attention."""
    return int(get_parallel().attn_dp_size)


def dp_gather_lengths(forward_batch: Any) -> tuple[int, int]:
    """(rows of this rank, rows of all ranks) of a batch's gather, padding included.

    By the batch's own counts: SGLang's global ones are set when a graph is captured, which is
    after its batch was prepared, and never when it is replayed. Raises InvariantError.
    """
    counts = forward_batch.global_num_tokens_cpu
    if counts is None:
        raise InvariantError(
            "a batch under DP attention does not say how many tokens each rank has: its "
            "adapters' tags cannot be gathered"
        )
    return int(counts[dp_slot_in(counts)]), int(sum(counts))


def adapter_manager(scheduler: Any) -> Any:
    """What sits in LoRA's place on this rank."""
    return scheduler.tp_worker.model_runner.lora_manager


def adapter_name(scheduler: Any, adapter_id: str) -> str | None:
    """What requests call an adapter that this rank has; None if it has none of this id."""
    manager = adapter_manager(scheduler)
    if not hasattr(manager, "lora_refs"):
        name: str | None = manager.name_of(adapter_id)
        return name
    ref = manager.lora_refs.get(adapter_id)  # SGLang's own manager, where nothing is woven
    return None if ref is None else str(ref.lora_name)


def reject_request(
    scheduler: Any, req: Any, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST
) -> None:
    """Answer a request with an error before it runs; the caller does not queue it."""
    prepare_abort(req, message, status_code=status)
    scheduler.output_streamer.stream_output([req], req.return_logprob)


def fail_request(scheduler: Any, recv_req: Any, message: str) -> None:
    """Answer what is no request yet with an error (500): one is made of its id alone for that."""
    req = Req(
        recv_req.rid,
        "",
        array("q", [0]),
        SamplingParams(),
        stream=getattr(recv_req, "stream", False),
        vocab_size=scheduler.model_config.vocab_size,
        http_worker_ipc=recv_req.http_worker_ipc,
    )
    reject_request(scheduler, req, message, HTTPStatus.INTERNAL_SERVER_ERROR)


def end_request(req: Any, message: str, status: int) -> None:
    """End a request with an error at this step, whose token is not shown to its client."""
    kind = "BadRequestError" if status == HTTPStatus.BAD_REQUEST else "InternalServerError"
    req.to_finish = FINISH_ABORT(message, HTTPStatus(status), kind)
    req.finished_len = len(req.output_ids)
    req.skip_radix_cache_insert = True  # what made it fail may be in its KV


def unread_experts(scheduler: Any) -> str | None:
    """Why tokens of this rank's last step have no answer; None = all experts were there."""
    tiers = _tiers(scheduler)
    failure: str | None = None if tiers is None else tiers.failure
    return failure


def has_tiers(scheduler: Any) -> bool:
    """Whether experts of this rank are in tiers."""
    return _tiers(scheduler) is not None


def _tiers(scheduler: Any) -> Any:
    """None also where nothing is woven."""
    manager = getattr(scheduler.tp_worker.model_runner, "lora_manager", None)
    return getattr(manager, "tiers", None)


def running_requests(scheduler: Any) -> list[Any]:
    """Requests in batches of this rank that have not ended."""
    return [req for req in scheduler.collect_inflight_reqs() if not req.finished()]


def make_abort(rid: str, message: str) -> Any:
    """SGLang's message that ends a request on every rank of its group."""
    return AbortReq(rid=rid, abort_message=message)


def device_of(scheduler: Any) -> torch.device:
    """The device of this rank's weights."""
    return runner_device(scheduler.tp_worker.model_runner)


def runner_device(runner: Any) -> torch.device:
    """The device that a model runner's weights are created on."""
    if runner.device == "cpu":
        return torch.device("cpu")
    return torch.device(runner.device, runner.gpu_id)


def kv_memory(scheduler: Any) -> KvMemory:
    """Size of this rank's KV cache."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    found = pool.get_kv_size_bytes()
    num_bytes = sum(found) if isinstance(found, tuple) else found
    num_rows = pool.size + pool.page_size
    # SGLang counts with numpy, JSON does not.
    return KvMemory(int(scheduler.max_total_num_tokens), int(num_bytes) // int(num_rows))


def has_metrics() -> bool:
    """Whether the server answers /metrics."""
    return bool(get_observability().enable_metrics)


def http_log_level() -> str:
    """The level of the HTTP server's log, such as `info`."""
    found = get_observability()
    return str(found.log_level_http or found.log_level)


def chat_tool(tool: Any) -> protocol.Tool:
    """A tool of /parse_function_call as a chat request's; unchecked, since it may be nameless."""
    function = protocol.Function.model_construct(**msgspec.structs.asdict(tool.function))
    return protocol.Tool.model_construct(type=tool.type, function=function)


async def internal_states(tokenizer_manager: Any, subject: str) -> list[dict[str, Any]]:
    """Every scheduler's internal state, asked from the process that serves HTTP.

    subject: in the id, which SGLang leaves empty: what our hook there adds to the reply.
    """
    tokenizer_manager.auto_create_handle_loop()
    question = GetInternalStateReq(rid=subject)
    replies = await tokenizer_manager.get_internal_state_communicator(question)
    return [reply.internal_state for reply in replies]


def tp_rank() -> int:
    """This process's number among the ranks that share the experts."""
    return int(get_tp_group().rank_in_group)


def rank_in_server() -> int:
    """This process's number among all ranks of the server, replicas of DP included."""
    parallel = get_parallel()
    own = int(parallel.pp_rank * parallel.tp_size + parallel.tp_rank)
    replica = 0 if parallel.attn_dp_enabled else parallel.dp_rank or 0
    return int(replica * parallel.pp_size * parallel.tp_size) + own


def num_ranks() -> int:
    """Ranks of this machine, in the process that serves HTTP."""
    parallel = get_parallel()
    return int(parallel.dp_size * parallel.pp_size * parallel.tp_size // parallel.nnodes)


def gather_bytes(payload: bytes) -> list[bytes]:
    """Every rank's payload, by rank. All ranks must call it."""
    group = get_tp_group()
    if group.world_size == 1:
        return [payload]
    lengths = torch.zeros(group.world_size, dtype=torch.int64)
    lengths[group.rank_in_group] = len(payload)
    torch.distributed.all_reduce(lengths, group=group.cpu_group)
    parts = [torch.zeros(int(lengths.max()), dtype=torch.uint8) for _ in lengths]
    own = torch.zeros_like(parts[0])
    own[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    torch.distributed.all_gather(parts, own, group=group.cpu_group)
    return [
        bytes(part[:length].tolist()) for part, length in zip(parts, lengths.tolist(), strict=True)
    ]
