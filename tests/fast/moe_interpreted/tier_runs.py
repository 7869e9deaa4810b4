"""Tiered layers against merged ones through SGLang's Triton MoE path, rows filled by a copy stream.

    python -m tests.fast.moe_interpreted.tier_runs  ->  JSON, which test_tiers.py judges

Experts come from the case's own weights instead of files; streams are the simulator's.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import torch

from sgl_esft import hook_ledger
from sgl_esft.config import EsftConfig, TierConfig, current_config
from sgl_esft.offload.decisions import Decisions
from sgl_esft.offload.device_rows import DeviceRows, make_seats
from sgl_esft.offload.loader import Loader
from sgl_esft.offload.policies import POLICIES
from sgl_esft.offload.tier import ExpertTier, TierLayer
from sgl_esft.offload.tiered_layer import TieredLayer
from sgl_esft.plugin import build, hook_table, runner_core
from sgl_esft.plugin.tier_waves import WaveCore
from sgl_esft.weave.batch_tags import BatchTags
from tests.fast.moe_interpreted import cuda_view
from tests.fast.moe_interpreted.blocks import (
    HIDDEN,
    LAYER_ID,
    MAX_ADAPTERS,
    MAX_EXPERTS,
    MAX_TOKENS,
    NUM_EXPERTS,
    TUNED,
    Case,
    compare,
    surround,
)
from tests.fast.moe_interpreted.cases import EXPERTS, FEW
from tests.fast.moe_interpreted.woven_runs import BASE, ONE_RANK, Plain
from tests.support.streams import Streams

RANKS = (ONE_RANK, "EP2 rank 1, float32")
Place = tuple[int, int]  # adapter number or BASE, expert id


class Tiered:
    """A case's layer with `num_rows` rows."""

    def __init__(self, case: Case, num_rows: int) -> None:
        self.case = case
        EsftConfig(
            MAX_ADAPTERS,
            MAX_EXPERTS,
            expert_memory="padded",
            tiers=TierConfig(num_rows=num_rows, top_k=case.routing.top_k),
        ).export()
        current_config.cache_clear()
        self.block = case._block(case.base, resident=())
        surround(self.block.experts)
        self.streams = Streams()
        model = torch.nn.ModuleList([self.block])
        [layer] = build.bind_layers(model, case.spec).values()
        assert isinstance(layer, TieredLayer)
        self.layer = layer
        self.broken: set[Place] = set()
        self.tier, rows = self._tier(num_rows)
        ids = sorted(layer.shard.expert_ids)
        layer.join(self.tier, 0, {slot: (BASE, e) for slot, e in enumerate(ids)})  # type: ignore[misc]
        self.tags = BatchTags(MAX_TOKENS, "cpu")
        build.attach_rerouting(
            model, {LAYER_ID: layer}, self.tags, "fused", tiers=_Cores(self, rows)
        )

    def _tier(self, num_rows: int) -> tuple[ExpertTier, DeviceRows]:
        layer = self.layer
        rows = DeviceRows(self.streams, make_seats((layer.w13, layer.w2), 2), self._read)
        decisions = Decisions(
            1,
            layer.layout.num_slots,
            layer.w13.shape[0],
            POLICIES["lru"],
            num_base=layer.layout.num_base,
        )
        make = partial(Loader, 2)
        tier = ExpertTier([TierLayer(LAYER_ID, layer.w13, layer.w2)], decisions, make, rows.load)
        return tier, rows

    def _read(self, place: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        number, expert = place
        self.streams.writes([w13, w2])
        if place in self.broken:
            raise OSError(5, "broken")
        experts = self.case.base if number == BASE else self.case._draw(1 + number)
        width = self.layer.shard.intermediate
        gate, up = experts.w13[expert].chunk(2)
        first, second = w13.chunk(2)
        first.copy_(gate[width.start : width.stop])
        second.copy_(up[width.start : width.stop])
        w2.copy_(experts.w2[expert][:, width.start : width.stop])

    def place(self, slot: int, number: int) -> None:
        here = [e for e in TUNED[number] if e in self.layer.shard.expert_ids]
        self.layer.place(slot, {e: (number, e) for e in here}, TUNED[number])

    def run(self, batch: tuple[torch.Tensor, torch.Tensor], slots: int | list[int]) -> torch.Tensor:
        num_tokens = len(batch[0])
        tags = [slots] * num_tokens if isinstance(slots, int) else slots
        self.tags.set(torch.tensor(tags, dtype=torch.int32))
        self.tier.begin(None)
        with self.streams.watched():
            found: torch.Tensor = self.block(*batch)
        return found


class _Cores:
    """In place of plugin/tiers.py's: SGLang's Triton core, in waves, its reads reported."""

    def __init__(self, tiered: Tiered, rows: DeviceRows) -> None:
        self._tiered = tiered
        self._rows = rows

    def inner(self, module: Any) -> Any:
        tiered = self._tiered
        core = runner_core.inner_core(module, tiered.layer.layout)

        def reading(dispatch_output: Any, weights: Any) -> Any:
            ids = dispatch_output.topk_output.topk_ids.unique().tolist()
            layer = tiered.layer
            rows = [row for row in ids if row >= 0]
            tiered.streams.reads(w[row] for row in rows for w in (layer.w13, layer.w2))
            return core(dispatch_output, weights)

        return WaveCore(tiered.tier, 0, self._rows, reading, lambda output: (None, None))


def compare_rows(case: Case, plain: Plain, num_rows: int) -> dict[str, str]:
    """With so many rows; of fewer than are needed, sums are rounded once more for each wave."""
    tiered = Tiered(case, num_rows)
    for slot in range(MAX_ADAPTERS):
        tiered.place(slot, slot)
    batch = case.batch(FEW)
    found = {
        f"adapter in slot {slot}": _how(tiered.run(batch, slot), plain(slot))
        for slot in range(MAX_ADAPTERS)
    }
    found["base"] = _how(tiered.run(batch, BASE), plain(BASE))
    slots = [token % (MAX_ADAPTERS + 1) - 1 for token in range(FEW)]
    mixed = torch.stack([plain(slot)[token] for token, slot in enumerate(slots)])
    found["each token its own"] = _how(tiered.run(batch, slots), mixed)
    tiered.layer.displace(1)
    tiered.place(1, 3)
    found["another adapter in slot 1"] = _how(tiered.run(batch, 1), plain(3))
    tiered.layer.check_integrity()
    tiered.tier.close()
    return found


def _how(found: torch.Tensor, expected: torch.Tensor) -> str:
    said = compare(found, expected)
    if said == "equal":
        return said
    return "close" if torch.allclose(found, expected, atol=1e-5, rtol=1e-5) else said


def lost_expert(case: Case, plain: Plain) -> dict[str, Any]:
    """One token's expert cannot be read: that token is NaN, the others are as ever."""
    tiered = Tiered(case, NUM_EXPERTS)
    hidden, logits = case.batch(FEW)
    logits[:, 0] = -100.0  # nobody's
    logits[2, 0] = 100.0  # but this token's
    tiered.broken.add((BASE, 0))
    found = tiered.run((hidden, logits), BASE)
    others = [token for token in range(FEW) if token != 2]
    expected = plain.run(BASE, (hidden, logits))
    seen = {
        "lost": bool(found[2].isnan().all()),
        "others": compare(found[others], expected[others]),
        "failure": tiered.tier.failure,
    }
    tiered.broken.clear()
    seen["again"] = compare(tiered.run((hidden, logits), BASE), expected)
    tiered.tier.close()
    return seen


def main() -> None:
    cuda_view.as_cuda()
    plain = {name: Plain(EXPERTS[name]) for name in RANKS}
    hook_ledger.install(hook_table.WEAVE_HOOKS)
    results: dict[str, Any] = {
        name: {
            rows: compare_rows(EXPERTS[name], plain[name], rows) for rows in (3, NUM_EXPERTS, 17)
        }
        for name in RANKS
    }
    results["lost"] = lost_expert(EXPERTS[ONE_RANK], plain[ONE_RANK])
    results["hidden"] = HIDDEN
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
