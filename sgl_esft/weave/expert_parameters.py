"""Which parameters of SGLang's FusedMoE hold something of every expert, by how it is quantised.

    create_weights -> [parameters_of] -> expert_tensor.py: which get pages, and which padding
    loaded layer   -> [parameters_of] -> moe_layer.py: what is written when a slot is

What is in no row of the table is refused by its name: a scale that adapters do not bring would be
the base's, and the answers wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from sgl_esft.errors import UnsupportedModelError
from sgl_esft.formats.expert_scheme import SchemeName


@dataclass(frozen=True)
class ExpertParameters:
    """A layer's parameters by name, w13's and w2's; the first dimension of each is slots.

    `weights` are large and have memory where an expert is; `scales`, small, have it for every slot,
    and are None where nothing is quantised. `dtypes` are those that the weights may have.
    """

    weights: tuple[str, str]
    scales: tuple[str, str] | None
    dtypes: frozenset[torch.dtype]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.weights, *(self.scales or ()))


_WEIGHTS: Final = ("w13_weight", "w2_weight")
_SCALES: Final = ("w13_weight_scale", "w2_weight_scale")
_FLOATS: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})
_INT8: Final = frozenset({torch.int8})
_FP8: Final = frozenset({torch.float8_e4m3fn})
_NIBBLES: Final = frozenset({torch.uint8})

# Of UnquantizedFusedMoEMethod, W8A8Int8MoEMethod, Fp8MoEMethod with and without blocks, and
# MoeWNA16Method. None: unquantised.
PARAMETERS: Final[Mapping[SchemeName | None, ExpertParameters]] = {
    None: ExpertParameters(_WEIGHTS, None, _FLOATS),
    "int8": ExpertParameters(_WEIGHTS, _SCALES, _INT8),
    "fp8": ExpertParameters(_WEIGHTS, ("w13_weight_scale_inv", "w2_weight_scale_inv"), _FP8),
    "fp8-tensor": ExpertParameters(_WEIGHTS, _SCALES, _FP8),
    "int4": ExpertParameters(("w13_qweight", "w2_qweight"), ("w13_scales", "w2_scales"), _NIBBLES),
}


def parameters_of(layer: torch.nn.Module) -> tuple[SchemeName | None, ExpertParameters]:
    """How this layer's experts are quantised, and where they are.

    Raises UnsupportedModelError for a layer with other parameters, or not all of them, by name.
    """
    # MoeWNA16Method has empty ones for tensors of a checkpoint that it does not use.
    found = {n: p for n, p in layer.named_parameters(recurse=False) if p.numel()}
    for scheme, parameters in PARAMETERS.items():
        if set(parameters.names) == set(found) and _dtypes(parameters, found) <= parameters.dtypes:
            return scheme, parameters
    raise UnsupportedModelError(_what_is_wrong(found))


def _dtypes(
    parameters: ExpertParameters, found: Mapping[str, torch.nn.Parameter]
) -> set[torch.dtype]:
    return {found[name].dtype for name in parameters.weights}


def _what_is_wrong(found: Mapping[str, torch.nn.Parameter]) -> str:
    """Held against the row that has most of these names, and none that is not there."""
    rows = [row for row in PARAMETERS.values() if set(row.names) <= set(found)]
    known = max((row.names for row in rows), key=len, default=())
    wrong = [name for name in sorted(found) if name not in known] or sorted(found)
    dtypes = ", ".join(f"{name} ({found[name].dtype})".replace("torch.", "") for name in wrong)
    return (
        f"experts with {dtypes} cannot be woven, since adapters have nothing to put there: woven "
        "are unquantised experts and those of w8a8_int8, fp8 and moe_wna16 (docs/adapters.md); "
        "use such a checkpoint, or --no-esft"
    )
