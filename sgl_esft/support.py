"""What has been shown to work on which device; the rest is refused by name, at start.

    launch/plan.py (device) -> launch/resolved.py (flags) -> plugin/build.py (each loaded layer)

Devices are called as torch calls them. One line here lifts one refusal; the test that shows it is
to be there first. README.md's table says of every cell which command repeats it.
"""

from __future__ import annotations

from collections.abc import Mapping

# Backends that compute the experts of a woven layer, by SGLang's names. On a CPU the platform's own
# loop does, whose layers SGLang calls "triton".
MOE_BACKENDS: Mapping[str, frozenset[str]] = {
    "cpu": frozenset({"triton"}),
    "cuda": frozenset({"triton"}),
    "npu": frozenset(),  # "ascend", once weaving on SGLang's NPU backend has been shown
}

# Where an engine may weave. "npu" is for whoever has shown it, with "ascend" above.
WEAVING_DEVICES: frozenset[str] = frozenset({"cpu", "cuda"})

# The most devices that may scale; None = as many as there are.
# "cuda": None, once a test has run SGLang's Triton path over the layout of elastic ranks, where
# experts of other ranks are -1.
ELASTIC_DEVICES: Mapping[str, int | None] = {"cpu": None, "cuda": 1, "npu": 0}
