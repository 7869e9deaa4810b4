"""Elastic's layout through SGLang's Triton MoE path: every expert has a row, some are elsewhere.

    python -m tests.fast.moe_interpreted.whole_experts_runs  ->  JSON, for test_whole_experts.py

SGLang sees one rank with all experts (sgl_elastic's WholeExperts), so it filters no id -1 by
itself; the expert map says -1 for what is not here. The memory of those rows is NaN.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from sgl_elastic.engine.hooks import ENGINE_HOOKS, whole_experts
from sgl_esft import hook_ledger
from sgl_esft.plugin import hook_table
from sgl_esft.weave import page_source
from sgl_esft.weave.expert_memory import PaddedMemory
from sgl_esft.weave.shared_layer import SharedLayer
from sgl_esft.weave.slot_layout import SlotLayout
from tests.fast.moe_interpreted import cuda_view
from tests.fast.moe_interpreted.blocks import MAX_ADAPTERS, NUM_EXPERTS, Case, Woven, compare
from tests.fast.moe_interpreted.cases import EP2, FEW
from tests.fast.moe_interpreted.woven_runs import BASE, LAST, Plain, distinct, weave

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Placements of the 8 experts, as the plan of 1, 2 and 3 devices may have them.
PLACEMENTS = {
    "one device": [range(NUM_EXPERTS)],
    "two devices": [{0, 2, 5, 7}, {1, 3, 4, 6}],
    "three devices, uneven": [{0, 1, 2}, {3, 4, 5}, {6, 7}],
    "nothing on the second": [range(NUM_EXPERTS), set()],
}
HALVES = [set(range(NUM_EXPERTS // 2)), set(range(NUM_EXPERTS // 2, NUM_EXPERTS))]


class NanSource:
    """A page source whose rows all have memory, and hold NaN until somebody loads them."""

    num_sources = 1

    def create_experts(
        self, layer: torch.nn.Module, layout: SlotLayout, create: Callable[[], None]
    ) -> PaddedMemory:
        create()
        weights = [layer.w13_weight, layer.w2_weight]
        return PaddedMemory(layout.num_slots, [int(weight[0].nbytes) for weight in weights])

    def woven(self, manager: Any) -> None:
        """No engine is told anything here."""


def device_with(case: Case, resident: Any) -> Woven:
    """One device's layer with those experts, and the adapters' of the same ids."""
    woven = Woven(case, resident=resident)
    assert isinstance(woven.layer, SharedLayer)
    for expert in resident:
        woven.layer.memory.map(range(expert, expert + 1))
    woven.layer.rebind(resident, {})
    for slot in range(MAX_ADAPTERS):
        woven.place(slot, slot)
    woven.check()
    return woven


def compare_sum(plain: Plain, placement: list[Any]) -> str:
    """The devices' parts make up the layer, but for the rounding of a sum."""
    case, expected = plain.case, plain(LAST).float()
    parts = [device_with(case, resident).run(case.batch(FEW), LAST) for resident in placement]
    total = torch.stack([part.float() for part in parts]).sum(0)
    tolerance = 1e-6 if case.dtype is torch.float32 else 3e-2
    is_close = torch.allclose(total, expected, atol=tolerance, rtol=tolerance)
    return "close" if is_close else compare(total, expected)


def main() -> None:
    cuda_view.as_cuda()
    plain = {name: Plain(Case(dtype=dtype)) for name, dtype in DTYPES.items()}
    ranks = [Plain(Case(rank)) for rank in EP2]
    hook_ledger.install(hook_table.WEAVE_HOOKS)
    hook_ledger.install(hook for hook in ENGINE_HOOKS if hook.function is whole_experts)
    weave("padded")
    page_source.install(NanSource())
    sums = {
        f"{layout}, {name}": compare_sum(of_dtype, placement)
        for layout, placement in PLACEMENTS.items()
        for name, of_dtype in plain.items()
    }
    sys.stdout.write(json.dumps({"sums": sums, **devices_alone(plain["float32"], ranks)}))


def devices_alone(plain: Plain, ranks: list[Plain]) -> dict[str, Any]:
    """Single devices: with everything, with what a rank of SGLang's has, with nothing."""
    case, batch = plain.case, plain.case.batch(FEW)
    whole = device_with(case, range(NUM_EXPERTS))
    halves = [device_with(case, half).run(batch, LAST) for half in HALVES]
    return {
        "all here": {
            name: compare(whole.run(batch, slot), plain(slot))
            for name, slot in (("the last adapter", LAST), ("base", BASE))
        },
        "SGLang's ranks": [
            compare(half, rank(LAST)) for half, rank in zip(halves, ranks, strict=True)
        ],
        "nothing here": distinct(device_with(case, set()).run(batch, LAST)),
    }


if __name__ == "__main__":
    main()
