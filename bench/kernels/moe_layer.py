"""A MoE layer's time on virtual tensors, with holes, over plain tensors; and what huge pages do.

    the same experts in the same slots, the same tokens, the same routing, on each kind of memory:
        plain              torch.empty, as the padded baseline has it
        plain_small_pages  the same with MADV_NOHUGEPAGE     plain_huge_pages  with MADV_HUGEPAGE
        virtual            mapped slots of a virtual tensor; the others would fault
        virtual_small_pages  its pages faulted in 4 KiB at a time, as shared memory is by itself
    -> paired, order alternating -> each over plain, by wall clock and by processor time

The CPU platform's own forward computes. bench/gpu/run.py uses this on a GPU with kernels of its
own.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.common.layers import ExpertShape, Subject, make_layer, random_experts
from bench.common.pairing import Taken, interleave, ratios, timed
from bench.common.record import write_result
from bench.kernels.native_memory import describe_device
from sgl_esft.platform.moe import moe_forward
from sgl_esft.weave.moe_layer import WovenLayer
from sgl_esft.weave.slot_layout import SlotLayout

GOAL = 1.03  # virtual over plain on a CPU; 1.01 on a GPU
PLAIN, VIRTUAL = "plain", "virtual"
TOP_K = 6

_MADV_HUGEPAGE, _MADV_NOHUGEPAGE = 14, 15
_THP = Path("/sys/kernel/mm/transparent_hugepage")


@dataclass(frozen=True)
class Slots:
    """A layer's slots and how many experts each adapter has; fewer than its slots leave holes."""

    layout: SlotLayout
    adapters: tuple[int, ...]


SMALL = Slots(SlotLayout(8, 8, 2, 4), (3, 2))
V2_LITE = Slots(SlotLayout(64, 64, 4, 13), (9, 12, 8, 10))


@dataclass(frozen=True)
class Batch:
    """What enters the layer."""

    hidden: torch.Tensor  # [num_tokens, H]
    topk_weights: torch.Tensor  # [num_tokens, k] float32
    slot_ids: torch.Tensor  # [num_tokens, k] int32, mapped slots


def make_batch(num_tokens: int, slots: Sequence[int], hidden: int, device: str) -> Batch:
    """Tokens that each go to TOP_K different ones of `slots`."""
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.rand(num_tokens, len(slots), generator=generator)
    weights, chosen = scores.topk(min(TOP_K, len(slots)))
    return Batch(
        torch.randn(num_tokens, hidden, generator=generator).to(device, torch.bfloat16),
        weights.to(device),
        torch.tensor(slots, dtype=torch.int32)[chosen].to(device),
    )


def cpu_forward(layer: WovenLayer, batch: Batch) -> torch.Tensor:
    """The CPU reference platform's."""
    return moe_forward(batch.hidden, layer.w13, layer.w2, batch.topk_weights, batch.slot_ids)


