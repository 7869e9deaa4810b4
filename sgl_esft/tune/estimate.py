"""`sgl-esft tune --plan`: memory and work of a training, before anything is loaded.

    config.json, expert_cfg.json, Settings --[plan_tuning]--> TunePlan --[lines]--> text

Weights, gradients and the optimiser's state are counted; activations are estimated from the tensors
that PyTorch keeps for the backward pass. Time is work by the device's speed, which is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sgl_esft.errors import UnsupportedModelError
from sgl_esft.formats.adapter_config import check_ids
from sgl_esft.formats.model_spec import DTYPE_BYTES
from sgl_esft.formats.strict_json import read_object
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
class TunePlan:
    """Bytes unless the name says otherwise; activations are of one batch of full rows."""

    weights: int
    trained: int
    activations: int
    num_trained: int  # parameters
    flops_per_token: int

    @property
    def total(self) -> int:
        """What the device needs."""
        return self.weights + self.trained + self.activations


def plan_tuning(base: Path, experts: Mapping[int, tuple[int, ...]], settings: Settings) -> TunePlan:
    """Of a checkpoint folder or its config.json. Raises UnsupportedModelError, and as check_ids."""
    sizes = read_model_sizes(base)
    check_ids(experts, sizes.spec)
    config = read_object(base / "config.json" if base.is_dir() else base, UnsupportedModelError)
    expert_size = sizes.spec.expert_bytes // DTYPE_BYTES[sizes.spec.dtype]
    num_trained = expert_size * sum(map(len, experts.values()))
    num_tokens = settings.batch_size * settings.max_length
    per_token = _activations(sizes, config, experts, recompute=settings.recompute)
    return TunePlan(
        weights=sizes.total_bytes,
        trained=num_trained * (BYTES_PER_TRAINED + _cast_bytes(sizes)),
        activations=num_tokens * (per_token + _count(config, "vocab_size") * _LOGIT_BYTES),
        num_trained=num_trained,
        flops_per_token=_flops(sizes, config, recompute=settings.recompute),
    )


def _cast_bytes(sizes: ModelSizes) -> int:
    """Of a trained parameter, as the base computes with it: a copy, if that is not in float32."""
    return 0 if sizes.spec.dtype == "float32" else DTYPE_BYTES[sizes.spec.dtype]


def _activations(
    sizes: ModelSizes,
    config: Mapping[str, object],
    experts: Mapping[int, tuple[int, ...]],
    *,
    recompute: bool,
) -> int:
    """Bytes of one token. Before the first chosen expert nothing has a gradient."""
    spec, first = sizes.spec, min(experts)
    visited = _top_k(config) * (
        _EXPERT_HIDDEN_KEPT * spec.hidden_size + _EXPERT_INNER_KEPT * spec.expert_intermediate_size
    )
    layer = _HIDDEN_KEPT * spec.hidden_size + visited
    num_layers = spec.num_layers - first - 1
    if recompute:
        elements = layer + num_layers * spec.hidden_size
    else:
        elements = num_layers * layer + visited * len(experts[first]) // spec.num_experts
    return elements * DTYPE_BYTES[spec.dtype]


def _flops(sizes: ModelSizes, config: Mapping[str, object], *, recompute: bool) -> int:
    """Of one token: two a weight it meets, forward, and backward for the activations' gradients.

    Gradients of the chosen experts' weights are counted as if all experts were chosen. Attention's
    scores, which grow with the length of a row, are not counted.
    """
    spec, element = sizes.spec, DTYPE_BYTES[sizes.spec.dtype]
    routed = sizes.routed_bytes * _top_k(config) // spec.num_experts
    looked_up = _count(config, "vocab_size") * spec.hidden_size * element  # no product
    met = sizes.trunk_bytes - looked_up + routed
    return (2 * (2 + recompute) * met + 2 * routed) // element


def _top_k(config: Mapping[str, object]) -> int:
    return _count(config, "num_experts_per_tok")


def _count(config: Mapping[str, object], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(f"config.json has {key} = {value!r}, not a positive integer.")
    return value


def lines(plan: TunePlan, settings: Settings, tflops: float) -> Iterator[str]:
    """The plan in words."""
    hours = plan.flops_per_token * _MILLION / (tflops * 1e12) / 3600
    rows = f"{settings.batch_size} rows of {settings.max_length} tokens"
    yield f"trained      {plan.num_trained / 1e6:,.1f} M parameters"
    yield f"weights      {_gib(plan.weights)}"
    yield f"training     {_gib(plan.trained)}  float32 experts, gradients, Adam's moments"
    how = "recomputed" if settings.recompute else "kept; --recompute keeps less"
    yield f"activations  {_gib(plan.activations)}  estimated, {rows}, {how}"
    yield f"in all       {_gib(plan.total)}"
    yield f"work         {plan.flops_per_token * _MILLION / 1e15:,.1f} PFLOP for a million tokens:"
    yield f"             {hours:.2f} h where the device reaches {tflops:g} TFLOP/s (--tflops)"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):8.2f} GiB"
