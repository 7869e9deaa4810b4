"""The numbers in docs/pictures/shared.svg are those that the serving code gives the example."""

import re
from pathlib import Path

from sgl_esft.weave.expert_map import ExpertMap, base_row
from sgl_esft.weave.slot_layout import SlotLayout

PICTURE = Path(__file__).resolve().parents[3] / "docs" / "pictures" / "shared.svg"
ADAPTERS = {0: (2, 5), 1: (0, 5, 7)}  # adapter slot -> its expert ids


def test_shared_picture() -> None:
    layout = SlotLayout.plan(num_base=8, num_routed=8, num_adapters=2, max_experts_per_adapter=3)
    row = base_row(num_experts=8, num_routed_global=8, num_routed_local=8, ep_rank=0)
    expert_map = ExpertMap(row, layout, "cpu")
    tensor = [f"e{expert}" for expert in range(8)] + ["empty"] * 6
    for adapter_slot, experts in ADAPTERS.items():
        used = dict(zip(experts, layout.adapter_range(adapter_slot), strict=False))
        expert_map.write(adapter_slot, used)
        for expert, slot in used.items():
            tensor[slot] = f"e{expert}"
    rows = expert_map.table.tolist()
    cells = [str(slot) for tag in (0, 1, -1) for slot in rows[tag]]
    assert re.findall(r'class="mono mid"[^>]*>([^<]*)<', PICTURE.read_text()) == tensor + cells
