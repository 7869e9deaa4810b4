"""What of a run fits: layers into a device's memory, steps into a call's minutes. Pure.

    free bytes, what a model takes -> [layers_that_fit] -> layers of DeepSeek-V2-Lite's shape
    seconds of a call, its steps   -> [choose, allot]   -> steps that run and for how long, the
                                                           others with the reason why not
    all parts                      -> [calls]           -> which parts share a call

A device of 80 GB (78 GiB) and one of 141 GB (139 GiB) are what the tests plan for; at run time the
free memory is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GIB = 1 << 30
CALL_MINUTES = 9.5  # a call of ten minutes, with time left to write
ALL_MINUTES = 28.0  # thirty, with time left to start
MARGIN = 0.92  # of free memory; the rest is what allocators round up
SERVER_BYTES = 3 * GIB  # a process's context, graphs and workspaces
STATIC_SHARE = 0.85  # --mem-fraction-static of a server, of what is free when it starts
LEAST_LAYERS = 2  # the dense one and one with experts


class DoesNotFitError(Exception):
    """Not even a model of two layers fits; the message has the bytes."""


@dataclass(frozen=True)
class Limits:
    """Seconds of a step: with less than `least` it is not begun, after `most` it is ended."""

    least: int
    most: int


@dataclass(frozen=True)
class Model:
    """Bytes of a model that is cut by layers; the first layer has no experts."""

    trunk: int  # embedding, head, dense layer
    layer: int  # of a MoE layer: attention, shared experts, the base's experts
    adapters: Sequence[int]  # of each MoE layer: all adapters' experts, pages rounded up
    kv: int  # of the whole cache and a layer

    def base(self, num_layers: int) -> int:
        """Weights and KV of a server or model without adapters."""
        return self.trunk + (num_layers - 1) * self.layer + num_layers * self.kv

    def woven(self, num_layers: int) -> int:
        """The same with all adapters."""
        return self.base(num_layers) + sum(self.adapters[: num_layers - 1])


def _most_layers(wanted: int, fits: Sequence[bool], what: str) -> int:
    """`fits`: of 0, 1, ... layers."""
    for num_layers in range(wanted, LEAST_LAYERS - 1, -1):
        if fits[num_layers]:
            return num_layers
    raise DoesNotFitError(f"{what}: {LEAST_LAYERS} layers do not fit")


def layers_that_fit(free: int, fixed: int, layers: Sequence[int]) -> int:
    """How many of `layers`, by their bytes, fit beside `fixed` ones. Raises DoesNotFitError."""
    fits = [fixed + sum(layers[:number]) <= MARGIN * free for number in range(len(layers) + 1)]
    return _most_layers(len(layers), fits, f"{fixed + sum(layers)} bytes of {free} free")


def layers_of_two_models(free: int, wanted: int, model: Model) -> int:
    """A merged and a woven model in one process. Raises DoesNotFitError."""
    fits = [
        model.base(number) + model.woven(number) + SERVER_BYTES <= MARGIN * free
        for number in range(wanted + 1)
    ]
    return _most_layers(wanted, fits, f"merged beside woven in {free} bytes")


def layers_of_two_servers(free: int, wanted: int, model: Model) -> int:
    """A woven server and a plain one that start together, both within one's static share.

    Raises DoesNotFitError.
    """
    fits = [
        model.woven(number) + model.base(number) + 2 * SERVER_BYTES <= STATIC_SHARE * free
        for number in range(wanted + 1)
    ]
    return _most_layers(wanted, fits, f"two servers in {free} bytes")


def layers_of_a_swap(free: int, wanted: int, model: Model) -> int:
    """Memory worker, engine and standby: weights and KV once, what a process takes thrice."""
    fits = [model.woven(number) + 3 * SERVER_BYTES <= MARGIN * free for number in range(wanted + 1)]
    return _most_layers(wanted, fits, f"an engine and its standby in {free} bytes")


def least_seconds(steps: Mapping[str, Limits]) -> int:
    """What all of them need of a call."""
    return sum(limits.least for limits in steps.values())


@dataclass(frozen=True)
class Chosen:
    """Steps of a call in order, and why the others are not among them."""

    run: Mapping[str, Limits]
    not_run: Mapping[str, str]


def choose(steps: Mapping[str, Limits], seconds: float) -> Chosen:
    """The first steps whose least seconds fit together; a later one that still fits is taken."""
    run: dict[str, Limits] = {}
    not_run: dict[str, str] = {}
    left = seconds
    for name, limits in steps.items():
        if limits.least <= left:
            run[name] = limits
            left -= limits.least
        else:
            not_run[name] = f"needs {limits.least} s, {max(left, 0):.0f} s were left of this call"
    return Chosen(run, not_run)


def allot(left: float, limits: Limits, later: Sequence[Limits]) -> float:
    """Seconds of the next step: what the later ones do not need, at most its own bound."""
    return min(limits.most, left - sum(each.least for each in later))


def calls(parts: Mapping[str, float], minutes: float = CALL_MINUTES) -> list[list[str]]:
    """Parts (name -> least seconds) in order, as many in a call as fit."""
    found: list[list[str]] = []
    left = 0.0
    for name, seconds in parts.items():
        if seconds > left or not found:
            found.append([])
            left = 60 * minutes
        found[-1].append(name)
        left -= seconds
    return found
