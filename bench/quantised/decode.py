"""Decoding one token with int8 experts beside bf16 experts: a MoE layer by itself, and served.

    64 random experts of V2-Lite's size, as they are and rounded -> the CPU platform's layer, called
        -> pairs in turns, order alternating -> bf16 over int8, by wall clock and processor time
    two checkpoints of V2-Lite's shape and the same weights, cut to --layers, in --folder
        -> a server of each, both at once, asked in turns at batch 1 -> bf16 over int8
    -> bench/results/quantised_decode.json

Speed is bf16's time over int8's, so 2 is twice as fast; GOAL is for the layer at one token. Each
call routes anew, so experts come from memory as a decode step's do. A served token is besides
attention, shared experts and the head, which int8 leaves in bf16: `experts_share` is how much of a
bf16 token the layers' own time is.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.common.load import ServerCommand, end_on_sigterm, servers
from bench.common.pairing import Taken, interleave, ratios, timed
from bench.common.record import RESULTS, spread, write_result
from bench.elasticmoe.load import Ask
from bench.elasticmoe.rounds import check_streams
from bench.elasticmoe.traffic import tpot
from bench.finemoe import large_model
from bench.finemoe.large import KV_TOKENS
from bench.finemoe.large_model import LargeShape
from bench.quantised import large_checkpoint
from bench.quantised.large import QUICK_SHAPE, asked, prompt
from sgl_esft.formats.expert_scheme import ExpertScheme
from sgl_esft.platform.moe import Experts, PlainExperts, weighted_sum
from sgl_esft.platform.quantised_moe import Int8Experts
from sgl_esft.quant.rounding import quantise

GOAL = 1.8
BF16, INT8 = "bf16", "int8"
SCHEME = ExpertScheme("int8", 1, 0)
CLOSE = 2**-5  # how far an int8 layer's output may be, over its norm


@dataclass(frozen=True)
class DecodePlan:
    """How much is measured. `num_new`: tokens of each answer."""

    shape: LargeShape
    layer_rounds: int = 60
    served_rounds: int = 12
    num_new: int = 24
    batch_sizes: tuple[int, ...] = (1, 4)


# ---- a layer by itself ----


def make_experts(shape: LargeShape) -> dict[str, Experts]:
    """The same random weights, as they are and rounded."""
    generator = torch.Generator().manual_seed(shape.seed)
    sizes = ((2 * shape.expert_width, shape.hidden_size), (shape.hidden_size, shape.expert_width))
    plain = [torch.empty((shape.num_experts, *s), dtype=torch.bfloat16) for s in sizes]
    numbers = [torch.empty((shape.num_experts, *s), dtype=torch.int8) for s in sizes]
    scales = [torch.empty((shape.num_experts, s[0], 1)) for s in sizes]
    for weights, ints, floats in zip(plain, numbers, scales, strict=True):
        for row in range(shape.num_experts):
            drawn = torch.randn(weights[row].shape, generator=generator)
            weights[row] = drawn.mul_(weights.shape[-1] ** -0.5)
            parts = quantise(weights[row], SCHEME)
            ints[row], floats[row] = parts["weight"], parts["weight_scale"]
    return {BF16: PlainExperts(*plain), INT8: Int8Experts(*numbers, *scales)}


@dataclass(frozen=True)
class LayerInput:
    """One call's."""

    hidden: torch.Tensor  # [num_tokens, H] bfloat16
    topk_weights: torch.Tensor  # [num_tokens, k] float32, whose sum is 1
    topk_ids: torch.Tensor  # [num_tokens, k] int32

    def forward(self, experts: Experts) -> torch.Tensor:
        return weighted_sum(self.hidden, experts, self.topk_weights, self.topk_ids)


def inputs(shape: LargeShape, num_tokens: int) -> Iterator[LayerInput]:
    """Without an end, each routed anew."""
    generator = torch.Generator().manual_seed(num_tokens)
    while True:
        scores = torch.rand(num_tokens, shape.num_experts, generator=generator)
        weights, ids = scores.topk(shape.top_k)
        hidden = torch.randn(num_tokens, shape.hidden_size, generator=generator).bfloat16()
        yield LayerInput(hidden, weights / weights.sum(1, keepdim=True), ids.to(torch.int32))


def layer_rows(plan: DecodePlan) -> list[dict[str, Any]]:
    """A row for each number of tokens. Raises ValueError where int8 computes something else."""
    experts = make_experts(plan.shape)
    rows = []
    for num_tokens in plan.batch_sizes:
        check_close(experts, next(inputs(plan.shape, num_tokens)))
        runs: dict[str, Callable[[], Taken]] = {}
        for name, each in experts.items():
            runs[name] = _runner(each, inputs(plan.shape, num_tokens))
        taken = interleave(runs, plan.layer_rounds)
        rows.append(
            {
                "num_tokens": num_tokens,
                "speed": ratios(taken[BF16], taken[INT8]),
                "seconds": {n: spread([run.wall for run in runs]) for n, runs in taken.items()},
            }
        )
    return rows


