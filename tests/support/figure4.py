"""Figure 4 of the ExpertWeave paper: M = 64, N = 2, E_max = 8, ten tokens with six experts each."""

from __future__ import annotations

import torch

from sgl_esft.weave.slot_layout import SlotLayout

LAYOUT = SlotLayout.plan(num_base=64, num_routed=64, num_adapters=2, max_experts_per_adapter=8)

# Adapter slot -> tuned expert -> slot: three experts from 64 on, seven from 72 on.
EXPERT_TO_SLOT = {
    0: {3: 64, 14: 65, 47: 66},
    1: {5: 72, 13: 73, 14: 74, 27: 75, 35: 76, 57: 77, 59: 78},
}

# Adapter slot (the paper's AID), top-k ids before, top-k ids after.
_TOKENS = [
    (-1, [15, 14, 45, 47, 3, 57], [15, 14, 45, 47, 3, 57]),
    (-1, [35, 1, 32, 43, 11, 54], [35, 1, 32, 43, 11, 54]),
    (0, [31, 13, 62, 12, 34, 14], [31, 13, 62, 12, 34, 65]),
    (0, [26, 47, 31, 3, 58, 60], [26, 66, 31, 64, 58, 60]),
    (-1, [30, 14, 58, 46, 50, 44], [30, 14, 58, 46, 50, 44]),
    (1, [13, 31, 14, 35, 15, 5], [73, 31, 74, 76, 15, 72]),
    (1, [8, 27, 35, 59, 5, 63], [8, 75, 76, 78, 72, 63]),
    (1, [35, 59, 52, 58, 7, 37], [76, 78, 52, 58, 7, 37]),
    (0, [3, 13, 60, 0, 14, 32], [64, 13, 60, 0, 65, 32]),
    (1, [57, 5, 3, 13, 27, 59], [77, 72, 3, 73, 75, 78]),
]

TOKEN_ADAPTER_SLOTS = torch.tensor([t[0] for t in _TOKENS], dtype=torch.int32)  # [10]
TOPK_BEFORE = torch.tensor([t[1] for t in _TOKENS], dtype=torch.int32)  # [10, 6] expert ids
TOPK_AFTER = torch.tensor([t[2] for t in _TOKENS], dtype=torch.int32)  # [10, 6] slots


def expert_map_table() -> torch.Tensor:
    """[N + 1, M] int32, written out by hand from the figure; the last row is the base's."""
    rows = [list(range(64)) for _ in range(3)]
    for adapter_slot, moved in EXPERT_TO_SLOT.items():
        for expert, slot in moved.items():
            rows[adapter_slot][expert] = slot
    return torch.tensor(rows, dtype=torch.int32)
