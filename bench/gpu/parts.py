"""The parts of bench/gpu/run.py and how long each step of them may take.

    Part: a result file, its steps in order -> bench/gpu/plan.py chooses what fits into a call

With less than its first number of seconds a step is not begun, after its second it is ended. The
first is about what it took on an H100 with 16 cores, where it has run. The order is that of worth:
what comes last is what a short run leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.gpu import plan
from bench.gpu.plan import Limits

BUILD = "build"
BUILD_SECONDS = Limits(20, 120)  # csrc/, once for all parts
DEVICE_TESTS = "device tests"


@dataclass(frozen=True)
class Part:
    """Steps that are run and written together."""

    file: str
    what: str
    steps: Mapping[str, Limits]

    @property
    def least_seconds(self) -> int:
        """What it needs of a call."""
        return plan.least_seconds(self.steps)


PARTS = {
    "check": Part(
        "gpu_check",
        "whether this machine can run the rest: imports, hooks, one tiny layer",
        {"self-check": Limits(25, 90)},
    ),
    "memory": Part(
        "gpu",
        "the virtual expert tensor on a GPU",
        {
            DEVICE_TESTS: Limits(20, 150),
            "vmm": Limits(12, 90),
            "fragmentation": Limits(12, 90),
            "load": Limits(20, 120),
            "share": Limits(12, 60),
            "moe: sglang fused_experts": Limits(45, 120),
            "moe: torch grouped_mm": Limits(15, 60),
            "moe: torch bmm over the base": Limits(15, 60),
            "moe: by slot": Limits(30, 60),
        },
    ),
    "reroute": Part(
        "gpu_reroute",
        "rerouting on a GPU: kernels, launches, CUDA graphs, a model's decode step",
        {
            "reroute: check": Limits(20, 120),
            "reroute: launches": Limits(40, 90),
            "reroute: graph safety": Limits(40, 90),
            "reroute: time": Limits(60, 120),
            "model step": Limits(100, 300),
        },
    ),
    "serve": Part(
        "gpu_serve",
        "SGLang with this plugin serving on a GPU",
        {"serve": Limits(130, 520)},
    ),
    "answers": Part(
        "gpu_answers",
        "answers of servers on a GPU beside those of merged models and of plain SGLang",
        {
            "serve: equality": Limits(100, 280),
            "tiers: equality": Limits(100, 280),
            "quantised: equality": Limits(120, 300),
        },
    ),
    "elastic": Part(
        "gpu_elastic",
        "an engine swap on a GPU with weights and KV resident",
        {"elastic": Limits(170, 520)},
    ),
}


def calls() -> list[list[str]]:
    """The parts of each call of a lent machine."""
    seconds = {name: float(part.least_seconds) for name, part in PARTS.items()}
    return plan.calls(seconds, plan.CALL_MINUTES - BUILD_SECONDS.least / 60)
