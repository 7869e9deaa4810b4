"""Decode steps of experts in tiers, by SGLang's breakable graphs and eagerly.

    python -m tests.fast.graphs.tier_steps FOLDER  ->  {case: [what each rank saw]} as JSON

FOLDER as of decode_steps.py. The CPU is the device twice over: of the simulator of graphs, and of
that of streams, whose rows a copy stream fills from seats in host memory. A layer's experts are the
CPU platform's own, which look at values: in a graph the simulator refuses them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sgl_esft import hook_ledger
from sgl_esft.config import current_config
from sgl_esft.offload.device_rows import DeviceRows, make_seats
from sgl_esft.offload.host_tier import HostTier
from tests.fast.graphs import decode_steps
from tests.fast.graphs.decode_steps import FLAGS, LAYOUTS, Witness
from tests.fast.graphs.rank import Rank, make_rank, resolve
from tests.support import graph_simulator
from tests.support.streams import Streams

NUM_ROWS = 5  # of 8 experts, and 6 of adapters
NUM_SEATS = 6
_READ = ("--expert-loads-per-layer", "1", "--expert-read-threads", "2")  # so nothing is measured
_TIERS = ("--expert-cache", str(NUM_ROWS), *_READ)
LRU = (*_TIERS, "--expert-policy", "lru")
FINEMOE = (*_TIERS, "--expert-policy", "finemoe")


class Device:
    """What stands in for an accelerator's memory and streams."""

    def __init__(self) -> None:
        self.streams = Streams()
        self.rows: DeviceRows | None = None
        self.embedded = 0

    def make_rows(self, layer: Any, reader: Any, link: Any, config: Any) -> DeviceRows:
        """In place of plugin/tiers.py's, which asks CUDA."""

        def read(place: Any, *parts: torch.Tensor) -> None:
            self.streams.writes(parts)
            reader.read(place, *parts)

        seats = make_seats((layer.w13, layer.w2), NUM_SEATS)
        self.rows = DeviceRows(self.streams, seats, read, HostTier(NUM_SEATS, keeps=True))
        return self.rows

    def reading(self, original: Callable[..., Any], module: Any, layout: Any) -> Any:
        """A layer's core, whose reads the simulator of streams is told of."""
        core = original(module, layout)

        def run(dispatch_output: Any, weights: Any) -> Any:
            ids = dispatch_output.topk_output.topk_ids.unique().tolist()
            tensors = (weights.w13, weights.w2)  # platform.moe.PlainExperts
            self.streams.reads(tensor[row] for row in ids if row >= 0 for tensor in tensors)
            return core(dispatch_output, weights)

        return run

    @contextmanager
    def installed(self) -> Iterator[None]:
        from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
            breakable_cuda_graph,
        )

        from sgl_esft.offload.tier import ExpertTier
        from sgl_esft.plugin import hook_table, runner_core, tiers

        hook_ledger.install(hook_table.GRAPH_HOOKS)
        inner, embedded = runner_core.inner_core, ExpertTier.embedded

        def see(tier: Any, embeddings: Any) -> None:
            self.embedded += 1
            embedded(tier, embeddings)

        with (
            graph_simulator.installed(),
            self.streams.watched(),
            mock.patch.object(breakable_cuda_graph, "get_device_module", return_value=torch.cuda),
            mock.patch.object(tiers, "_device_rows", self.make_rows),
            mock.patch.object(runner_core, "inner_core", partial(self.reading, inner)),
            mock.patch.object(ExpertTier, "embedded", see),
        ):
            yield


def graphs_of(rank: Rank) -> list[dict[str, Any]]:
    """How each captured graph was cut, and what its parts touch."""
    tiers = rank.runner.lora_manager.tiers
    rows = _storages(w for layer in tiers.tier.layers for w in (layer.w13, layer.w2))
    weights = rank.runner.model.named_parameters()
    routers = _storages(weight for name, weight in weights if name.endswith("mlp.gate.weight"))
    return [
        {
            "num_breaks": len(graph._break_fns),
            "parts": [part.operators for part in graph._segments],
            "replays": [part.num_replays for part in graph._segments],
            "touches_rows": [bool(rows & _touched(part)) for part in graph._segments],
            "touches_routers": [bool(routers & _touched(part)) for part in graph._segments],
        }
        for graph in rank.graphs.backend._graphs.values()
    ]


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in tensors}


def _touched(part: Any) -> set[int]:
    """Storages that a part of a graph reads or writes."""
    known = [leaf for node in part._nodes for leaf in (*node.leaves, *node.results)]
    return {leaf.storage.cdata for leaf in known if isinstance(leaf, graph_simulator._Memory)}


