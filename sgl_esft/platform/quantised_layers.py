"""Which of SGLang's quantised layers the CPU platform computes; the others are refused at start.

    --quantization, config.json  -> [check_quantisation] -> SGLang builds the model
    each layer asks for a method -> [check_method]       -> its weights are created

Imported late, by hooks that run once SGLang has imported its models: `cpu_hooks.py` must not import
these classes itself. How experts are computed: `quantised_moe.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from sglang.srt.layers.quantization.fp8 import Fp8KVCacheMethod, Fp8MoEMethod
from sglang.srt.layers.quantization.moe_wna16 import MoeWNA16Method
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8MoEMethod

from sgl_esft.errors import UnsupportedModelError

# The methods of quantised experts -> whether `experts_of` knows what this one of them leaves.
EXPERTS: Final[Mapping[type, Callable[[Any], bool]]] = {
    W8A8Int8MoEMethod: lambda method: True,
    Fp8MoEMethod: lambda method: (
        method.quant_config.is_checkpoint_fp8_serialized
        and method.quant_config.activation_scheme == "dynamic"
        and not method.use_mxfp8
        and not method.is_fp4_expert
    ),
    MoeWNA16Method: lambda method: (
        method.quant_config.weight_bits == 4 and not method.quant_config.has_zp
    ),
}
QUANTISATIONS: Final = ("w8a8_int8", "fp8", "moe_wna16")  # --quantization
_OTHERS: Final = (
    UnquantizedLinearMethod,
    UnquantizedEmbeddingMethod,
    UnquantizedFusedMoEMethod,
    Fp8KVCacheMethod,  # of every attention where experts are fp8, with a scale of 1
)
_REMEDY: Final = (
    "the CPU platform computes routed experts in w8a8_int8, in fp8 with dynamic activations, and "
    "in symmetric int4 with --quantization moe_wna16, and no other layer quantised: write such a "
    "checkpoint with sgl-esft quantise"
)


def check_quantisation(name: str) -> None:
    """SGLang's name of a checkpoint's quantisation. Raises UnsupportedModelError."""
    if name not in QUANTISATIONS:
        raise UnsupportedModelError(f"the model is quantised by {name}; {_REMEDY}")


def check_method(module: str, method: Any) -> None:
    """What computes the module of this name, where a model is quantised.

    Raises UnsupportedModelError.
    """
    is_known = EXPERTS.get(type(method))
    if type(method) in _OTHERS or (is_known is not None and is_known(method)):
        return
    raise UnsupportedModelError(
        f"{module} is quantised as SGLang's {type(method).__name__} computes it; {_REMEDY}"
    )
