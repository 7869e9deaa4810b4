"""What rerouting costs on a CPU: over the unfused chain, a MoE layer, and SGLang's own gather.

    the same ids, tags and map -> in turns, order alternating -> ratios, for each number of tokens:
        fused            native code, as the operator is called in a layer, with all its checks
        fused_out        the same into a tensor that is there
        unfused          the paper's chain of torch operations (kernels/reroute_ref.py)
        unfused_bare     that chain without the checks of its inputs
        gather           SGLang's `local_expert_mapping[topk_ids]`: rerouting replaces it under EP
        layer            the CPU platform's forward of DeepSeek-V2-Lite's 64 experts, 1.1 GB
    the kernel alone -> callgrind -> instructions of a call

Under EP, expert parallelism, half of the map's experts are another rank's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.common.callgrind import VALGRIND, per_call
from bench.common.layers import ExpertShape, Subject, make_layer, random_experts
from bench.common.pairing import Taken, interleave, ratios, timed
from bench.common.record import RESULTS, write_result
from bench.kernels.moe_layer import cpu_forward, make_batch
from sgl_esft.weave.moe_layer import WovenLayer
from sgl_esft.weave.slot_layout import SlotLayout
from sgl_esft_kernels import choose, reroute_unfused

TOKEN_COUNTS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
LAYER_TOKEN_COUNTS = (1, 8, 64, 256)
COUNTED_TOKEN_COUNTS = (1, 64, 4096)
TOP_K, NUM_EXPERTS, NUM_ADAPTERS = 6, 64, 20
GOALS = {
    "fused_over_unfused": 0.2,
    "fused_over_unfused_aim": 0.05,
    "fused_over_layer": 0.005,
    "fused_over_gather": 1.0,
}
CSRC = Path(__file__).resolve().parents[2] / "csrc"
Work = Callable[[], object]


@dataclass(frozen=True)
class Inputs:
    """A batch of all adapters in equal shares, and a map."""

    topk_ids: torch.Tensor  # [num_tokens, k] int32
    tags: torch.Tensor  # [num_tokens] int32, -1 = base
    expert_map: torch.Tensor  # [N + 1, M] int32
    mapping: torch.Tensor  # [M] int32, SGLang's own table

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.topk_ids, self.tags, self.expert_map


def make_inputs(num_tokens: int, *, is_expert_parallel: bool) -> Inputs:
    """Deterministic. With expert parallelism the upper half of the experts is another rank's."""
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
    tags = torch.randint(-1, NUM_ADAPTERS, (num_tokens,), generator=generator, dtype=torch.int32)
    cells = torch.arange((NUM_ADAPTERS + 1) * NUM_EXPERTS, dtype=torch.int32)
    expert_map = cells.view(NUM_ADAPTERS + 1, NUM_EXPERTS)
    mapping = torch.arange(NUM_EXPERTS, dtype=torch.int32)
    if is_expert_parallel:
        expert_map[:, NUM_EXPERTS // 2 :] = -1
        mapping[NUM_EXPERTS // 2 :] = -1
    return Inputs(scores.topk(TOP_K).indices.to(torch.int32), tags, expert_map, mapping)


def unfused_bare(
    topk_ids: torch.Tensor, tags: torch.Tensor, expert_map: torch.Tensor
) -> torch.Tensor:
    """The operations of `reroute_unfused` and nothing else."""
    num_rows, num_experts = expert_map.shape
    rows = tags.to(torch.int64).remainder(num_rows).unsqueeze(1)
    slot_ids = expert_map.view(-1)[rows * num_experts + topk_ids.clamp(min=0)]
    return slot_ids.to(topk_ids.dtype).masked_fill_(topk_ids < 0, -1)


def chains(inputs: Inputs) -> dict[str, Work]:
    """The ways to reroute. Raises RuntimeError when they do not agree."""
    fused = choose("cpu", "cpu")
    out = torch.empty_like(inputs.topk_ids)
    works: dict[str, Work] = {
        "fused": partial(fused, *inputs.arguments),
        "fused_out": partial(fused, *inputs.arguments, out=out),
        "unfused": partial(reroute_unfused, *inputs.arguments),
        "unfused_bare": partial(unfused_bare, *inputs.arguments),
    }
    expected = works["unfused"]()
    unequal = [name for name, work in works.items() if not torch.equal(work(), expected)]
    if unequal:
        raise RuntimeError(f"other slots than the reference's: {', '.join(unequal)}")
    return works


def num_calls(work: Work, seconds: float) -> int:
    """How many calls fill about that time, so that a clock's tick does not matter."""
    shortest = min(timed(work).wall for _ in range(5))
    return max(1, int(seconds / max(shortest, 1e-7)))


def repeated(work: Work, count: int) -> Callable[[], Taken]:
    """One turn: `count` calls, the time of one."""

    def loop() -> None:
        for _ in range(count):
            work()

    def turn() -> Taken:
        taken = timed(loop)
        return Taken(taken.wall / count, taken.cpu / count)

    return turn


def over(
    works: Mapping[str, Work], pairs: Mapping[str, tuple[str, str]], rounds: int, seconds: float
) -> dict[str, Any]:
    """Spreads of the asked ratios, each turn as long as `seconds` or one call."""
    turns = {name: repeated(work, num_calls(work, seconds)) for name, work in works.items()}
    taken = interleave(turns, rounds)
    return {name: ratios(taken[one], taken[base]) for name, (one, base) in pairs.items()}


def measure_chains(
    token_counts: Sequence[int], rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """A row for each number of tokens: fused over unfused, and over SGLang's gather under EP."""
    pairs = {
        "fused_over_unfused": ("fused", "unfused"),
        "fused_out_over_unfused": ("fused_out", "unfused"),
        "fused_over_unfused_bare": ("fused", "unfused_bare"),
    }
    rows = []
    for num_tokens in token_counts:
        works = chains(make_inputs(num_tokens, is_expert_parallel=False))
        row = over(works, pairs, rounds, seconds)
        local = make_inputs(num_tokens, is_expert_parallel=True)
        fused = chains(local)["fused"]
        under_ep = {"fused": fused, "gather": lambda it=local: it.mapping[it.topk_ids]}
        row |= over(under_ep, {"fused_over_gather": ("fused", "gather")}, rounds, seconds)
        rows.append({"num_tokens": num_tokens, **row})
    return rows


def make_base_layer(shape: ExpertShape) -> WovenLayer:
    """64 experts of one content: what they hold does not change how long they take."""
    layout = SlotLayout(NUM_EXPERTS, NUM_EXPERTS, 0, 0)
    layer = make_layer(Subject(), layout, shape, None)
    weights = random_experts(1, shape, seed=1)[0]
    layer.w13.copy_(weights.w13)
    layer.w2.copy_(weights.w2)
    return layer


def measure_layer(
    shape: ExpertShape, token_counts: Sequence[int], rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """A row for each number of tokens: one rerouting over one forward of the layer."""
    layer = make_base_layer(shape)
    pairs = {f"{name}_over_layer": (name, "layer") for name in ("fused", "unfused")}
    rows = []
    for num_tokens in token_counts:
        batch = make_batch(num_tokens, range(NUM_EXPERTS), shape.hidden, "cpu")
        works = chains(make_inputs(num_tokens, is_expert_parallel=False))
        works = {name: works[name] for name in ("fused", "unfused")}
        works["layer"] = partial(cpu_forward, layer, batch)
        rows.append({"num_tokens": num_tokens, **over(works, pairs, rounds, seconds)})
    return rows


def count_instructions(token_counts: Sequence[int]) -> dict[str, Any]:
    """Of a call of the kernel without torch, by callgrind; a reason where it is not installed."""
    if VALGRIND is None:
        return {"skipped": "valgrind is not installed"}
    with tempfile.TemporaryDirectory() as folder:
        executable = _build_counter(Path(folder))
        calls = {
            (num_tokens, bits): per_call(executable, num_tokens, TOP_K, bits)
            for num_tokens in token_counts
            for bits in (32, 64)
        }
    rows = [
        {
            "num_tokens": num_tokens,
            "id_bits": bits,
            "instructions": count,
            "instructions_per_id": count / (num_tokens * TOP_K),
        }
        for (num_tokens, bits), count in calls.items()
    ]
    return {"rows": rows}


def _build_counter(folder: Path) -> Path:
    """As csrc/CMakeLists.txt builds the kernel. Raises CalledProcessError."""
    executable = folder / "count_reroute"
    sources = [CSRC / "reroute" / "reroute.cpp", CSRC / "tests" / "count_reroute.cpp"]
    command = [os.environ.get("CXX", "c++"), "-O3", "-std=c++17", f"-I{CSRC}"]
    subprocess.run([*command, *map(str, sources), "-o", str(executable)], check=True)
    return executable


def measure(
    shape: ExpertShape,
    token_counts: Sequence[int],
    layer_token_counts: Sequence[int],
    rounds: int,
    seconds: float,
) -> dict[str, Any]:
    """Everything, as it is written to the result file."""
    return {
        "what": "time of rerouting on a CPU, as ratios; instructions of the kernel, counted",
        "goals": GOALS,
        "top_k": TOP_K,
        "num_experts": NUM_EXPERTS,
        "num_adapters": NUM_ADAPTERS,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "rows": measure_chains(token_counts, rounds, seconds),
        "layer_rows": measure_layer(shape, layer_token_counts, max(3, rounds // 3), seconds),
        "callgrind": count_instructions(COUNTED_TOKEN_COUNTS),
    }


def print_table(figures: Mapping[str, Any]) -> None:
    """Median and quartiles of each ratio by the wall clock, its goal beside it."""
    for row in [*figures["rows"], *figures["layer_rows"]]:
        for name, clocks in row.items():
            if name != "num_tokens":
                wall, cpu = clocks["wall"], clocks["cpu"]["median"]
                spread = f"{wall['median']:.3g} ({wall['q1']:.3g} to {wall['q3']:.3g})"
                goal = f", goal {GOALS[name]}" if name in GOALS else ""
                print(f"{row['num_tokens']:5} {name:24} {spread}, cpu {cpu:.3g}{goal}")
    for row in figures["callgrind"].get("rows", []):
        per_id = row["instructions_per_id"]
        print(f"{row['num_tokens']:5} int{row['id_bits']}: {per_id:.1f} instructions an id")


def main(arguments: Sequence[str] | None = None, folder: Path = RESULTS) -> None:
    """Measure and write bench/results/reroute.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=TOKEN_COUNTS)
    parser.add_argument("--layer-batch-sizes", type=int, nargs="+", default=LAYER_TOKEN_COUNTS)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--turn-seconds", type=float, default=0.004, help="length of one turn")
    parser.add_argument("--expert", type=int, nargs=2, default=(2048, 1408), help="hidden, width")
    parser.add_argument("--threads", type=int, default=1, help="more wait for the slowest core")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    figures = measure(
        ExpertShape(*options.expert),
        options.batch_sizes,
        options.layer_batch_sizes,
        options.rounds,
        options.turn_seconds,
    )
    print_table(figures)
    print(f"wrote {write_result('reroute', figures, folder=folder).name}")


if __name__ == "__main__":
    main()