def make_layers(subject: Subject, shape: ExpertShape, slots: Slots) -> dict[str, WovenLayer]:
    """A layer for each kind of memory; adapters lie where virtual memory put them."""
    layout = slots.layout
    pages = sum(-(-layout.num_slots * size // subject.page_bytes) for size in shape.slot_bytes)
    capacity = pages * subject.page_bytes
    layers = {
        PLAIN: make_layer(subject, layout, shape, None),
        VIRTUAL: make_layer(subject, layout, shape, subject.open_arena(capacity_bytes=capacity)),
    }
    if subject.backend == "host":
        for name, advice in (("small", _MADV_NOHUGEPAGE), ("huge", _MADV_HUGEPAGE)):
            layers[f"plain_{name}_pages"] = make_layer(subject, layout, shape, None)
            _advise(layers[f"plain_{name}_pages"], advice)
        arena = subject.open_arena(capacity_bytes=capacity, populate=False)
        layers["virtual_small_pages"] = make_layer(subject, layout, shape, arena)
    runs = _map_all(layers[VIRTUAL], slots)
    experts = random_experts(max(map(len, runs)), shape, seed=1)
    for name, layer in layers.items():
        for run in runs:
            if name != VIRTUAL:
                layer.memory.map(run)
            for slot, weights in zip(run, experts.values(), strict=False):
                layer.w13[slot].copy_(weights.w13)
                layer.w2[slot].copy_(weights.w2)
    return layers


def _map_all(layer: WovenLayer, slots: Slots) -> list[range]:
    """Map the base, and the adapters' runs where `place` would put them."""
    runs = [range(slots.layout.num_base)]
    layer.memory.map(runs[0])
    for adapter_slot, count in enumerate(slots.adapters):
        run = layer.memory.choose(slots.layout.adapter_range(adapter_slot), count)
        layer.memory.map(run)
        runs.append(run)
    return runs


def _advise(layer: WovenLayer, advice: int) -> None:
    """Before the first touch, so that it decides which pages the tensors get."""
    libc = ctypes.CDLL(None, use_errno=True)
    for tensor in (layer.w13, layer.w2):
        start = -(-tensor.data_ptr() // 4096) * 4096
        size = (tensor.data_ptr() + tensor.nbytes - start) // 4096 * 4096
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice) != 0:
            raise OSError(ctypes.get_errno(), f"madvise({advice}) of a plain tensor failed")


def compare(
    layers: Mapping[str, WovenLayer],
    forward: Callable[[WovenLayer], torch.Tensor],
    rounds: int,
    *,
    repeats: int = 1,
    wait: Callable[[], object],
) -> dict[str, Any]:
    """Every layer over the plain one. Raises RuntimeError when their outputs are not equal."""
    outputs = {name: forward(layer) for name, layer in layers.items()}
    unequal = [name for name, out in outputs.items() if not torch.equal(out, outputs[PLAIN])]
    if unequal:
        raise RuntimeError(f"other outputs than the plain tensor's on {', '.join(unequal)}")

    def run(layer: WovenLayer) -> None:
        for _ in range(repeats):
            forward(layer)

    runs: dict[str, Callable[[], Taken]] = {}
    for name, layer in layers.items():
        runs[name] = lambda layer=layer: timed(lambda: run(layer), wait)
    taken = interleave(runs, rounds)
    return {name: ratios(taken[name], taken[PLAIN]) for name in layers if name != PLAIN}


def huge_page_settings() -> dict[str, str]:
    """The kernel's, the chosen word of each."""
    found = {}
    for name in ("enabled", "shmem_enabled"):
        text = (_THP / name).read_text() if (_THP / name).exists() else "[not supported]"
        found[name] = text[text.index("[") + 1 : text.index("]")]
    return found


def measure(
    subject: Subject, shape: ExpertShape, batch_sizes: Sequence[int], rounds: int
) -> dict[str, Any]:
    """A row for each number of tokens."""
    layers = make_layers(subject, shape, SMALL)
    slots = sorted(layers[VIRTUAL].mapped_slots)
    rows = []
    for num_tokens in batch_sizes:
        batch = make_batch(num_tokens, slots, shape.hidden, subject.device)
        forward = partial(cpu_forward, batch=batch)
        over = compare(layers, forward, rounds, wait=subject.synchronize)
        rows.append({"num_tokens": num_tokens, "over_plain": over})
    return {
        "num_slots": SMALL.layout.num_slots,
        "mapped_slots": slots,
        "top_k": TOP_K,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "huge_pages": huge_page_settings(),
        "rows": rows,
    }


def main() -> None:
    """Measure on the host and write bench/results/moe_layer.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1, help="more wait for the slowest core")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    subject = Subject()
    figures = measure(subject, ExpertShape(), options.batch_sizes, options.rounds)
    for row in figures["rows"]:
        for name, spreads in row["over_plain"].items():
            wall, cpu = (spreads[clock] for clock in ("wall", "cpu"))
            print(
                f"{row['num_tokens']:4} {name:20} {wall['median']:.3f} ({wall['q1']:.3f} to "
                f"{wall['q3']:.3f}), cpu {cpu['median']:.3f}"
            )
    path = write_result(
        "moe_layer",
        {"what": "time of a MoE layer over plain tensors", "goal": GOAL, **figures},
        device=describe_device(subject.backend, subject.library),
    )
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