def count_asked(rank: Rank) -> dict[bool, list[int]]:
    """Experts that each step asks for from now on: by whether a graph ran it."""
    asked: dict[bool, list[int]] = {True: [], False: []}
    forward, tier = rank._forward, rank.runner.lora_manager.tiers.tier

    def counting(batch: Any, *, is_graph: bool) -> torch.Tensor:
        before = tier.totals().num_asked
        found = forward(batch, is_graph=is_graph)
        asked[is_graph].append(tier.totals().num_asked - before)
        return found

    rank._forward = counting  # type: ignore[method-assign]
    return asked


def answer(device: Device, rank: Rank, witness: Witness) -> dict[str, Any]:
    tiers = rank.runner.lora_manager.tiers
    assert device.rows is not None
    device.rows._tier.check_integrity()
    return {
        "steps": witness.seen,
        "graphs": graphs_of(rank),
        "counts": vars(tiers.tier.totals()),
        "from_host": device.rows.host_counts.num_experts,
        "from_storage": tiers.reader.counts.num_experts,
        "embedded": device.embedded,
        "failure": tiers.failure,
    }


def one_rank(folder: Path, device: Device, rank: Rank, tp_rank: int) -> dict[str, Any]:
    """As decode_steps' one rank, and graphs that lack something of a break at the end."""
    witness, asked = Witness(rank), count_asked(rank)
    witness.steps("base alone", [None, None])
    rank.load("math", str(folder / "math"))
    rank.load("law", str(folder / "law"))
    witness.steps("two adapters and the base", ["math", None, "law"])
    rank.unload("math")
    rank.load("code", str(folder / "code"))
    witness.steps("another in its place", ["code", "law", "code"])
    return {
        **answer(device, rank, witness),
        "asked": [asked[True], asked[False]],
        **_broken(rank),
    }


def _broken(rank: Rank) -> dict[str, str]:
    """What a capture ends with without the break, and with one that is run while it is captured."""
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import eager_on_graph

    from sgl_esft import sglang_api
    from sgl_esft.plugin.tier_waves import GraphBreak

    ran = eager_on_graph(True)(vars(GraphBreak)["_run"].run_eager)
    missing = mock.patch.object(sglang_api, "is_in_breakable_graph", return_value=False)
    eager = mock.patch.object(GraphBreak, "_run", ran)
    return {"without_break": _capture(rank, missing), "run_in_capture": _capture(rank, eager)}


def _capture(rank: Rank, broken: Any) -> str:
    try:
        with broken:
            Rank(rank.runner, "breakable")
    except Exception as error:  # noqa: BLE001 - the answer
        return _said(error)
    return "captured"


def _said(error: BaseException | None) -> str:
    """Of SGLang's and what it was raised for: the end of a capture fails after the middle has."""
    if error is None:
        return ""
    return f"{type(error).__name__}: {error}\n{_said(error.__context__)}"


def predicting(folder: Path, device: Device, rank: Rank, tp_rank: int) -> dict[str, Any]:
    """A predictor sees embeddings, in a break of their own."""
    witness = Witness(rank)
    rank.load("math", str(folder / "math"))
    witness.steps("an adapter and the base", ["math", None, None])
    return answer(device, rank, witness)


def data_parallel(folder: Path, device: Device, rank: Rank, tp_rank: int) -> dict[str, Any]:
    witness = Witness(rank)
    rank.load("math", str(folder / "math"))
    rank.load("law", str(folder / "law"))
    witness.steps("unequal", (("math", None, "law"), ("law",))[tp_rank])
    witness.steps("the first idle", ((), ("math", None, "law", "math"))[tp_rank])
    return answer(device, rank, witness)


Scenario = Callable[[Path, Device, Rank, int], dict[str, Any]]
CASES: Mapping[str, tuple[tuple[str, ...], Scenario]] = {
    "one rank": (LRU, one_rank),
    "predicting": (FINEMOE, predicting),
    "DP2": ((*LRU, *LAYOUTS["DP2"]), data_parallel),
}


def _work(case: str, folder: Path, port: int, tp_rank: int) -> dict[str, Any]:
    argv, scenario = CASES[case]
    args = resolve(["--model-path", str(folder / "base"), *FLAGS, *argv])
    current_config.cache_clear()  # what the process that this is a fork of has read
    device = Device()
    with device.installed():
        rank = make_rank(args, port, tp_rank, backend="breakable", own_experts=True)
        return scenario(folder, device, rank, tp_rank)


def main() -> None:
    decode_steps.prepare()
    folder = Path(sys.argv[1])
    found = {"whole": decode_steps.run("one rank", folder)}  # every expert in memory
    for case in sys.argv[2:] or CASES:
        found[case] = decode_steps.run_ranks(
            2 if case == "DP2" else 1, partial(_work, case, folder)
        )
    sys.stdout.write("\n" + json.dumps(found))  # SGLang prints too


if __name__ == "__main__":
    main()
