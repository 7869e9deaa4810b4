"""FineMoE's figures of caches and prefetching, on traces of real router choices. Nothing is timed.

    traces -> [Subject] -> Replays -> [figure12] ... [timeline] -> finemoe_figure12.json, ...

`hit_rate` is of the distinct experts of a step and layer: those that were in rows when the step
asked for them, prefetched ones too. Loads are of experts, a token. A *stall* is what layers wait,
in computing times of a layer: of a link that carries one expert in r of them, and a processor that
takes 1 for a layer whatever it computes. So no number here depends on a machine.

What the traces lack: prediction.py. Without hidden states the next layer's gate cannot be asked
(Mixtral-Offloading), without embeddings the first `distance` layers of a token are not predicted.
All maps are of known tokens, and none are added: FineMoE's offline setting. The regression begins
with known tokens, and learns on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.common.record import write_result
from bench.finemoe import prediction
from bench.finemoe.prediction import Rows, read_subjects
from bench.finemoe.replays import WAYS, Replays, Run, Setting
from bench.finemoe.traces import NUM_EXPERTS, options_of
from sgl_esft.offload.ahead import MAX_TOKENS

EXPERT_BYTES = 3 * 2048 * 1408 * 2  # DeepSeek-V2-Lite's, whose traces these are
BASIS = Setting(num_rows=32)
EVICTIONS = ("static", "lru", "lfu", "finemoe")
PAPER = {
    "figure12": "time per token at caches of 6 to 96 GB; at 6 GB FineMoE's is 36, 25, 16 and 29% "
    "below DeepSpeed-Inference, Mixtral-Offloading, ProMoE and MoE-Infinity",
    "figure14b": "order only: LRU below LFU below FineMoE's",
    "figure15": "times by prefetch distance; least at 3 (Mixtral), 6 (Qwen1.5), 4 (Phi-3.5)",
    "figure16b": "batch sizes 1 to 8; FineMoE's times are the lowest in most cases",
    "figure17": "parts of one iteration; what is not overlapped is below 50 ms, said to be 1%",
    "timeline": "none: its layers take so long that nearly every load can be hidden",
}


@dataclass(frozen=True)
class CachePlan:
    """How much is replayed."""

    most_sequences: int | None = None
    setting: Setting = BASIS  # where it is not what varies
    rows: tuple[int, ...] = (8, 16, 24, 32, 40, 48, 56)
    distances: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    load_times: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0, 8.0)
    load_time: float = 0.3
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    stall_batches: tuple[int, ...] = (1, 4)


QUICK = CachePlan(
    most_sequences=10,
    setting=Setting(num_rows=32, num_maps=100, num_warm=10, num_steps=20),
    rows=(16, 32),
    distances=(1, 3),
    load_times=(0.3, 3.0),
    batches=(1, 4),
    stall_batches=(1,),
)


def figure12(of: Replays, plan: CachePlan) -> Rows:
    """Hits and loads by rows of a layer, with prefetching at one speed of the link."""
    found: Rows = []
    for num_rows in plan.rows:
        setting = replace(plan.setting, num_rows=num_rows, load_time=plan.load_time)
        rows = [_row(name, of.run(way, setting), setting) for name, way in WAYS.items()]
        found += [*rows, _bound(of, setting)]
    return found


def figure14b(of: Replays, plan: CachePlan) -> Rows:
    """Hits by who leaves first, without prefetching; FineMoE's own knows its predictions."""
    found: Rows = []
    for num_rows in plan.rows:
        setting = replace(plan.setting, num_rows=num_rows)
        rows = [_row(name, of.run(WAYS[name], setting), setting) for name in EVICTIONS]
        found += [*rows, _bound(of, setting)]
    return found


def figure15(of: Replays, plan: CachePlan) -> Rows:
    """Stall by prefetch distance and speed of the link."""
    found: Rows = []
    for load_time in plan.load_times:
        for distance in plan.distances:
            setting = replace(plan.setting, load_time=load_time, distance=distance)
            for name in ("finemoe", "maps, lfu"):
                found.append(_timed(name, of, setting, {"distance": distance}))
    return found


