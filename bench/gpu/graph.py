"""Work captured once in a CUDA graph: replayed, timed, and its nodes counted.

    work -> [capture] -> Captured -> replay, timer (for bench/common/pairing.py), nodes

On a CPU (`--simulate`) the work itself stands in for its graph: the flow is the same, and there is
nothing to count.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.common.pairing import Taken, timed

Work = Callable[[], torch.Tensor]

# CUgraphNodeType of cuda.h
_NODE_KINDS = {0: "kernel", 1: "memcpy", 2: "memset", 3: "host", 4: "graph", 5: "empty"}
_WARM_UPS = 3  # Triton compiles and cuBLAS chooses outside the capture
FLUSH_BYTES = 256 << 20  # several times an H200's L2 of 50 MB


class GraphError(Exception):
    """A call of the driver failed; the message names it."""


@dataclass(frozen=True)
class Captured:
    """One piece of work, ready to be replayed.

    result: what the work returned, overwritten by each replay; on the work's device.
    """

    replay: Callable[[], object]
    result: torch.Tensor
    graph: torch.cuda.CUDAGraph | None  # None = the work itself, on a CPU

    @property
    def nodes(self) -> dict[str, int] | None:
        """Nodes of one replay by kind, "kernel" among them; None where nothing was captured."""
        return None if self.graph is None else dict(node_kinds(self.graph))


def capture(work: Work, device: str) -> Captured:
    """Capture `work`, whose inputs must be tensors that stay where they are."""
    if device == "cpu":
        result = work().clone()
        return Captured(lambda: result.copy_(work()), result, None)
    _warm_up(work)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        result = work()
    graph.instantiate()
    return Captured(graph.replay, result, graph)


def _warm_up(work: Work) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def timer(captured: Captured, repeats: int, *, is_cold: bool = False) -> Callable[[], Taken]:
    """A run for `pairing.interleave`: seconds of one replay, the mean of `repeats`.

    On a GPU by its own events, between which the host does not matter. `is_cold` overwrites the
    L2 cache before each replay, outside of what is timed.
    """
    if captured.graph is None:
        return lambda: timed(captured.replay)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda") if is_cold else None
    return lambda: _timed_by_events(captured, repeats, flush)


def _timed_by_events(captured: Captured, repeats: int, flush: torch.Tensor | None) -> Taken:
    """The events of each replay lie close around it, so that a flush is not among what they see."""
    spans = [repeats] if flush is None else [1] * repeats
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in spans]
    for (start, end), count in zip(events, spans, strict=True):
        if flush is not None:
            flush.zero_()
        start.record()
        for _ in range(count):
            captured.replay()
        end.record()
    torch.cuda.synchronize()
    milliseconds = sum(start.elapsed_time(end) for start, end in events)
    seconds = milliseconds / 1e3 / repeats
    return Taken(wall=seconds, cpu=seconds)


def node_kinds(graph: torch.cuda.CUDAGraph) -> Counter[str]:
    """How many nodes of each kind a captured graph has. Raises GraphError."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t(0)
    _check("cuGraphGetNodes", driver.cuGraphGetNodes(handle, None, ctypes.byref(count)))
    nodes = (ctypes.c_void_p * count.value)()
    _check("cuGraphGetNodes", driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)))
    kinds: Counter[str] = Counter()
    for node in nodes:
        kind = ctypes.c_int(-1)
        found = driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind))
        _check("cuGraphNodeGetType", found)
        kinds[_NODE_KINDS.get(kind.value, f"kind {kind.value}")] += 1
    return kinds


def _check(call: str, result: int) -> None:
    if result != 0:
        raise GraphError(f"{call} failed with CUresult {result}")
