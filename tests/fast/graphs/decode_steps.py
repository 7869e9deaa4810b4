"""Decode steps by graph and eagerly, on one rank and on two under DP attention.

    python -m tests.fast.graphs.decode_steps FOLDER  ->  {layout: [[what each rank saw]]} as JSON

FOLDER has a base and the adapters math, law and code. Ranks are forks of a process that has
imported SGLang, and meet by gloo. A rank that dies or hangs is said to, and the others are ended.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sgl_esft.config import EsftConfig
from sgl_esft.ports import pick_free_port
from tests.fast.graphs.rank import Prompt, Rank, make_rank, resolve
from tests.support import graph_simulator

NUM_STEPS = 3
TIMEOUT_S = 90.0
_TWO = ("--tp-size", "2", "--ep-size", "2")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one rank": (),
    "TP2": _TWO,
    "DP2": (*_TWO, "--attn-dp-size", "2"),
}
Seen = list[dict[str, Any]]
Work = Callable[[int, int], Any]  # (NCCL port, rank) -> what the rank answers


def prompt(adapter: str | None, seed: int) -> Prompt:
    tokens = torch.randint(250, (5 + seed % 3,), generator=torch.Generator().manual_seed(seed))
    return Prompt(adapter, tuple(tokens.tolist()))


class Witness:
    """Runs steps of a rank and keeps how the graph's logits compare with the eager ones."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.seen: Seen = []

    def steps(self, name: str, adapters: Sequence[str | None]) -> None:
        """One request for each adapter."""
        batch = self.rank.prefill([prompt(adapter, i) for i, adapter in enumerate(adapters)])
        for number in range(NUM_STEPS):
            step = self.rank.step(batch)
            off = (step.graph - step.eager).abs()
            chosen = [logits.argmax(dim=-1) for logits in (step.graph, step.eager)]
            self.seen.append(
                {
                    "name": f"{name}, step {number}",
                    "num_requests": len(step.graph),
                    "off": off.max().item() if len(off) else 0.0,
                    "is_same_token": torch.equal(*chosen),
                    "eager": step.eager.tolist(),
                }
            )

    @property
    def result(self) -> dict[str, Any]:
        from sglang.srt.layers.moe import post_experts_sum_is_one_all_reduce

        graphs = self.rank.graphs.backend._graphs.values()
        operators = [name for graph in graphs for name in graph.operators]
        return {
            "steps": self.seen,
            "replays": sum(graph.num_replays for graph in graphs),
            "reroutes": sum("reroute" in name for name in operators),
            "collectives": sum("c10d" in name for name in operators),
            "defers_sums": post_experts_sum_is_one_all_reduce(),
        }


def one_rank(folder: Path, rank: Rank, tp_rank: int) -> Any:
    """Adapters come, go and change places; the graphs were captured before any was there."""
    witness = Witness(rank)
    witness.steps("base alone", [None, None])
    rank.load("math", str(folder / "math"))
    witness.steps("an adapter has come", ["math"])
    rank.load("law", str(folder / "law"))
    witness.steps("two adapters and the base", ["math", None, "law"])
    rank.unload("math")
    witness.steps("one has gone", [None, "law", "law", None])
    rank.load("code", str(folder / "code"))
    witness.steps("another in its place", ["code", "law", "code"])
    rank.load("math", str(folder / "math"))
    witness.steps("three in two slots", ["math", "code"])
    witness.steps("the base again", [None, None])
    return witness.result


# How many requests each rank has, with which adapters.
_SHARED: tuple[tuple[str, tuple[str | None, ...], tuple[str | None, ...]], ...] = (
    ("the base alone", (None,), (None,)),
    ("unequal", ("math", None, "law"), ("law",)),
    ("the second idle", ("law", "math"), ()),
    ("the first idle", (), ("math", None, "law", "math")),
    ("equal", ("math", "law"), (None, "math")),
)


def tensor_parallel(folder: Path, rank: Rank, tp_rank: int) -> Any:
    """The same batch on both ranks, each with half of the experts."""
    witness = Witness(rank)
    rank.load("math", str(folder / "math"))
    rank.load("law", str(folder / "law"))
    witness.steps("two adapters and the base", ["math", None, "law"])
    return witness.result


def data_parallel(folder: Path, rank: Rank, tp_rank: int) -> Any:
    """Batches of different lengths, also of none; then another adapter in a place."""
    witness = Witness(rank)
    rank.load("math", str(folder / "math"))
    rank.load("law", str(folder / "law"))
    for name, *batches in _SHARED:
        witness.steps(name, batches[tp_rank])
    rank.unload("math")
    rank.load("code", str(folder / "code"))
    witness.steps("another adapter", (("code",), ("law", "code", None))[tp_rank])
    return witness.result


SCENARIOS: dict[str, Callable[[Path, Rank, int], Any]] = {
    "one rank": one_rank,
    "TP2": tensor_parallel,
    "DP2": data_parallel,
}


def run(layout: str, folder: Path) -> list[Any]:
    """What each rank answers: its result, or how it failed."""
    return run_ranks(2 if LAYOUTS[layout] else 1, partial(_work, layout, folder))


def run_ranks(world: int, work: Work) -> list[Any]:
    """As `run`, of any work."""
    port = pick_free_port()
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as answers:
        files = [Path(answers) / str(tp_rank) for tp_rank in range(world)]
        ranks = [
            fork.Process(target=_rank, args=(work, port, tp_rank, file))
            for tp_rank, file in enumerate(files)
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(TIMEOUT_S)
        for each in ranks:
            each.kill()
            each.join()
        return [json.loads(file.read_text()) if file.exists() else "hung" for file in files]


def _work(layout: str, folder: Path, port: int, tp_rank: int) -> Any:
    args = resolve(["--model-path", str(folder / "base"), *FLAGS, *LAYOUTS[layout]])
    with graph_simulator.installed():
        return SCENARIOS[layout](folder, make_rank(args, port, tp_rank), tp_rank)


def _rank(work: Work, port: int, tp_rank: int, answer: Path) -> None:
    try:
        result = work(port, tp_rank)
    except BaseException as error:  # noqa: BLE001 - the answer, whatever it was
        traceback.print_exc()
        result = f"{type(error).__name__}: {error}"
    partial = answer.with_suffix(".part")
    partial.write_text(json.dumps(result))
    partial.rename(answer)
    sys.stderr.flush()
    os._exit(0)


FLAGS = ("--max-adapters", "2", "--max-experts-per-adapter", "3", "--max-total-tokens", "512")


def prepare() -> None:
    """Import what ranks need, in the process that they are forks of."""
    torch.set_num_threads(1)
    EsftConfig(max_adapters=2, max_experts_per_adapter=3).export()
    from sglang.srt.models.registry import ModelRegistry  # imports every model
    from sglang.srt.plugins import load_plugins

    load_plugins()
    ModelRegistry.get_supported_archs()


def main() -> None:
    prepare()
    folder = Path(sys.argv[1])
    wanted = sys.argv[2:] or list(SCENARIOS)
    found = {layout: run(layout, folder) for layout in wanted}
    sys.stdout.write("\n" + json.dumps(found))  # SGLang prints too


if __name__ == "__main__":
    main()