def figure16b(of: Replays, plan: CachePlan) -> Rows:
    """Hits and loads by requests side by side; above MAX_TOKENS nothing is predicted."""
    found: Rows = []
    for batch in plan.batches:
        setting = replace(
            plan.setting,
            batch=batch,
            load_time=plan.load_time,
            num_steps=max(1, plan.setting.num_steps // batch),
            num_warm=max(1, plan.setting.num_warm // batch),
        )
        names = (
            "lru",
            "lfu",
            *(("finemoe", "maps, lfu", "regression") if batch <= MAX_TOKENS else ()),
        )
        found += [_row(name, of.run(WAYS[name], setting), setting) for name in names]
        found.append(_bound(of, setting))
    return found


def figure17(of: Replays, plan: CachePlan) -> Rows:
    """Experts and bytes of one iteration: asked for, found, loaded on demand and ahead."""
    setting = replace(plan.setting, load_time=plan.load_time)
    found: Rows = []
    for name in ("lfu", "finemoe", "maps, lfu", "regression", "stream"):
        run = of.run(WAYS[name], setting)
        loads = run.counts.num_loads + run.counts.num_prefetches
        found.append(
            {
                "way": name,
                **{
                    key.removeprefix("num_"): value / run.num_steps
                    for key, value in vars(run.counts).items()
                },
                "bytes_loaded": loads / run.num_steps * EXPERT_BYTES,
                "bytes_computed": run.counts.num_asked / run.num_steps * EXPERT_BYTES,
                "demand_by_layer": [each.num_loads / run.num_steps for each in run.by_layer],
            }
        )
    return found


def timeline(of: Replays, plan: CachePlan) -> Rows:
    """Stall of nothing fetched ahead, of maps, regression and an oracle, by speed of the link."""
    found: Rows = []
    for batch in plan.stall_batches:
        for load_time in plan.load_times:
            setting = replace(plan.setting, batch=batch, load_time=load_time)
            least = replace(setting, num_steps=max(1, setting.num_steps // batch))
            for name in ("lfu", "finemoe", "maps, lfu", "regression", "oracle"):
                found.append(_timed(name, of, least, {"batch": batch}))
    return found


FIGURES: Mapping[str, Callable[[Replays, CachePlan], Rows]] = {
    "figure12": figure12,
    "figure14b": figure14b,
    "figure15": figure15,
    "figure16b": figure16b,
    "figure17": figure17,
    "timeline": timeline,
}


def _row(name: str, run: Run, setting: Setting) -> dict[str, Any]:
    """One way at one setting."""
    return {
        "way": name,
        "num_rows": setting.num_rows,
        "batch": setting.batch,
        "tokens": run.num_tokens,
        "asked_per_step_and_layer": run.counts.num_asked / run.num_steps / len(run.by_layer),
        **run.row(),
    }


def _bound(of: Replays, setting: Setting) -> dict[str, Any]:
    """Belady's row. What is not found is loaded."""
    rate = of.most_hits(setting)
    return {
        "way": "belady, nothing ahead",
        "num_rows": setting.num_rows,
        "batch": setting.batch,
        "hit_rate": rate,
    }


def _timed(name: str, of: Replays, setting: Setting, said: Mapping[str, object]) -> dict[str, Any]:
    run = of.run(WAYS[name], setting)
    return {
        "way": name,
        "load_time": setting.load_time,
        **said,
        "stall_per_layer": run.stall / (run.num_steps * len(run.by_layer)),
        **run.row(),
    }


def described(
    name: str, replays: Mapping[str, Replays], plan: CachePlan, seed: int
) -> dict[str, Any]:
    """One figure, as it is written to its file."""
    figure = FIGURES[name]
    rows = [{"task": task, **row} for task, each in replays.items() for row in figure(each, plan)]
    return {
        "what": (figure.__doc__ or "").partition("\n")[0],
        "paper": PAPER[name],
        "seed": seed,
        "experts": NUM_EXPERTS,
        "setting": vars(plan.setting) | {"load_time": plan.load_time},
        "instead_of": {name: way.instead_of for name, way in WAYS.items() if way.instead_of},
        "rows": rows,
    }


def shown(value: Any) -> str:
    """Rounded, to be read."""
    if isinstance(value, list):
        return f"[{' '.join(map(shown, value))}]"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> None:
    """Replay and write bench/results/finemoe_figure12.json and the others."""
    options = options_of(__doc__.partition("\n")[0], list(FIGURES), arguments)
    plan = QUICK if options.quick else CachePlan()
    read = prediction.Plan(most_sequences=plan.most_sequences)
    subjects = read_subjects(options.trace, read, options.seed)
    replays = {subject.task: Replays(subject) for subject in subjects}
    for name in options.figures:
        found = described(name, replays, plan, options.seed)
        for row in found["rows"]:
            print(name, *(f"{key}={shown(value)}" for key, value in row.items()), flush=True)
        path = write_result(f"finemoe_{name}", found, folder=options.out, packages=("numpy",))
        print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
