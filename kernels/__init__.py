"""Kernels. Rerouting: from the router's expert ids to slots of the expert tensor.

    op.py                     the operator, its contract, its fake
    implementations.py        which implementations there are, and the choice of one at start-up
    reroute_ref.py            the definition, in plain torch: the paper's unfused chain
    reroute_cpu.py            native code of csrc/reroute, and of csrc/int8: the CPU platform's
    reroute_triton.py         CUDA
    reroute_triton_ascend.py  Ascend's vector cores
    route_spec.py, route_ref.py, route_triton.py
                              scoring, top-k and rerouting in one: parameters, definition, CUDA

Installed as `sgl_esft_kernels`. Knows neither SGLang nor `sgl_esft`.
"""

from sgl_esft_kernels.checks import NOT_HERE, check_map_height
from sgl_esft_kernels.errors import KernelError, KernelInputError, KernelUnavailableError
from sgl_esft_kernels.implementations import (
    IMPLEMENTATIONS,
    RouterFunction,
    choose,
    choose_router,
    implementation_for,
)
from sgl_esft_kernels.op import RerouteFunction, reroute
from sgl_esft_kernels.reroute_ref import reroute_unfused
from sgl_esft_kernels.route_spec import RouterSpec, unsupported_reason

__all__ = [
    "IMPLEMENTATIONS",
    "NOT_HERE",
    "KernelError",
    "KernelInputError",
    "KernelUnavailableError",
    "RerouteFunction",
    "RouterFunction",
    "RouterSpec",
    "check_map_height",
    "choose",
    "choose_router",
    "implementation_for",
    "reroute",
    "reroute_unfused",
    "unsupported_reason",
]

# The model hub's package is called "kernels" too. Where the checkout's root is on the import path,
# transformers finds this folder under that name and asks for its version; a version below the
# hub package's first tells it that the hub package is absent.
__version__ = "0"
