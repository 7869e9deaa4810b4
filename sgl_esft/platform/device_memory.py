"""A CPU rank's device: one memory arena with a byte budget, and the books of what is in it.

    --device-memory --> [device_memory] --> get_available_gpu_memory (a hook) --> SGLang's KV cache
    model, expert pages, KV pool --^  ^--> available_bytes --> the expert pool's budget
                     DeviceLedger ----'    (what other servers use on the same device)

Counted is what stays: weights, pages of expert memory (free ones too), the KV pool. Activations
and the small tables of requests are not; `--mem-fraction-static` leaves room for them. Adapters on
the host are host memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from sgl_esft import env, platform
from sgl_esft.errors import ConfigError, DeviceMemoryError
from sgl_esft.platform.device_ledger import DeviceLedger
from sgl_esft.weave import expert_tensor
from sgl_esft.weave.expert_memory import VirtualMemory

_runners: weakref.WeakSet[Any] = weakref.WeakSet()


@dataclass(frozen=True)
class DeviceUsage:
    """Bytes of the device that this process uses."""

    weights: int  # outside expert pages
    expert_pages: int
    kv_cache: int

    @property
    def total(self) -> int:
        return self.weights + self.expert_pages + self.kv_cache


def add_runner(runner: Any) -> None:
    """From now on, count SGLang's model runner: its model and its KV pool, as they come."""
    _runners.add(runner)


def budget_bytes() -> int | None:
    """What each device has; None without a budget. Raises ConfigError."""
    budget = env.device_memory()
    if budget is not None and not platform.is_active():
        raise ConfigError(f"{env.DEVICE_MEMORY} is for the CPU platform; unset it")
    return budget


def usage() -> DeviceUsage:
    """What this process uses now."""
    pools = [arena.pool.state() for arena in expert_tensor.open_arenas()]
    return DeviceUsage(
        weights=sum(model_bytes(runner.model) for runner in _runners if hasattr(runner, "model")),
        expert_pages=sum(pool.num_pages * pool.page_bytes for pool in pools),
        kv_cache=sum(_kv_bytes(getattr(r, "token_to_kv_pool", None)) for r in _runners),
    )


def available_bytes(device_id: int | None = None) -> int | None:
    """What is left of the device (this process's own by default); None without a budget."""
    budget = budget_bytes()
    if budget is None:
        return None
    own = usage().total
    return max(0, budget - own - _record(device_id, own, budget))


def charge() -> None:
    """Write down what this process uses now. Raises DeviceMemoryError when the device has less."""
    budget = budget_bytes()
    if budget is None:
        return
    own = usage()
    others = _record(None, own.total, budget)
    if own.total + others > budget:
        raise DeviceMemoryError(_described(budget, own, others))


def explain(error: Exception) -> None:
    """Add to SGLang's error what the device holds, if it has a budget."""
    budget = budget_bytes()
    if budget is not None:
        own = usage()
        error.add_note(_described(budget, own, _record(None, own.total, budget)))


def _described(budget: int, own: DeviceUsage, others: int) -> str:
    return (
        f"device {_own_device()} has {budget} bytes: others use {others}, and this process needs "
        f"{own.weights} for weights, {own.expert_pages} for expert pages and {own.kv_cache} for "
        "the KV cache: raise --device-memory, or stop another server"
    )


def limit_expert_pools() -> None:
    """Expert pools may grow by what the device has left, and no further."""
    available = available_bytes()
    if available is None:
        return
    for arena in expert_tensor.open_arenas():
        pool = arena.pool.state()
        max_pages = min(pool.max_pages, pool.num_pages + available // pool.page_bytes)
        arena.pool.set_budget(max_pages * pool.page_bytes)


def least_available_bytes(device_id: int, cpu_group: Any, *, over_ranks: bool) -> int | None:
    """As `available_bytes`; `over_ranks` takes the smallest of all ranks in the gloo group."""
    available = available_bytes(device_id)
    if available is None or not over_ranks:
        return available
    least = torch.tensor(available, dtype=torch.int64)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=cpu_group)
    return int(least)


def model_bytes(model: torch.nn.Module) -> int:
    """Bytes of all tensors that the model holds, each storage once, without expert pages."""
    in_pages = set(_page_addresses(model))
    storages = {}
    for tensor in _tensors(model):
        if tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(size for address, size in storages.items() if address not in in_pages)


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers, and what models derive from them and keep as plain attributes."""
    for module in model.modules():
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)
        yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))


def _page_addresses(model: torch.nn.Module) -> Iterator[int]:
    """Where tensors begin whose memory the expert pool has counted."""
    for module in model.modules():
        memory = getattr(module, "esft_memory", None)
        if isinstance(memory, VirtualMemory):
            yield from (tensor.address for tensor in memory.tensors)


def _kv_bytes(pool: Any) -> int:
    """SGLang says it in one number, or in two for keys and values."""
    if pool is None:
        return 0
    size = pool.get_kv_size_bytes()
    return int(sum(size)) if isinstance(size, Iterable) else int(size)


def _record(device_id: int | None, own_bytes: int, budget: int) -> int:
    """What others use on the device, with our own bytes written down where there are others."""
    path = env.device_ledger()
    if path is None:
        return 0
    device_id = _own_device() if device_id is None else device_id
    return DeviceLedger(path).record(device_id, own_bytes, budget)


def _own_device() -> int:
    return next((int(runner.gpu_id) for runner in _runners), 0)
