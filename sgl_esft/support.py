"""What has been shown to work on which device; the rest is refused by name, at start.

    launch/plan.py (device) -> launch/resolved.py (flags) -> plugin/build.py (each loaded layer)

Devices are called as torch calls them. One line here lifts one refusal; the test that shows it is
to be there first. README.md's table says of every cell which command repeats it.

TRY_VARIABLE lets through what a bench on a device is to show, for that bench (bench/gpu/run.py);
a server that was started so says it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

TRY_VARIABLE: Final = "SGL_ESFT_TRY"  # such as "tiers,quantised": names of parts, on CUDA
TRIED: Final = frozenset(filter(None, os.environ.get(TRY_VARIABLE, "").split(",")))


def _shown(part: str, *devices: str) -> frozenset[str]:
    """Where a part was shown, and CUDA where it is tried."""
    return frozenset(devices) | ({"cuda"} if part in TRIED else frozenset())


# Backends that compute the experts of a woven layer, by SGLang's names. On a CPU the platform's own
# loop does, whose layers SGLang calls "triton".
MOE_BACKENDS: Mapping[str, frozenset[str]] = {
    "cpu": frozenset({"triton"}),
    "cuda": frozenset({"triton"}),
    "npu": frozenset({"ascend"}),  # tests/fast/ascend/test_npu_moe.py
}

# Where an engine may weave.
WEAVING_DEVICES: frozenset[str] = frozenset({"cpu", "cuda", "npu"})

# Where devices may come and go. On CUDA experts of other ranks are -1 in SGLang's Triton path:
# tests/fast/moe_interpreted/test_whole_experts.py.
ELASTIC_DEVICES: frozenset[str] = frozenset({"cpu", "cuda"})

# Where a base whose experts are quantised may be woven.
QUANTISED_DEVICES: frozenset[str] = _shown("quantised", "cpu")

# Where adapters may tune shared experts: tests/fast/layer/test_shared_experts.py. Whose tokens a
# batch has is asked in the middle of a forward pass, which no graph of a device can record.
SHARED_EXPERT_DEVICES: frozenset[str] = frozenset({"cpu"})

# Where experts may be in tiers (--expert-cache).
TIER_DEVICES: frozenset[str] = _shown("tiers", "cpu")

# How they may be quantised there, by the names of formats/expert_scheme.py:
# tests/fast/offload/test_quantised_tiers.py.
TIER_SCHEMES: frozenset[str] = frozenset({"int8"})
