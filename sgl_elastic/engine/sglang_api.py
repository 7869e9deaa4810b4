"""What the engine's side calls in SGLang: every such name, once.

Imported only in SGLang's scheduler processes; hooks.py names what is hooked, this file what is
called or set.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.registry import (
    TreeCacheBuildContext,
    register_radix_cache_backend,
    registered_radix_cache_backends,
)
from sglang.srt.model_loader.loader import (
    DefaultModelLoader,
    _get_quantization_config,
    _initialize_model,
    post_load_weights,
    set_default_torch_dtype,
)
from sglang.srt.runtime_context import get_lora, get_parallel

from sgl_elastic.engine.idle import WakefulSleeper
from sgl_elastic.errors import ElasticInternalError

RADIX_BACKEND = "sgl_elastic"
_SLOTS_DTYPE = torch.int64


def tp_rank() -> int:
    """This process's number in its instance."""
    return int(get_parallel().tp_rank)


def register_prefix_cache() -> None:
    """Offer SGLang's plain radix tree, whose nodes handover.py can read and write, by name."""
    if RADIX_BACKEND not in registered_radix_cache_backends():
        register_radix_cache_backend(RADIX_BACKEND, _make_radix_cache)


def _make_radix_cache(context: TreeCacheBuildContext) -> RadixCache:
    return RadixCache(context.params)


def make_skeleton(loader: Any, model_config: Any, device_config: Any) -> torch.nn.Module:
    """SGLang's model, without weights. Raises ElasticInternalError for a foreign loader."""
    if type(loader) is not DefaultModelLoader:
        raise ElasticInternalError(
            f"loader {type(loader).__name__}: the elastic runtime loads --load-format auto only"
        )
    quant_config = _get_quantization_config(model_config, loader.load_config)
    with set_default_torch_dtype(model_config.dtype), torch.device(device_config.device):
        return _initialize_model(model_config, loader.load_config, quant_config)  # type: ignore[no-any-return]


def derive(model: torch.nn.Module, device: torch.device) -> None:
    """What SGLang computes from loaded weights, such as MLA's absorbed projections."""
    DefaultModelLoader.postprocess_weights(model, device)
    post_load_weights(model)


def weight_files(loader: Any, model_config: Any) -> list[str]:
    """The checkpoint's safetensors files. Raises ElasticInternalError for another kind."""
    _, files, is_safetensors = loader._prepare_weights(
        model_config.model_path, model_config.revision, fall_back_to_pt=False
    )
    if not is_safetensors:
        raise ElasticInternalError(f"{model_config.model_path}: only safetensors are loaded")
    return list(files)


