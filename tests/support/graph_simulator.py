"""A contract simulator of CUDA graphs, over CPU tensors: strict where CUDA is.

    with installed(): torch.cuda.CUDAGraph, graph, Stream, Event, ... are this file's
    with torch.cuda.graph(graph, stream=stream): ...   runs once; every operator is recorded
    graph.replay()                                     the recorded operators, and no Python else

What is recorded is an operator with the very memory it met. A replay runs it on that memory again,
and lays what it returns where the capture's result lay, so addresses stay, as on a device. A device
computes nothing in a capture, so what was computed here is poisoned when the capture ends. Checked
is what CUDA's documents say of one:

- nothing waits for the device: no `.item()`, no branch on a tensor, no result whose size depends
  on values, no synchronize, no copy to the host, no tensor made of Python's values;
- it runs on a stream of its own, and streams that it forks come back to it;
- what it allocates is its own and holds nothing between replays: it is poisoned before each one;
- memory from before the capture is not the graph's: if that is gone, a replay would read what is
  there now, and fails here.

Not simulated: time, memory that graphs of one pool share, random numbers (refused), and copies by
`.to()`, since host and device are one. A kernel must be an operator of torch to be seen; one that
is called by another way runs in the capture alone, and a replay misses it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten


class GraphContractError(RuntimeError):
    """What CUDA would refuse, or answer wrongly."""


# Operators whose results a host must know before it can go on.
_WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXING = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
}
_ALLOCATIONS = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
_FROM_PYTHON = {"lift_fresh", "lift_fresh_copy", "lift"}
_TO_HOST = (torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.pin_memory)


@dataclass(frozen=True)
class _Memory:
    """A tensor as a graph knows it: an address, a type and a layout."""

    storage: StorageWeakRef
    own: torch.Tensor | None  # keeps what the capture allocated; None = from before it
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self, user: str) -> torch.Tensor:
        """Raises GraphContractError if the memory has been given back."""
        if self.storage.expired():
            raise GraphContractError(
                f"{user} of a replay uses memory that was there before the capture and has been "
                f"freed since: {self.dtype} {tuple(self.size)}. Keep it, and write into it"
            )
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class _Node:
    """An operator, what it is called with, and where its new results lie."""

    func: Any
    leaves: tuple[Any, ...]  # of (args, kwargs), tensors as _Memory
    spec: Any
    results: tuple[_Memory | None, ...]  # None = no tensor, or a view of what it was given

    def run(self) -> None:
        name = str(self.func)
        leaves = [i.tensor(name) if isinstance(i, _Memory) else i for i in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        found, _ = tree_flatten(self.func(*args, **kwargs))
        for value, place in zip(found, self.results, strict=True):
            if hasattr(value, "wait") and not isinstance(value, torch.Tensor):
                value.wait()  # of a collective
            if place is not None and _name(self.func) not in _ALLOCATIONS:
                place.tensor(name).copy_(value)


class _Recorder(TorchDispatchMode):
    """Below autograd: each operator that reaches a kernel."""

    def __init__(self, graph: CUDAGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        _check_operator(func, args)
        self._graph._check_stream(str(func))
        with self:
            parts = func.decompose(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        out = func(*args, **(kwargs or {}))
        if not func.is_view:  # which launches no kernel
            self._graph._record(func, args, kwargs or {}, out)
        return out


class _HostCalls(TorchFunctionMode):
    """Above the operators: copies to the host, which CPU tensors do without."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _TO_HOST:
            raise GraphContractError(f"{func.__name__} in a capture copies to the host")
        return func(*args, **(kwargs or {}))


def _name(func: Any) -> str:
    return str(func._schema.name).partition("::")[2]


def _check_operator(func: Any, args: tuple[Any, ...]) -> None:
    name = _name(func)
    if name in _FROM_PYTHON:
        raise GraphContractError(
            "a tensor made of Python's values in a capture is a copy from pageable host memory"
        )
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise GraphContractError(f"{func} in a capture: random numbers are not simulated")
    if func in _INDEXING:
        masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        if masks:
            raise GraphContractError(f"{func} by a mask in a capture waits for its number of rows")
    elif _WAITS & set(func.tags):
        raise GraphContractError(f"{func} in a capture waits for the device")


class Stream:
    """An order of work. Everything here happens at once, so only who waits for whom is kept."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device, self.priority = device, priority
        self.stream_id = next(_stream_ids)

    def wait_stream(self, other: Stream) -> None:
        _joins(self, other)

    def wait_event(self, event: Event) -> None:
        if event._stream is not None:
            _joins(self, event._stream)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _refuse_in_capture("Stream.synchronize")

    def query(self) -> bool:
        _refuse_in_capture("Stream.query")
        return True

    def __enter__(self) -> Self:
        _streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _streams.pop()


class Event:
    """A point in a stream's work."""

    def __init__(self, **_: Any) -> None:
        self._stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or current_stream()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        _refuse_in_capture("Event.synchronize")

    def query(self) -> bool:
        _refuse_in_capture("Event.query")
        return True


_stream_ids = itertools.count()
_streams = [Stream()]  # the current one last; the first is the default stream
_pools = itertools.count(1)
_capturing: list[CUDAGraph] = []  # at most one


