"""`sgl-esft tune --plan`: memory and work of a training, before anything is loaded.

    config.json, expert_cfg.json, Settings --[plan_tuning]--> TunePlan --[lines]--> text
    lengths of the data's rows ------------------^

Weights, gradients and the optimiser's state are counted; activations are estimated from the tensors
that PyTorch keeps for the backward pass. Time is work by the device's speed, which is asked for.
With the data, rows are as long as they are, and the work is the run's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sgl_esft.formats.adapter_config import check_ids
from sgl_esft.formats.model_spec import DTYPE_BYTES, refuse_quantised
from sgl_esft.memory.model_sizes import ModelSizes, read_model_sizes
from sgl_esft.tune.run_folder import Settings

# Of a trained parameter: itself in float32, its gradient, Adam's two moments.
BYTES_PER_TRAINED: Final = 4 + 4 + 8
# Of a token in a layer: norms (in float32), attention and residuals, in hidden sizes; and of each
# expert that it visits, in hidden and in intermediate sizes. Measured by tests/fast/tune.
_HIDDEN_KEPT: Final = 12
_EXPERT_HIDDEN_KEPT: Final = 2
_EXPERT_INNER_KEPT: Final = 6
# Of a token and a word: logits, their log-softmax in float32, and two gradients in float32.
_LOGIT_BYTES: Final = 2 + 4 + 4 + 4
_MILLION: Final = 1_000_000


@dataclass(frozen=True)
class DataSize:
    """The data's rows as they are trained on, counted in tokens."""

    num_rows: int
    longest: int  # of one row
    padded: int  # of an epoch: batches are drawn at random, their rows padded to the longest

    @classmethod
    def of(cls, lengths: Sequence[int], batch_size: int) -> DataSize:
        """Of rows of these lengths, at least one."""
        return cls(len(lengths), max(lengths), round(len(lengths) * _longest(lengths, batch_size)))


def _longest(lengths: Sequence[int], count: int) -> float:
    """Of `count` rows that are drawn at random, what the longest is expected to have."""
    total, count = len(lengths), min(count, len(lengths))
    shares = [(i / total) ** count for i in range(total + 1)]  # all of them among the i shortest
    return sum(length * (shares[i + 1] - shares[i]) for i, length in enumerate(sorted(lengths)))


@dataclass(frozen=True)
class TunePlan:
    """Bytes unless the name says otherwise; activations are of one batch of the longest rows."""

    weights: int
    trained: int
    activations: int
    num_trained: int  # parameters
    flops_per_token: int
    data: DataSize | None = None  # None: rows of --max-length, and work for a million tokens

    @property
    def total(self) -> int:
        """What the device needs."""
        return self.weights + self.trained + self.activations


def plan_tuning(
    base: Path,
    experts: Mapping[int, tuple[int, ...]],
    settings: Settings,
    data: DataSize | None = None,
) -> TunePlan:
    """Of a checkpoint folder or its config.json. Raises UnsupportedModelError, and as check_ids."""
    sizes = read_model_sizes(base)
    refuse_quantised(sizes.spec, "tune")
    check_ids(experts, sizes.spec)
    expert_size = sizes.spec.expert_bytes // DTYPE_BYTES[sizes.spec.dtype]
    num_trained = expert_size * sum(map(len, experts.values()))
    num_rows, length = _batch(settings, data)
    per_token = _activations(sizes, experts, recompute=settings.recompute)
    return TunePlan(
        weights=sizes.total_bytes,
        trained=num_trained * (BYTES_PER_TRAINED + _cast_bytes(sizes)),
        activations=num_rows * length * (per_token + sizes.vocab_size * _LOGIT_BYTES),
        num_trained=num_trained,
        flops_per_token=_flops(sizes, recompute=settings.recompute),
        data=data,
    )


def _batch(settings: Settings, data: DataSize | None) -> tuple[int, int]:
    """The largest: its rows, and their tokens."""
    if data is None:
        return settings.batch_size, settings.max_length
    return min(settings.batch_size, data.num_rows), data.longest


def _cast_bytes(sizes: ModelSizes) -> int:
    """Of a trained parameter, as the base computes with it: a copy, if that is not in float32."""
    return 0 if sizes.spec.dtype == "float32" else DTYPE_BYTES[sizes.spec.dtype]


def _activations(
    sizes: ModelSizes, experts: Mapping[int, tuple[int, ...]], *, recompute: bool
) -> int:
    """Bytes of one token. Before the first chosen expert nothing has a gradient."""
    spec, first = sizes.spec, min(experts)
    visited = sizes.experts_per_token * (
        _EXPERT_HIDDEN_KEPT * spec.hidden_size + _EXPERT_INNER_KEPT * spec.expert_intermediate_size
    )
    layer = _HIDDEN_KEPT * spec.hidden_size + visited
    num_layers = spec.num_layers - first - 1
    if recompute:
        elements = layer + num_layers * spec.hidden_size
    else:
        elements = num_layers * layer + visited * len(experts[first]) // spec.num_experts
    return elements * DTYPE_BYTES[spec.dtype]


def _flops(sizes: ModelSizes, *, recompute: bool) -> int:
    """Of one token: two a weight it meets, forward, and backward for the activations' gradients.

    Gradients of the chosen experts' weights are counted as if all experts were chosen. Attention's
    scores, which grow with the length of a row, are not counted.
    """
    spec, element = sizes.spec, DTYPE_BYTES[sizes.spec.dtype]
    routed = sizes.routed_bytes * sizes.experts_per_token // spec.num_experts
    looked_up = sizes.vocab_size * spec.hidden_size * element  # no product
    met = sizes.trunk_bytes - looked_up + routed
    return (2 * (2 + recompute) * met + 2 * routed) // element


def lines(plan: TunePlan, settings: Settings, tflops: float) -> Iterator[str]:
    """The plan in words."""
    num_rows, length = _batch(settings, plan.data)
    how = "recomputed" if settings.recompute else "kept; --recompute keeps less"
    yield f"trained      {plan.num_trained / 1e6:,.1f} M parameters"
    yield f"weights      {_gib(plan.weights)}"
    yield f"training     {_gib(plan.trained)}  float32 experts, gradients, Adam's moments"
    rows = f"{num_rows} rows of {length} tokens"
    yield f"activations  {_gib(plan.activations)}  estimated, {rows}, {how}"
    yield f"in all       {_gib(plan.total)}"
    yield from _work(plan, settings, tflops)


def _work(plan: TunePlan, settings: Settings, tflops: float) -> Iterator[str]:
    """Of the whole run, if its data is known."""
    num_tokens, of_what = float(_MILLION), "a million tokens"
    if plan.data is not None:
        rows = f"in {plan.data.num_rows:,} rows"
        yield f"data         {plan.data.padded:,} tokens an epoch, padded, {rows}"
        num_tokens, of_what = plan.data.padded * settings.epochs, f"{settings.epochs:g} epochs"
    peta = plan.flops_per_token * num_tokens / 1e15
    hours = peta * 1000 / tflops / 3600
    yield f"work         {peta:,.{_digits(peta, 1)}f} PFLOP for {of_what}:"
    at = f"where the device reaches {tflops:g} TFLOP/s (--tflops)"
    yield f"             {hours:,.{_digits(hours, 2)}f} h {at}"


def _digits(value: float, least: int) -> int:
    """After the point, so that one of them is not zero."""
    return max(least, -math.floor(math.log10(value)))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):8.2f} GiB"
