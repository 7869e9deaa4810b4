"""What copies of hot experts leave of imbalance and crossings, on real router traces.

    traces (expert ids by layer and token) --first half--> heat --> sgl_elastic/plan/redundancy.py
                                           --second half--> decode steps --> imbalance, crossings
    --> redundant_experts.json

The traces of a task are cut at half of its sequences. A step has TOKENS_PER_RANK tokens of each
rank, drawn from the second half without order, as a decode batch mixes requests; a sequence's
tokens all come from one rank. Copies are chosen by the heat of the same task, of the other task,
or not by heat at all but at random. No timing: the numbers are the same on every machine.

A trace file is an .npz with <task>_lengths [sequences] and <task>_ids [layers, tokens, k] for each
task. It is not part of this repository; --traces says where it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.common.record import spread, write_result
from sgl_elastic.plan.redundancy import (
    Heat,
    choose_copies,
    computing_rank,
    expert_load,
    holders_of,
)
from sgl_elastic.types import ExpertCopy, Placement

NUM_EXPERTS = 64
DEVICES = (2, 4)
COPIES = (0, 2, 4, 8)
TOKENS_PER_RANK = 64
NUM_STEPS = 100
RANDOM_SEEDS = (0, 1, 2)

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Trace:
    """Router choices: `ids` [layers, tokens, k], and of each token the sequence it belongs to."""

    ids: Ids
    sequences: Ids

    def heat(self) -> Heat:
        """Layer -> tokens by expert."""
        return {
            layer: np.bincount(ids.ravel(), minlength=NUM_EXPERTS).tolist()
            for layer, ids in enumerate(self.ids)
        }


@dataclass(frozen=True)
class Figures:
    """Means over steps and layers.

    `imbalance`: (token, expert) pairs of the busiest device over the mean; `crossings`: other
    devices that compute something for a token, of a layer.
    """

    imbalance: float
    crossings: float


def halves(path: Path, task: str) -> tuple[Trace, Trace]:
    """A task's trace, cut at half of its sequences."""
    with np.load(path) as file:
        lengths, ids = file[f"{task}_lengths"], file[f"{task}_ids"].astype(np.int64)
    sequences = np.repeat(np.arange(len(lengths)), lengths)
    is_first = sequences < len(lengths) // 2
    return Trace(ids[:, is_first], sequences[is_first]), Trace(
        ids[:, ~is_first], sequences[~is_first]
    )


def placed(num_devices: int) -> Placement:
    """In contiguous runs, as an elastic server's first placement is."""
    homes = tuple(e * num_devices // NUM_EXPERTS for e in range(NUM_EXPERTS))
    return Placement(tuple(range(num_devices)), homes, (0,) * num_devices)


def random_copies(
    placement: Placement, num_copies: int, num_layers: int, seed: int
) -> list[ExpertCopy]:
    """As many copies a layer, of any experts on any other devices."""
    draw = np.random.default_rng(seed)
    copies = set()
    for layer in range(num_layers):
        while sum(copy.layer_id == layer for copy in copies) < num_copies:
            expert = int(draw.integers(NUM_EXPERTS))
            device = int(draw.integers(placement.dp_size))
            if device != placement.homes[expert]:
                copies.add(ExpertCopy(layer, expert, device))
    return sorted(copies)


def figures(trace: Trace, placement: Placement, copies: Sequence[ExpertCopy]) -> Figures:
    """Decode steps of a trace under a placement."""
    num_ranks = placement.dp_size
    chosen, sources = _steps(trace, num_ranks)
    imbalance, crossings = [], []
    for layer, ids in enumerate(trace.ids):
        table = _dispatch(placement, copies, layer)
        ranks = table[sources[..., None], ids[chosen]]  # [steps, tokens, k]
        loads = np.stack([(ranks == rank).sum(axis=(1, 2)) for rank in range(num_ranks)])
        imbalance.append((loads.max(axis=0) / loads.mean(axis=0)).mean())
        visited = np.stack([(ranks == rank).any(axis=2) for rank in range(num_ranks)])
        others = visited.sum(axis=0) - np.take_along_axis(visited, sources[None], axis=0)[0]
        crossings.append(others.mean())
    return Figures(float(np.mean(imbalance)), float(np.mean(crossings)))


def _steps(trace: Trace, num_ranks: int) -> tuple[Ids, Ids]:
    """Tokens of each step, and their ranks: both [steps, tokens]."""
    sources = trace.sequences % num_ranks
    draw = np.random.default_rng(0)
    size = (NUM_STEPS, TOKENS_PER_RANK)
    chosen = [draw.choice(np.flatnonzero(sources == rank), size) for rank in range(num_ranks)]
    tokens = np.concatenate(chosen, axis=1)
    return tokens, sources[tokens]


def _dispatch(placement: Placement, copies: Sequence[ExpertCopy], layer: int) -> Ids:
    """[ranks, experts]: who computes an expert for tokens of a rank."""
    holders = holders_of(placement, copies, layer)
    rows = [
        [computing_rank(source, expert, ranks) for expert, ranks in enumerate(holders)]
        for source in range(placement.dp_size)
    ]
    return np.array(rows)


def rows_of(path: Path, task: str, other: str) -> list[dict[str, Any]]:
    """A row for each number of devices and copies."""
    known, judged = halves(path, task)
    foreign = halves(path, other)[0].heat()
    rows = []
    for num_devices in DEVICES:
        placement = placed(num_devices)
        for num_copies in COPIES:
            copies = choose_copies(known.heat(), placement, num_copies)
            rows.append(
                {
                    "task": task,
                    "devices": num_devices,
                    "copies": num_copies,
                    "planned_imbalance": expert_load(known.heat(), placement, copies).imbalance,
                    "by_heat": vars(figures(judged, placement, copies)),
                    "by_other_heat": vars(
                        figures(judged, placement, choose_copies(foreign, placement, num_copies))
                    ),
                    "at_random": _at_random(judged, placement, num_copies),
                }
            )
    return rows


def _at_random(judged: Trace, placement: Placement, num_copies: int) -> dict[str, Any]:
    found = [
        figures(judged, placement, random_copies(placement, num_copies, len(judged.ids), seed))
        for seed in RANDOM_SEEDS
    ]
    return {
        "imbalance": spread([each.imbalance for each in found]),
        "crossings": spread([each.crossings for each in found]),
    }


def main() -> None:
    """Simulate and write bench/results/redundant_experts.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--traces", type=Path, required=True, metavar="FILE", help="an .npz")
    parser.add_argument("--tasks", nargs=2, default=["intent", "law"], metavar="TASK")
    arguments = parser.parse_args()
    one, other = arguments.tasks
    rows = [*rows_of(arguments.traces, one, other), *rows_of(arguments.traces, other, one)]
    for row in rows:
        own, foreign = row["by_heat"], row["by_other_heat"]
        print(
            f"{row['task']:8} {row['devices']} devices, {row['copies']} copies a layer: imbalance "
            f"{own['imbalance']:.3f} ({foreign['imbalance']:.3f} by other heat, "
            f"{row['at_random']['imbalance']['median']:.3f} at random), crossings "
            f"{own['crossings']:.3f} ({row['at_random']['crossings']['median']:.3f} at random)",
            flush=True,
        )
    path = write_result(
        "redundant_experts",
        {
            "what": "imbalance of devices and crossings of tokens, by copies of experts a layer",
            "tokens_per_rank": TOKENS_PER_RANK,
            "steps": NUM_STEPS,
            "rows": rows,
        },
        packages=("numpy",),
    )
    print(path)


if __name__ == "__main__":
    main()
