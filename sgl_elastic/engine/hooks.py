"""The elastic runtime's hook ledger: every place where it enters SGLang, and why.

ENGINE_HOOKS are installed only in the processes of an elastic engine (plugin.py). The process that
serves HTTP has front_hooks.py's, weaving has sgl_esft/plugin/hook_table.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_elastic.engine import loader, rank, sglang_api
from sgl_elastic.instance.rank_messages import PAUSE_TO_PARK
from sgl_esft.hook_ledger import Hook, after, around, before, constant, replace
from sgl_esft.lifecycle.commands import is_command

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_POOLS = "sglang.srt.mem_cache.memory_pool"
_MOE = "sglang.srt.layers.moe"


class WholeExperts:
    """SGLang's view of parallelism, but for experts: a rank has a row for each of them.

    Which rows have memory, and so which rank computes an expert, is the placement's to say.
    """

    moe_ep_size = 1
    moe_ep_rank = 0
    moe_tp_size = 1
    moe_tp_rank = 0

    def __init__(self, parallel: Any) -> None:
        self._parallel = parallel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parallel, name)


def whole_experts() -> WholeExperts:
    """In place of SGLang's get_parallel, where MoE layers are made."""
    from sglang.srt.runtime_context import get_parallel

    return WholeExperts(get_parallel())


def elastic_loader(original: Callable[..., Any], load_config: Any, model_config: Any = None) -> Any:
    """SGLang's loader, made to bind instead of to fill."""
    return loader.ElasticLoader(original(load_config, model_config))


def unchanged_config(model_config: Any, load_config: Any, tp_size: int) -> Any:
    """Attention is not split over ranks, so nothing has to be padded for their number."""
    return model_config


def mla_buffers(pool: Any) -> None:
    """SGLang's MLA pool over HMM memory."""
    own = rank.current()
    pool.kv_buffer = own.memory.kv_buffers((1, pool.kv_cache_dim), pool.store_dtype)


def mha_buffers(pool: Any) -> None:
    """SGLang's MHA pool over HMM memory: K of all layers, then V of all layers."""
    own = rank.current()
    buffers = own.memory.kv_buffers((pool.head_num, pool.head_dim), pool.store_dtype)
    pool.k_buffer, pool.v_buffer = buffers[: pool.layer_num], buffers[pool.layer_num :]


def start_loop(scheduler: Any) -> None:
    """The rank begins to serve."""
    rank.current().started(scheduler)


def poll(scheduler: Any, recv_reqs: list[Any]) -> None:
    """Between two batches."""
    rank.current().poll(scheduler)


def park_in_pause(original: Callable[..., None], scheduler: Any, recv_req: Any) -> None:
    """Our own pause parks the rank; a client's is SGLang's."""
    original(scheduler, recv_req)
    if recv_req.rid == PAUSE_TO_PARK:
        rank.current().park(scheduler)


def retract_into_cache(
    original: Callable[..., None],
    *,
    reqs: list[Any],
    req_to_token_pool: Any,
    token_to_kv_pool_allocator: Any,
    tree_cache: Any,
    hisparse_coordinator: Any,
    offload_kv: bool = True,
) -> None:
    """Retracting leaves the KV in the prefix cache: a pause costs its requests nothing."""
    sglang_api.retract_into_cache(reqs, tree_cache)


def resume_request(scheduler: Any, req: Any, is_retracted: bool = False) -> None:
    """A request that ran elsewhere goes on from where it was."""
    rank.current().resume_request(req)


def report_after_load(result: Any, scheduler: Any, recv_req: Any) -> None:
    """The adapters in memory have changed, or one of them is pinned now or no longer."""
    if is_command(getattr(recv_req, "lora_path", None)):
        return
    rank.current().report_adapters()


ENGINE_HOOKS: tuple[Hook, ...] = (
    around(
        "sglang.srt.model_loader.loader.get_model_loader",
        elastic_loader,
        "load_config model_config",
        why="weights belong to the HMM; an engine binds its parameters to them",
        remove_when="SGLang lets a plugin supply a loader class by --load-format",
    ),
    *(
        constant(
            f"{_MOE}.{module}.get_parallel",
            whole_experts,
            why="every expert has a row on every rank, so that EP sizes need not divide the "
            "experts and scaling moves no row; rerouting decides which rank computes one",
            remove_when="SGLang lets a plugin place physical experts",
        )
        for module in ("fused_moe_triton.layer", "token_dispatcher.standard")
    ),
    replace(
        "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp",
        unchanged_config,
        "model_config load_config tp_size",
        why="on a CPU, SGLang pads the model for any number of ranks, though attention is whole",
        remove_when="it asks for the size of attention's own group",
    ),
    *(
        replace(
            f"{_POOLS}.{pool}._create_buffers",
            function,
            "self",
            why="KV belongs to the HMM",
            remove_when="SGLang lets a pool take its buffers from outside",
        )
        for pool, function in (("MLATokenToKVPool", mla_buffers), ("MHATokenToKVPool", mha_buffers))
    ),
    before(
        f"{_SCHEDULER}.run_event_loop",
        start_loop,
        "self",
        why="the rank's KV capacity comes from its placement",
        remove_when="SGLang has a hook for the end of start-up",
    ),
    before(
        f"{_SCHEDULER}.process_input_requests",
        poll,
        "self recv_reqs",
        why="freed expert pages become KV while the rank serves",
        remove_when="SGLang lets a plugin add an input source to the loop",
    ),
    around(
        f"{_SCHEDULER}.pause_generation",
        park_in_pause,
        "self recv_req",
        why="the one message that stops all ranks at the same step; they hand over or wait there",
        remove_when="SGLang has a hand-over of its own",
    ),
    around(
        "sglang.srt.managers.schedule_batch.retract_all",
        retract_into_cache,
        "reqs req_to_token_pool token_to_kv_pool_allocator tree_cache hisparse_coordinator "
        "offload_kv",
        why="SGLang drops the KV of retracted requests and computes it again",
        remove_when="retract_all can insert into the prefix cache",
    ),
    before(
        f"{_SCHEDULER}._add_request_to_queue",
        resume_request,
        "self req is_retracted",
        why="a handed-over request continues with the tokens it has emitted",
        remove_when="SGLang has a hand-over of its own",
    ),
    *(
        after(
            f"{_SCHEDULER}.{method}",
            report_after_load,
            "self recv_req",
            why="adapters outlive the engine that loaded them",
            remove_when="SGLang tells a plugin of loads and unloads",
        )
        for method in ("load_lora_adapter", "unload_lora_adapter")
    ),
)