def _joins(waiter: Stream, other: Stream) -> None:
    """In a capture a stream joins by waiting for one that is in it."""
    for graph in _capturing:
        if other in graph._captured:
            graph._captured.add(waiter)
            graph._unjoined.discard(other)
            if waiter is not graph._stream:
                graph._unjoined.add(waiter)


def _refuse_in_capture(what: str) -> None:
    if _capturing:
        raise GraphContractError(f"{what} is not permitted while a stream is capturing")


class CUDAGraph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._nodes: list[_Node] | None = None
        self._own: dict[int, torch.Tensor] = {}  # storage -> a tensor of it
        self._stream = _streams[0]
        self._captured: set[Stream] = set()
        self._unjoined: set[Stream] = set()
        self._pool: Any = None
        self._recording = ExitStack()
        self.num_replays = 0

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        _refuse_in_capture("capture_begin")
        if self._nodes is not None:
            raise GraphContractError("a graph is captured once")
        self._stream = current_stream()
        if self._stream is _streams[0]:
            raise GraphContractError("a capture needs a stream that is not the default one")
        self._pool = pool or graph_pool_handle()
        self._captured, self._unjoined = {self._stream}, set()
        self._nodes = []
        _capturing.append(self)
        self._recording.enter_context(_HostCalls())
        self._recording.enter_context(_Recorder(self))

    def capture_end(self) -> None:
        self._recording.close()
        _capturing.remove(self)
        if self._unjoined:
            raise GraphContractError("a stream that the capture forked has not come back to it")
        self._poison()

    def _poison(self) -> None:
        with torch.inference_mode():
            for tensor in self._own.values():
                _poison(tensor)

    def replay(self) -> None:
        """Runs what was recorded. Raises GraphContractError."""
        _refuse_in_capture("replay")
        if self._nodes is None:
            raise GraphContractError("replay of a graph that was not captured")
        self.num_replays += 1
        self._poison()
        with torch.inference_mode():
            for node in self._nodes:
                node.run()

    def reset(self) -> None:
        self._nodes, self._own = None, {}

    def pool(self) -> Any:
        return self._pool

    @property
    def operators(self) -> list[str]:
        """Names of what a replay runs, in order."""
        return [str(node.func) for node in self._nodes or ()]

    def _check_stream(self, name: str) -> None:
        if current_stream() not in self._captured:
            raise GraphContractError(f"{name} runs on a stream that the capture does not know")

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        assert self._nodes is not None
        leaves, spec = tree_flatten((args, kwargs))
        given = {_storage(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        results, _ = tree_flatten(out)
        places = [self._place_of(result, given) for result in results]
        known = tuple(self._memory(i) if isinstance(i, torch.Tensor) else i for i in leaves)
        self._nodes.append(_Node(func, known, spec, tuple(places)))

    def _place_of(self, result: Any, given: set[int]) -> _Memory | None:
        if not isinstance(result, torch.Tensor) or _storage(result) in given:
            return None
        self._own[_storage(result)] = result
        return self._memory(result)

    def _memory(self, tensor: torch.Tensor) -> _Memory:
        return _Memory(
            StorageWeakRef(tensor.untyped_storage()),
            self._own.get(_storage(tensor)),
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            tensor.storage_offset(),
        )


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _poison(tensor: torch.Tensor) -> None:
    """No value that anything could mean, and no valid index."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


@contextmanager
def graph(
    cuda_graph: CUDAGraph,
    pool: Any = None,
    stream: Stream | None = None,
    capture_error_mode: str = "global",
) -> Iterator[None]:
    """torch.cuda.graph."""
    with stream or Stream():
        cuda_graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        except BaseException:
            cuda_graph._recording.close()
            _capturing.clear()
            raise
        cuda_graph.capture_end()


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """torch.cuda.stream."""
    with stream or current_stream():
        yield


def current_stream(device: Any = None) -> Stream:
    return _streams[-1]


def synchronize(device: Any = None) -> None:
    _refuse_in_capture("synchronize")


def is_current_stream_capturing() -> bool:
    return any(current_stream() in each._captured for each in _capturing)


def graph_pool_handle() -> tuple[int, int]:
    return (0, next(_pools))


_SIMULATED: dict[str, Any] = {
    each.__name__: each
    for each in (
        CUDAGraph,
        Event,
        Stream,
        current_stream,
        graph,
        graph_pool_handle,
        is_current_stream_capturing,
        stream,
        synchronize,
    )
}


class _Device:
    """What `torch.get_device_module` gives for the simulated device."""

    def __getattr__(self, name: str) -> Any:
        return _SIMULATED[name] if name in _SIMULATED else getattr(torch.cpu, name)


@contextmanager
def installed() -> Iterator[None]:
    """Inside, torch.cuda's graphs, streams and events are simulated, and the CPU is the device."""
    get_device_module: Callable[..., Any] = torch.get_device_module

    def module_of(device: Any = None) -> Any:
        is_cpu = device is None or torch.device(device).type == "cpu"
        return _Device() if is_cpu else get_device_module(device)

    with (
        mock.patch.multiple(torch.cuda, **_SIMULATED),
        mock.patch.object(torch, "get_device_module", module_of),
    ):
        yield