def _runner(experts: Experts, calls: Iterator[LayerInput]) -> Callable[[], Taken]:
    def run() -> Taken:
        call = next(calls)
        return timed(lambda: call.forward(experts))

    return run


def check_close(experts: Mapping[str, Experts], call: LayerInput) -> None:
    """Rounding moves a layer's output a little; another expert's scale would move it far."""
    exact, rounded = (call.forward(experts[name]).float() for name in (BF16, INT8))
    error = float((rounded - exact).norm() / exact.norm())
    if error > CLOSE:
        raise ValueError(f"an int8 layer's output is {error:.3f} of its norm away from bf16's")


# ---- served ----


def commands(plan: DecodePlan, folder: Path) -> dict[str, ServerCommand]:
    """Both with their checkpoints; what is in `folder` already stays. Raises SystemExit."""
    bases = {name: folder / f"{name}-{plan.shape.num_layers}" for name in (BF16, INT8)}
    large_model.write_base(plan.shape, bases[BF16])
    large_checkpoint.write_base(plan.shape, INT8, bases[INT8])
    common = ["--dtype", "bfloat16", "--max-total-tokens", str(KV_TOKENS), "--log-level", "warning"]
    return {
        name: ServerCommand(["--model-path", str(base), *common]) for name, base in bases.items()
    }


def served_row(plan: DecodePlan, urls: Mapping[str, str]) -> dict[str, Any]:
    """Seconds a token at batch 1, in turns. Raises ValueError where a request failed."""
    for url in urls.values():
        tpot_of(url, 0, plan.num_new)  # the first pass of all
    taken: dict[str, list[float]] = {name: [] for name in urls}
    for number in range(plan.served_rounds):
        for name in list(urls) if number % 2 else reversed(list(urls)):
            taken[name].append(tpot_of(urls[name], number, plan.num_new))
    pairs = zip(taken[BF16], taken[INT8], strict=True)
    return {
        "tpot_s": {name: spread(seconds) for name, seconds in taken.items()},
        "speed": spread([plain / rounded for plain, rounded in pairs]),
    }


def tpot_of(url: str, number: int, num_tokens: int) -> float:
    """Of one request that is alone."""
    streams = asyncio.run(asked(url, [Ask(prompt(number), None, num_tokens)]))
    check_streams(streams)
    return tpot(streams[0])


def experts_share(plan: DecodePlan, layer: Mapping[str, Any], served: Mapping[str, Any]) -> float:
    """Of a bf16 token's time, by medians; `layer`: the row of one token."""
    seconds = layer["seconds"][BF16]["median"] * (plan.shape.num_layers - 1)
    return float(seconds / served["tpot_s"][BF16]["median"])


# ---- the command ----


def measure(plan: DecodePlan, folder: Path, out: Path) -> None:
    """The layer first, while no server runs; the result is written after both."""
    layers = layer_rows(plan)
    for row in layers:
        print(f"{row['num_tokens']} tokens, a layer: {row['speed']['wall']['median']:.2f}")
    with servers(commands(plan, folder)) as urls:
        served = served_row(plan, urls)
    print(f"served: {served['speed']['median']:.2f}", flush=True)
    write(plan, layers, served, out)


def write(
    plan: DecodePlan, layers: Sequence[Mapping[str, Any]], served: Mapping[str, Any], out: Path
) -> None:
    """The result."""
    figures = {
        "what": "bf16 experts' time over int8 experts'; `layers`: the CPU platform's MoE layer by "
        "itself; `served`: a token at batch 1 of models of so many layers",
        "goal": GOAL,
        "shape": vars(plan.shape),
        "threads": torch.get_num_threads(),
        "layers": list(layers),
        "served": {**served, "experts_share": experts_share(plan, layers[0], served)},
    }
    write_result("quantised_decode", figures, folder=out)


def plan_of(options: argparse.Namespace) -> DecodePlan:
    """What the command line asks for."""
    if options.quick:
        return DecodePlan(QUICK_SHAPE, layer_rounds=3, served_rounds=2, num_new=6)
    return DecodePlan(replace(LargeShape(), num_layers=options.layers))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the checkpoints where they are missing, measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints; it is kept")
    parser.add_argument("--layers", type=int, default=7, help="of both models, one of them dense")
    parser.add_argument("--threads", type=int, default=1, help="of the layer by itself")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, few rounds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    end_on_sigterm()
    torch.set_num_threads(options.threads)
    measure(plan_of(options), options.folder.resolve(), options.out)


if __name__ == "__main__":
    main()
