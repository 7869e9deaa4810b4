"""Loading an adapter from host memory into a layer's slots, over a memcpy of its bytes.

    the woven layers' own `place` of all its experts, each layer on one kind of memory:
        warm     the pool has the pages, with their page tables
        cold     the pages are created
        lazy     the pool has the pages, but each 4 KiB is faulted in anew
        padded   a plain tensor: nothing is mapped
    among copies of the same experts to plain memory that is already there -> ratios of pairs

One thread copies, in the bench as in `place`. Unloading is timed beside it.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.common.layers import DTYPE, ExpertShape, Subject, make_layer, random_experts
from bench.common.pairing import Taken, interleave, nothing, ratios, timed
from bench.common.record import spread, write_result
from bench.kernels.native_memory import describe_device
from sgl_esft.weave.expert_memory import ExpertArena
from sgl_esft.weave.moe_layer import ExpertWeights, WovenLayer
from sgl_esft.weave.slot_layout import SlotLayout

GOAL = 1.5  # warm over memcpy
NUM_BASE = 3  # so that the adapter begins within a page, next to a base expert
Adapter = Sequence[dict[int, ExpertWeights]]  # by layer


@dataclass
class Place:
    """One kind of memory with the adapter's layers on it."""

    layers: list[WovenLayer]
    arena: ExpertArena | None
    is_cold: bool = False
    wait: Callable[[], object] = nothing
    unloads: list[Taken] = field(default_factory=list)

    def load(self, adapter: Adapter) -> Taken:
        """Time loading; the unloading afterwards is noted in `unloads`."""
        if self.is_cold and self.arena:
            self.arena.pool.trim(0)
        taken = timed(lambda: self._place(adapter), self.wait)
        self.unloads.append(timed(self._displace, self.wait))
        return taken

    def _place(self, adapter: Adapter) -> None:
        for layer, experts in zip(self.layers, adapter, strict=True):
            layer.place(0, experts)

    def _displace(self) -> None:
        for layer in self.layers:
            layer.displace(0)


def make_place(
    subject: Subject,
    shape: ExpertShape,
    num_layers: int,
    num_experts: int,
    *,
    virtual: bool = True,
    populate: bool = True,
    is_cold: bool = False,
) -> Place:
    """Layers with a few base experts and room for one adapter."""
    layout = SlotLayout(NUM_BASE, NUM_BASE + num_experts, 1, num_experts)
    pages_a_layer = sum(
        -(-layout.num_slots * size // subject.page_bytes) for size in shape.slot_bytes
    )
    capacity = num_layers * pages_a_layer * subject.page_bytes
    arena = subject.open_arena(capacity_bytes=capacity, populate=populate) if virtual else None
    layers = [make_layer(subject, layout, shape, arena, i) for i in range(num_layers)]
    for layer in layers:
        layer.memory.map(range(NUM_BASE))
    return Place(layers, arena, is_cold, subject.synchronize)


def copier(adapter: Adapter) -> Callable[[], None]:
    """A memcpy of each expert into plain memory that was touched before."""
    sources = [w for layer in adapter for e in layer.values() for w in (e.w13, e.w2)]
    target = torch.ones(sum(s.numel() for s in sources), dtype=DTYPE)
    address, moves = target.data_ptr(), []
    for source in sources:
        moves.append((address, source.data_ptr(), source.nbytes))
        address += source.nbytes

    def copy() -> None:
        for to, origin, num_bytes in moves:
            ctypes.memmove(to, origin, num_bytes)
        assert target is not None  # it owns the memory

    return copy


def one_piece(subject: Subject, num_bytes: int) -> Callable[[], object]:
    """A GPU's floor: the same bytes in one copy from pinned host memory."""
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device=subject.device)
    return lambda: target.copy_(source)


def make_adapter(
    subject: Subject, shape: ExpertShape, num_layers: int, num_experts: int
) -> Adapter:
    """Layers of the same experts, each with memory of its own; pinned for a GPU."""
    pin = subject.device == "cuda"
    experts = random_experts(num_experts, shape, seed=1)

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, pin_memory=pin).copy_(tensor)

    return [
        {expert: ExpertWeights(own(w.w13), own(w.w2)) for expert, w in experts.items()}
        for _ in range(num_layers)
    ]


def measure(
    subject: Subject, shape: ExpertShape, num_layers: int, num_experts: int, rounds: int
) -> dict[str, Any]:
    """Ratios of loading and unloading to a memcpy, by kind of memory; on a GPU also seconds."""
    adapter = make_adapter(subject, shape, num_layers, num_experts)
    adapter_bytes = num_layers * num_experts * shape.num_bytes

    def place(**options: bool) -> Place:
        return make_place(subject, shape, num_layers, num_experts, **options)

    places = {"warm": place(), "cold": place(is_cold=True), "padded": place(virtual=False)}
    if subject.backend == "host":
        places["lazy"] = place(populate=False)
    is_gpu = subject.device == "cuda"
    copy = one_piece(subject, adapter_bytes) if is_gpu else copier(adapter)
    runs: dict[str, Callable[[], Taken]] = {"memcpy": lambda: timed(copy, subject.synchronize)}
    for name, each in places.items():
        runs[name] = lambda each=each: each.load(adapter)
    taken = interleave(runs, rounds)
    figures: dict[str, Any] = {
        "adapter_bytes": adapter_bytes,
        "num_layers": num_layers,
        "experts_per_layer": num_experts,
        "page_bytes": subject.page_bytes,
        "rounds": rounds,
        "over_memcpy": _ratios(taken, {name: taken[name] for name in places}),
        "unload_over_memcpy": _ratios(taken, {n: p.unloads[-rounds:] for n, p in places.items()}),
    }
    if is_gpu:
        figures["seconds"] = {n: spread([t.wall for t in each]) for n, each in taken.items()}
    return figures


def _ratios(
    taken: Mapping[str, Sequence[Taken]], runs: Mapping[str, Sequence[Taken]]
) -> dict[str, object]:
    return {name: ratios(run, taken["memcpy"]) for name, run in runs.items()}


def main() -> None:
    """Measure on the host and write bench/results/adapter_load.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=8, help="experts of the adapter in a layer")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)  # a memcpy has one too
    subject = Subject()
    figures = measure(subject, ExpertShape(), options.layers, options.experts, options.rounds)
    for name, spreads in figures["over_memcpy"].items():
        wall, cpu = spreads["wall"], spreads["cpu"]
        print(f"{name:8} {wall['median']:.3f} ({wall['q1']:.3f} to {wall['q3']:.3f}), cpu {cpu}")
    path = write_result(
        "adapter_load",
        {"what": "loading an adapter from host memory over a memcpy", "goal": GOAL, **figures},
        device=describe_device(subject.backend, subject.library),
    )
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
