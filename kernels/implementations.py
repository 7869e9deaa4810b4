"""The implementations of reroute and of the fused router, and the choice of one at start-up.

    choose(name or None, device type) -> Implementation, loaded -> its function, for every layer
    choose_router(device type) -> the function that scores, chooses and reroutes in one

Nothing is tried in turn: what was asked for runs, or a named error says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch

from sgl_esft_kernels.errors import KernelUnavailableError
from sgl_esft_kernels.op import RerouteFunction
from sgl_esft_kernels.reroute_ref import reroute_unfused
from sgl_esft_kernels.route_ref import route_and_reroute

# (router_logits, token_adapter_slots, expert_map, spec, correction_bias=None,
#  num_token_non_padded=None, where=None) -> weights, slot ids; route_ref.py has the contract
RouterFunction = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Implementation:
    """One way to reroute.

    device_types: torch's names of the devices it runs on; empty = every device.
    load: makes it ready and returns its function. Raises KernelUnavailableError.
    """

    name: str
    device_types: tuple[str, ...]
    load: Callable[[], RerouteFunction]


def _load(module: str) -> RerouteFunction:
    """Imported when it is chosen: each needs what other machines lack."""
    function: RerouteFunction = import_module(f"sgl_esft_kernels.{module}").load()
    return function


IMPLEMENTATIONS: dict[str, Implementation] = {
    each.name: each
    for each in (
        Implementation("reference", (), lambda: reroute_unfused),
        Implementation("cpu", ("cpu",), partial(_load, "reroute_cpu")),
        Implementation("triton", ("cuda",), partial(_load, "reroute_triton")),
        Implementation("triton_ascend", ("npu",), partial(_load, "reroute_triton_ascend")),
    )
}


def implementation_for(device_type: str) -> str:
    """The name of the fused implementation of a device type. Raises KernelUnavailableError."""
    for each in IMPLEMENTATIONS.values():
        if device_type in each.device_types:
            return each.name
    known = sorted({kind for each in IMPLEMENTATIONS.values() for kind in each.device_types})
    raise KernelUnavailableError(
        f"no fused reroute for device type {device_type!r}: there is one for {', '.join(known)}; "
        "the reference runs everywhere"
    )


def choose(name: str | None, device_type: str) -> RerouteFunction:
    """Load the implementation `name` (None = the device's fused one). Call it once, at start-up.

    Raises KernelUnavailableError for an unknown name, another device's implementation, and one
    whose library or compiler is not installed.
    """
    name = implementation_for(device_type) if name is None else name
    if name not in IMPLEMENTATIONS:
        raise KernelUnavailableError(
            f"no implementation {name!r} of reroute: there are {', '.join(IMPLEMENTATIONS)}"
        )
    chosen = IMPLEMENTATIONS[name]
    if chosen.device_types and device_type not in chosen.device_types:
        raise KernelUnavailableError(
            f"reroute {name!r} runs on {', '.join(chosen.device_types)}, not on {device_type}"
        )
    return chosen.load()


def choose_router(device_type: str) -> RouterFunction:
    """Load the fused router of a device type: one kernel on CUDA, its definition on a CPU.

    Raises KernelUnavailableError where there is none.
    """
    if device_type == "cuda":
        from sgl_esft_kernels.route_triton import load

        return load()
    if device_type == "cpu":
        return route_and_reroute
    raise KernelUnavailableError(
        f"no fused router for device type {device_type!r}: there is one for cpu, cuda"
    )
