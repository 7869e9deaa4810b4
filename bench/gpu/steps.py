"""The steps of bench/gpu/run.py, each run in a process of its own: `python -m bench.gpu.steps
NAME`.

    a step, at full or tiny size, on the driver or a contract simulator -> its figures as JSON

A device that faults takes its process with it, and no other step.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import sgl_vmm
import torch

from bench.common.layers import ExpertShape, Subject
from bench.common.record import spread
from bench.expertweave import adapter_load
from bench.gpu import model as gpu_model
from bench.gpu import plan, self_check
from bench.gpu import reroute as gpu_reroute
from bench.gpu.moe import METHODS
from bench.kernels import moe_layer
from bench.kernels import vmm as bench_vmm
from sgl_esft.formats.adapter_shapes import TABLE_1, AdapterShape, profile_shapes
from sgl_esft.weave.expert_memory import SlotUsage
from sgl_esft.weave.slot_layout import SlotLayout

MIB = 1 << 20


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    vmm_bytes: int  # of pages in use at once
    page_sizes: tuple[int, ...]
    rounds: int
    shape: ExpertShape
    layers: int  # MoE layers, of the adapter that is loaded and of the model that is counted
    load_experts: int  # a layer: 6 of V2-Lite's in 26 layers are 2.7 GB
    base_experts: int
    adapters: int
    shared_pages: int
    moe_slots: moe_layer.Slots
    moe_tokens: tuple[int, ...]
    moe_repeats: int
    reroute: gpu_reroute.Size
    model: Callable[[int | None], gpu_model.Size]  # of free bytes; reads files
    is_tiny: bool = False
    served_layers: int | None = None  # of the model behind servers; None = all that fit

    @property
    def served(self) -> dict[str, Any]:
        """What serve.py and elastic.py are sized by."""
        return {"tiny": self.is_tiny, "num_layers": self.served_layers}


FULL = Size(
    vmm_bytes=512 * MIB,
    page_sizes=(2 * MIB, 16 * MIB, 64 * MIB),
    rounds=20,
    shape=ExpertShape(),
    layers=26,
    load_experts=6,
    base_experts=64,
    adapters=10,
    shared_pages=64,
    moe_slots=moe_layer.V2_LITE,
    moe_tokens=(1, 8, 64, 256),
    moe_repeats=20,
    reroute=gpu_reroute.FULL,
    model=gpu_model.full_size,
)
TINY = Size(
    vmm_bytes=8 * MIB,
    page_sizes=(2 * MIB, 4 * MIB),
    rounds=2,
    shape=ExpertShape(hidden=64, width=48),
    layers=2,
    load_experts=3,
    base_experts=4,
    adapters=3,
    shared_pages=3,
    moe_slots=moe_layer.SMALL,
    moe_tokens=(1, 4),
    moe_repeats=1,
    reroute=gpu_reroute.TINY,
    model=gpu_model.tiny_size,
    is_tiny=True,
)

Figures = dict[str, Any]


def vmm(subject: Subject, size: Size) -> Figures:
    """What each call costs, at each page size."""
    rows = []
    for page_bytes in size.page_sizes:
        pages = size.vmm_bytes // page_bytes
        rows += bench_vmm.measure(subject.backend, page_bytes, pages, size.rounds, subject.library)
    return {"rows": rows}


def fragmentation(subject: Subject, size: Size) -> Figures:
    """F_mem of table 1's adapters over the base: every page is there, and counted.

    Of as many layers as the device has room for; the share is the same in each.
    """
    free_before = _free_bytes(subject)
    shapes = _profile(size)
    num_layers = fragmentation_layers(size, shapes, free_before)
    arena = subject.open_arena()
    slots = max(max(shape.experts.values()) for shape in shapes)
    layout = SlotLayout(size.base_experts, size.base_experts, len(shapes), slots)
    usages = []
    layers = [arena.make_layer(layout.num_slots, size.shape.slot_bytes) for _ in range(num_layers)]
    for number, memory in enumerate(layers):
        memory.map(range(layout.num_base))
        for adapter_slot, shape in enumerate(shapes):
            count = list(shape.experts.values())[number]
            memory.map(memory.choose(layout.adapter_range(adapter_slot), count))
        memory.check_integrity()
        usages.append(memory.usage())
    arena.check_integrity()
    used = sum(usage.used_bytes for usage in usages)
    padded = num_layers * layout.num_slots * size.shape.num_bytes
    state = arena.pool.state()
    return {
        "num_layers": num_layers,
        "num_adapters": len(shapes),
        "max_experts": slots,
        "virtual": _mapped(usages) / used,
        "padded": padded / used,
        "pool_bytes": state.num_pages * arena.page_bytes,
        "used_bytes": used,
        # Of the whole device, so other processes count too; null on a simulator.
        "device_bytes": None if free_before is None else free_before - _free_bytes(subject),
    }


def fragmentation_layers(size: Size, shapes: list[AdapterShape], free: int | None) -> int:
    """Layers whose pages fit into `free` bytes; all on a simulator. Raises DoesNotFitError."""
    if free is None:
        return size.layers
    counts = [sum(list(shape.experts.values())[n] for shape in shapes) for n in range(size.layers)]
    # Each adapter's run of slots may begin and end inside a page, in both tensors.
    edges = 4 * len(shapes) * size.page_sizes[0]
    layers = [(size.base_experts + count) * size.shape.num_bytes + edges for count in counts]
    return plan.layers_that_fit(free, plan.SERVER_BYTES, layers)


def _mapped(usages: list[SlotUsage]) -> int:
    return sum(usage.mapped_bytes for usage in usages)


def _profile(size: Size) -> list[AdapterShape]:
    """Table 1 over this size's layers; a tiny base has too few experts for it."""

    @dataclass(frozen=True)
    class Spec:
        num_experts: int
        moe_layer_ids: tuple[int, ...]

    if size.base_experts >= max(most for most, _ in TABLE_1.values()):
        spec = Spec(size.base_experts, tuple(range(size.layers)))
        return profile_shapes("table1", spec)[: size.adapters]
    counts = dict.fromkeys(range(size.layers), size.base_experts // 2)
    return [AdapterShape(f"tiny-{i}", counts) for i in range(size.adapters)]


def _free_bytes(subject: Subject) -> int | None:
    return torch.cuda.mem_get_info()[0] if subject.device == "cuda" else None


def load(subject: Subject, size: Size) -> Figures:
    """An adapter from (pinned) host memory against one copy of its bytes."""
    rounds = max(2, size.rounds // 2)
    figures = adapter_load.measure(subject, size.shape, size.layers, size.load_experts, rounds)
    return {"goal": 1.25, **figures}


def share(subject: Subject, size: Size) -> Figures:
    """Pages to another process by descriptor: export to mapped and answered, checked both ways."""
    backend = subject.open_arena().backend
    page = max(subject.page_bytes, backend.granularity)
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "bench.gpu.steps", "peer", "--fd", str(theirs.fileno())]
    command += ["--library", subject.library]
    seconds = []
    # `ours` is closed first: that ends the other process too, whatever went wrong here.
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as peer, ours:
        theirs.close()
        _hear(ours)
        for number in range(size.shared_pages):
            handle = backend.create(page)
            at = _mapped_at(backend, page, handle)
            backend.poke(at, _pattern(number))
            start = time.perf_counter()
            exported = backend.export_handle(handle)
            sgl_vmm.send_page(ours.fileno(), exported)
            os.close(exported.fd)
            _hear(ours)  # the other process has mapped it
            seconds.append(time.perf_counter() - start)
            _hear(ours)  # and has checked and written it
            if backend.peek(at, 64) != _pattern(number + 1):
                raise RuntimeError(f"page {number}: the other process's bytes did not arrive")
            backend.unmap(at, page)
            backend.release(at, page)
            backend.destroy(handle)
        ours.shutdown(socket.SHUT_WR)
        if peer.wait(60) != 0:
            raise RuntimeError("the other process failed")
    figures: Figures = {"pages": size.shared_pages, "page_bytes": page, "contents": "equal"}
    if subject.device == "cuda":
        figures["microseconds"] = spread([s * 1e6 for s in seconds])
    return figures


def peer(subject: Subject, fd: int) -> None:
    """The other process of `share`: import, map, check, answer, until the socket ends."""
    backend = subject.open_arena().backend
    page = max(subject.page_bytes, backend.granularity)
    with socket.socket(fileno=fd) as sock:
        sock.send(b"r")
        number = 0
        while True:
            try:
                exported = sgl_vmm.receive_page(sock.fileno())
            except sgl_vmm.PeerGoneError:
                return
            handle = backend.import_handle(exported)
            at = _mapped_at(backend, page, handle)
            sock.send(b"m")
            if backend.peek(at, 64) != _pattern(number):
                raise RuntimeError(f"page {number} came with other bytes")
            backend.poke(at, _pattern(number + 1))
            sock.send(b"w")
            backend.unmap(at, page)
            backend.release(at, page)
            backend.destroy(handle)
            number += 1


def _mapped_at(backend: sgl_vmm.Backend, page: int, handle: sgl_vmm.Handle) -> int:
    at = backend.reserve(page, page)
    backend.map(at, page, handle)
    backend.set_access(at, page)
    return at


def _pattern(number: int) -> bytes:
    return bytes((number * 37 + i) % 251 for i in range(64))


def _hear(sock: socket.socket) -> None:
    if not sock.recv(1):
        raise RuntimeError("the other process ended; its error is above")


def moe(method: str) -> Callable[[Subject, Size], Figures]:
    """The step of one way to compute the layer."""

    def measure(subject: Subject, size: Size) -> Figures:
        layers = moe_layer.make_layers(subject, size.shape, size.moe_slots)
        slots = sorted(layers[moe_layer.VIRTUAL].mapped_slots)
        rows = []
        for num_tokens in size.moe_tokens:
            batch = moe_layer.make_batch(num_tokens, slots, size.shape.hidden, subject.device)
            over = moe_layer.compare(
                layers,
                METHODS[method](batch),
                size.rounds,
                repeats=size.moe_repeats,
                wait=subject.synchronize,
            )
            rows.append({"num_tokens": num_tokens, "over_plain": over[moe_layer.VIRTUAL]["wall"]})
        return {"method": method, "goal": 1.01, "num_slots": len(slots), "rows": rows}

    return measure


def served(module: str, sized_by: str = "serve") -> Callable[[Subject, Size], Figures]:
    """The step of a module of bench.gpu that starts real servers, as large as `sized_by` says.

    Both are imported when it is run, because they need more than torch.
    """

    def measure(_subject: Subject, size: Size) -> Figures:
        step, sizes = (importlib.import_module(f"bench.gpu.{name}") for name in (module, sized_by))
        figures: Figures = step.measure(sizes.sized(**size.served))
        return figures

    return measure


STEPS: dict[str, Callable[[Subject, Size], Figures]] = {
    "self-check": lambda subject, size: self_check.check(subject, size.reroute.shape),
    "vmm": vmm,
    "fragmentation": fragmentation,
    "load": load,
    "share": share,
    **{f"moe: {method}": moe(method) for method in METHODS},
    "reroute: check": lambda subject, size: gpu_reroute.check(subject, size.reroute),
    "reroute: launches": lambda subject, size: gpu_reroute.launches(subject, size.reroute),
    "reroute: graph safety": lambda subject, size: gpu_reroute.graph_safety(subject, size.reroute),
    "reroute: time": lambda subject, size: gpu_reroute.time_calls(subject, size.reroute),
    "model step": lambda subject, size: gpu_model.measure(
        subject, size.model(_free_bytes(subject))
    ),
    "serve: equality": served("equality"),
    "tiers: equality": served("tiers"),
    "quantised: equality": served("quantised"),
    "serve": served("serve"),
    "elastic": served("elastic", sized_by="elastic"),
}


def main() -> None:
    """Run one step and print its figures as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("step", choices=[*STEPS, "peer"])
    parser.add_argument("--library", default="", help="a contract simulator instead of the driver")
    parser.add_argument("--tiny", action="store_true")
    layers = os.environ.get("BENCH_LAYERS")
    parser.add_argument("--layers", type=int, default=layers, help="of the model behind servers")
    parser.add_argument("--fd", type=int, help="for the other process of `share`")
    options = parser.parse_args()
    subject = Subject("cuda", options.library)
    if subject.device == "cuda":
        torch.zeros(1, device="cuda")  # makes the context, before anything is timed
    if options.step == "peer":
        peer(subject, options.fd)
        return
    size = replace(TINY if options.tiny else FULL, served_layers=options.layers)
    figures = STEPS[options.step](subject, size)
    print(json.dumps({"shape": asdict(size.shape), **figures}), flush=True)
    # At a regular exit, threads of communication libraries may wait for each other for good.
    os._exit(0)


if __name__ == "__main__":
    main()