def load_weights(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """SGLang's own mapping of checkpoint names to parameters."""
    model.load_weights(weights)


def kv_row_bytes(model_config: Any, dtype: torch.dtype) -> list[int]:
    """Bytes a token of each KV buffer, in the order of the pool's: MLA's, or all K then all V."""
    num_layers = int(model_config.num_hidden_layers)
    if model_config.attention_arch.name == "MLA":
        width = model_config.kv_lora_rank + model_config.qk_rope_head_dim
        return [width * dtype.itemsize] * num_layers
    width = model_config.get_num_kv_heads(get_parallel().attn_tp_size) * model_config.head_dim
    return [width * dtype.itemsize] * (2 * num_layers)


# ---- the scheduler's KV and prefix cache ----


def set_kv_capacity(scheduler: Any, num_tokens: int) -> None:
    """From now on the rank has `num_tokens` token slots; the allocator's free list is not touched.

    SGLang copies the number when it starts, so every copy is set.
    """
    runner = scheduler.tp_worker.model_runner
    runner.max_total_num_tokens = num_tokens
    scheduler.token_to_kv_pool_allocator.size = num_tokens
    scheduler.token_to_kv_pool_allocator.get_kvcache().size = num_tokens
    scheduler.max_total_num_tokens = num_tokens
    for part in (
        scheduler.pool_stats_observer,
        scheduler.invariant_checker,
        scheduler.kv_events_publisher,
        scheduler.load_inquirer,
    ):
        object.__setattr__(part, "max_total_num_tokens", num_tokens)  # some are frozen
    longest = min(scheduler.model_config.context_len - 1, num_tokens - 1)
    scheduler.max_req_len = longest
    scheduler.max_req_input_len = longest - 5


def kv_capacity(scheduler: Any) -> int:
    """The rank's token slots."""
    return int(scheduler.max_total_num_tokens)


def set_free_slots(scheduler: Any, used: torch.Tensor) -> None:
    """All slots but the `used` ones are free, lowest first."""
    allocator = scheduler.token_to_kv_pool_allocator
    is_free = torch.ones(allocator.size + 1, dtype=torch.bool, device=used.device)
    is_free[0] = False  # the padding row
    is_free[used] = False
    allocator.free_pages = is_free.nonzero().flatten().to(_SLOTS_DTYPE)
    allocator.release_pages = allocator.release_pages[:0]
    allocator.free_group = None


def add_free_slots(scheduler: Any, first: int, last: int) -> None:
    """Slots [first, last] are free too."""
    allocator = scheduler.token_to_kv_pool_allocator
    fresh = torch.arange(first, last + 1, dtype=_SLOTS_DTYPE, device=allocator.free_pages.device)
    allocator.free_pages = torch.cat((allocator.free_pages, fresh))


def reset_prefix_cache(scheduler: Any) -> None:
    """An empty tree; the slots it held are nobody's."""
    scheduler.tree_cache.reset()


def insert_prefix(
    scheduler: Any,
    token_ids: array[int],
    slots: torch.Tensor,
    extra_key: str | None,
    cache_salt: str | None,
) -> int:
    """The tokens' KV is in these slots. Returns how many of them the tree had already."""
    key = RadixKey(token_ids, extra_key, cache_salt=cache_salt)
    result = scheduler.tree_cache.insert(InsertParams(key=key, value=slots))
    return int(result.prefix_len)


def prefix_paths(scheduler: Any) -> Iterator[tuple[list[Any], Any]]:
    """(nodes from below the root to the leaf, leaf) for each leaf of the tree."""
    tree = scheduler.tree_cache
    if not isinstance(tree, RadixCache):
        raise ElasticInternalError(f"prefix cache {type(tree).__name__} cannot be handed over")
    stack: list[list[Any]] = [[child] for child in tree.root_node.children.values()]
    while stack:
        path = stack.pop()
        children = list(path[-1].children.values())
        if not children:
            yield path, path[-1]
        stack.extend([*path, child] for child in children)


def evict_all_but(scheduler: Any, num_tokens: int) -> None:
    """Evict the prefixes used longest ago until the tree holds no more than `num_tokens`."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    tree = scheduler.tree_cache
    surplus = int(tree.total_size()) - num_tokens
    if surplus > 0:
        tree.evict(EvictParams(num_tokens=surplus))


# ---- requests ----


def waiting_requests(scheduler: Any) -> list[Any]:
    """Requests that have no KV: all of them, in a rank that has retracted."""
    return list(scheduler.waiting_queue)


def forget_requests(scheduler: Any) -> None:
    """They go on elsewhere."""
    scheduler.waiting_queue.clear()
    scheduler.grammar_manager.grammar_queue.clear()


def retract_into_cache(reqs: Iterable[Any], tree_cache: Any) -> None:
    """Retract running requests, but leave their KV in the prefix cache for when they go on."""
    for req in reqs:
        release_kv_cache(req, tree_cache, checkpoint=True)
        req.reset_for_retract()


def drop_pending_input(scheduler: Any) -> int:
    """Discard requests that reached this rank after it stopped. Returns how many."""
    import zmq
    from sglang.srt.managers.io_struct import sock_recv

    num_dropped = 0
    while scheduler.recv_from_tokenizer is not None:
        try:
            sock_recv(scheduler.recv_from_tokenizer, zmq.NOBLOCK)
        except zmq.ZMQError:
            break
        num_dropped += 1
    return num_dropped


def replace_sleeper(scheduler: Any, descriptor: int) -> WakefulSleeper | None:
    """An idle rank's sleep ends when the descriptor is readable; None if it never sleeps."""
    sleeper = getattr(scheduler, "idle_sleeper", None)
    if sleeper is None:
        return None
    scheduler.idle_sleeper = WakefulSleeper(sleeper.poller, descriptor)
    return scheduler.idle_sleeper  # type: ignore[no-any-return]


def resume_paused(scheduler: Any) -> None:
    """Take SGLang's pause back; it has ended, and counts as a pause in what SGLang measures."""
    scheduler._engine_paused = False
    if scheduler._pause_started_at is not None:
        scheduler._pause_intervals.append((scheduler._pause_started_at, time.monotonic()))
        scheduler._pause_started_at = None


def initial_adapters() -> list[Any]:
    """The LoRARefs of the adapters the server was started with."""
    return list(get_lora().lora_paths or ())
