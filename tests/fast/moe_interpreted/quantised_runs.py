"""Layers over slots against merged ones, both quantised, through SGLang's Triton MoE path.

    python -m tests.fast.moe_interpreted.quantised_runs fast|full  ->  JSON, which
    test_quantised.py and tests/full/test_moe_interpreted.py judge

Where all tokens of a batch share one scale of their activations, a batch of several adapters has no
merged model: each token is compared with its merged layer given the scale of the mixed batch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from sglang.kernels.ops.moe import fused_moe_triton_kernels

from sgl_esft import hook_ledger
from sgl_esft.config import EXPERT_MEMORY_KINDS
from sgl_esft.plugin import hook_table
from tests.fast.moe_interpreted import cuda_view, kernel_choice
from tests.fast.moe_interpreted.blocks import (
    MAX_ADAPTERS,
    NUM_EXPERTS,
    TUNED,
    Block,
    Routing,
    compare,
)
from tests.fast.moe_interpreted.cases import BETWEEN, EP2, FEW, MANY
from tests.fast.moe_interpreted.compiled_operators import FLOAT8_MAX, OperatorContractError
from tests.fast.moe_interpreted.quantised_blocks import SCHEMES, QuantisedCase, Slots, Woven
from tests.fast.moe_interpreted.woven_runs import BASE, LAST, distinct, watch, weave
from tests.support.random_layers import Rank

RANKS = {"one rank": Rank(), "EP2 rank 1": EP2[1]}
MORE_RANKS = {
    "EP2 rank 0": EP2[0],
    "TP2 rank 1": Rank(tp_rank=1, tp_size=2),
    "EP2 rank 1 x TP2 rank 0": Rank(1, 2, 0, 2),
}
# Blocks that no default has. Of float8, an H100 swaps the operands of the first. Its tiles are
# wider than a block of float8's scales, the second's narrower: swapped and narrower is what Triton
# 3.9 refuses of SGLang's kernel, woven or not (`a_scale[:, None]` of one number).
TUNED_BLOCKS: dict[str, dict[str, Any]] = {
    "low": {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 2},
    "narrow": {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1},
}
# Of float8 in blocks alone: the second product's rows lie sorted, and descriptors load the tiles.
SORTED = {"sorted": {**TUNED_BLOCKS["low"], "USE_TMA": True}}
Batch = tuple[torch.Tensor, torch.Tensor]
Found = dict[str, Any]
Layer = TypeVar("Layer", Slots, Woven)


class Plain:
    """SGLang's own layers of a case: the base's, and one for each adapter merged in."""

    def __init__(self, case: QuantisedCase) -> None:
        self.case = case
        self._blocks: dict[int, Block] = {}
        self._outputs: dict[Any, torch.Tensor] = {}

    def make(self) -> None:
        """Before there are hooks."""
        for number in (BASE, *range(len(TUNED))):
            self.block(number)

    def block(self, number: int) -> Block:
        if number not in self._blocks:
            adapter = {} if number == BASE else self.case.adapter(number)
            self._blocks[number] = self.case.plain(adapter)
        return self._blocks[number]

    def run(self, number: int, batch: Batch, **options: Any) -> torch.Tensor:
        result: torch.Tensor = self.block(number)(*batch, **options)
        return result

    def whole(self, number: int, num_tokens: int) -> torch.Tensor:
        """The case's batch of so many tokens through one adapter's merged layer."""
        return self._kept(
            (number, num_tokens), lambda: self.run(number, self.case.batch(num_tokens))
        )

    def mixed(self, num_tokens: int) -> torch.Tensor:
        """Of that batch, each token through another adapter's."""
        kinds, batch = all_kinds(num_tokens), self.case.batch(num_tokens)
        return self._kept(("mixed", num_tokens), lambda: self.run_mixed(kinds, batch))

    def _kept(self, key: Any, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        if key not in self._outputs:
            self._outputs[key] = run()
        return self._outputs[key]

    def run_mixed(self, numbers: list[int], batch: Batch) -> torch.Tensor:
        """Each token through its adapter's merged layer."""
        given = {number: self.run(number, batch) for number in set(numbers)}
        if self.case.scheme.is_per_batch:
            scale = self._scale_of(numbers, batch)
            given = {number: self._run_with(scale, number, batch) for number in given}
        return torch.stack([given[number][token] for token, number in enumerate(numbers)])

    def _scale_of(self, numbers: list[int], batch: Batch) -> torch.Tensor:
        """The scale of what comes out of the mixed batch's activation, [1]."""
        rows = []
        for number in sorted(set(numbers)):
            with inputs_of_quantisation() as inputs:
                self.run(number, batch)
            own = [token for token, other in enumerate(numbers) if other == number]
            rows.append(inputs[1].unflatten(0, (len(numbers), -1))[own])
        largest = torch.stack([each.float().abs().max() for each in rows]).max()
        return (largest / FLOAT8_MAX).reshape(1)

    def _run_with(self, scale: torch.Tensor, number: int, batch: Batch) -> torch.Tensor:
        """With a static scale of the second product's input."""
        layer = self.block(number).experts
        layer.w2_input_scale = scale
        result = self.run(number, batch)
        layer.w2_input_scale = None
        return result


@contextmanager
def inputs_of_quantisation() -> Iterator[list[torch.Tensor]]:
    """What SGLang's two products quantise, inside."""
    seen: list[torch.Tensor] = []
    quantise = fused_moe_triton_kernels.scaled_fp8_quant

    def scaled_fp8_quant(values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(values.clone())
        return quantise(values, *args, **kwargs)

    with patch.object(fused_moe_triton_kernels, "scaled_fp8_quant", scaled_fp8_quant):
        yield seen


def with_adapters(case: QuantisedCase) -> Slots:
    """Adapters 0 to 2 side by side; the last has the last slot of all."""
    return placed(Slots(case))


def placed(layer: Layer) -> Layer:
    for slot in range(MAX_ADAPTERS):
        layer.place(slot, slot)
    return layer


def all_kinds(num_tokens: int) -> list[int]:
    """Each token another adapter's, or the base's."""
    return [token % (MAX_ADAPTERS + 1) - 1 for token in range(num_tokens)]


def compare_mixed(layer: Slots | Woven, plain: Plain, num_tokens: int = FEW) -> str:
    batch = plain.case.batch(num_tokens)
    return compare(layer.run(batch, all_kinds(num_tokens)), plain.mixed(num_tokens))


def compare_changes(layer: Slots | Woven, plain: Plain) -> Found:
    """Adapters that have come and gone, on slots that others have had."""
    batch = plain.case.batch(FEW)

    def seen(slot: int, number: int) -> str:
        return compare(layer.run(batch, slot), plain.whole(number, FEW))

    found = {f"adapter in slot {slot}": seen(slot, slot) for slot in range(MAX_ADAPTERS)}
    found["base"] = seen(BASE, BASE)
    layer.displace(1)
    layer.place(1, 3)
    found["another adapter in slot 1"] = seen(1, 3)
    for slot in range(MAX_ADAPTERS):
        layer.displace(slot)
    found["base after unloading"] = seen(0, BASE)
    return found


def compare_batches(case: QuantisedCase, plain: Plain) -> Found:
    """More rows than slots; the same in chunks of several sizes."""
    slots, (hidden, logits) = with_adapters(case), case.batch(MANY)
    found = {"many tokens": compare_mixed(slots, plain, MANY)}
    start = 0
    for size in (1, BETWEEN, MANY - BETWEEN - 1):
        piece = slice(start, start + size)
        batch, kinds = (hidden[piece], logits[piece]), all_kinds(MANY)[piece]
        found[f"chunk of {size}"] = compare(slots.run(batch, kinds), plain.run_mixed(kinds, batch))
        start += size
    return found


def of_last_adapter(case: QuantisedCase) -> Batch:
    """Two tokens that go to the experts of the last adapter alone."""
    hidden, logits = case.batch(2)
    logits[:, list(TUNED[LAST])] += 100
    return hidden, logits


def wrong_scales(case: QuantisedCase, plain: Plain) -> Found:
    """Whether a wrong scale of an adapter's slots would show, for each tensor of scales."""
    slots, batch = with_adapters(case), of_last_adapter(case)
    expected, own = plain.run(LAST, batch), slots.slots_of(LAST, LAST)
    wrong: dict[str, dict[int, int | None]] = {
        "of the slot before": {slot: slot - 1 for slot in own.values()},
        "of the base's expert": {slot: expert for expert, slot in own.items()},
        "missing": dict.fromkeys(own.values()),
    }
    found: Found = {"right": compare(slots.run(batch, LAST), expected)}
    for name in slots.scales:
        for what, rows in wrong.items():
            with slots.scales_of(name, rows):
                found[f"{name} {what}"] = shows(slots, batch, LAST, expected)
    return found


def shows(slots: Slots, batch: Batch, slot: int, expected: torch.Tensor) -> bool:
    """Whether something other comes out."""
    try:
        return compare(slots.run(batch, slot), expected) != "equal"
    except OperatorContractError:
        return True


def stray_read(case: QuantisedCase, plain: Plain) -> bool:
    """Whether an unmapped slot that is read would show."""
    slots, batch = with_adapters(case), of_last_adapter(case)
    slots.displace(0)
    slots.expert_map.table[LAST, TUNED[LAST][0]] = slots.layout.adapter_range(0).start
    return shows(slots, batch, LAST, plain.run(LAST, batch))


def run_padded(case: QuantisedCase, plain: Plain) -> Found:
    """A batch with rows that SGLang's router is told are padding: id -1, whatever they hold."""
    batch, num_live = case.batch(FEW), FEW - 2
    output = with_adapters(case).run(batch, LAST, num_live=num_live)
    expected = plain.run(LAST, batch, num_live=num_live)
    return {
        "live rows": compare(output[:num_live], expected[:num_live]),
        "padding rows": distinct(output[num_live:]),
    }


def compare_blocks(case: QuantisedCase, plain: Plain, tuned: Mapping[str, dict[str, Any]]) -> Found:
    """What is looked up and launched, and what comes out, by default and with these blocks."""
    slots = with_adapters(case)
    found = {"default": compare_launches(slots, plain)}
    for kind, blocks in tuned.items():
        with TemporaryDirectory() as folder:
            write_tuned(case, plain, Path(folder), blocks)
            with patch.dict(os.environ, SGLANG_MOE_CONFIG_DIR=folder):
                found[kind] = compare_launches(slots, plain)
    return found


def compare_launches(slots: Slots, plain: Plain) -> Found:
    batch = plain.case.batch(BETWEEN)
    outputs: list[torch.Tensor] = []
    found: Found = {
        "plain": watch(lambda: kept(outputs, plain.run(LAST, batch))),
        "slots": watch(lambda: kept(outputs, slots.run(batch, LAST))),
    }
    return found | {"output": compare(outputs[1], outputs[0])}


def kept(outputs: list[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    outputs.append(output)
    return output


def write_tuned(case: QuantisedCase, plain: Plain, folder: Path, blocks: dict[str, Any]) -> None:
    """Under the names that SGLang's own layer of the merged model looks up."""
    with kernel_choice.watched() as seen:
        plain.run(BASE, case.batch(1))
    up, down = dict.fromkeys(seen.file_names)
    kernel_choice.write_file(folder, up, blocks)
    kernel_choice.write_file(folder, down, blocks)


def largest_of_filtered(case: QuantisedCase) -> str:
    """What SGLang's own layer of one rank among several quantises, with its filter as it is."""
    layer = case.load(case.base.chosen(*range(NUM_EXPERTS)))
    try:
        Block(Routing(), layer)(*case.batch(FEW))
    except OperatorContractError as error:
        return str(error)
    return "every row was written"


def run_fast(name: str, plain: dict[str, Plain]) -> Found:
    case, own = plain["one rank"].case, plain["one rank"]
    other = plain["EP2 rank 1"]
    return {
        "mixed": {label: compare_mixed(with_adapters(p.case), p) for label, p in plain.items()},
        "scales": wrong_scales(case, own),
        "stray read": stray_read(case, own),
        "padded": run_padded(case, own),
        "filtered": largest_of_filtered(other.case),
        "blocks": compare_blocks(case, own, {"low": TUNED_BLOCKS["low"]}),
    }


def run_full(name: str, plain: dict[str, Plain]) -> Found:
    case, own = plain["float16"].case, plain["float16"]
    tuned = {**TUNED_BLOCKS, **SORTED} if name == "fp8" else TUNED_BLOCKS
    return {
        "mixed": {label: compare_mixed(with_adapters(p.case), p) for label, p in plain.items()},
        "padded": {label: run_padded(p.case, p) for label, p in plain.items()},
        "blocks": compare_blocks(case, own, tuned),
        "changes": compare_changes(with_adapters(case), own),
        "batches": compare_batches(case, own),
        "scales": wrong_scales(case, own),
    }


def run_woven(tier: str, plain: dict[str, Plain]) -> Found:
    """Woven as in a server, after the hooks are in place: nobody else's layer is plain any more."""
    found: Found = {}
    for memory in EXPERT_MEMORY_KINDS:
        weave(memory)
        for label, of_rank in plain.items():
            layer = placed(Woven(of_rank.case))
            found[f"{label}, {memory}"] = compare_mixed(layer, of_rank)
            if (tier, label) == ("full", "float16"):
                found[f"changes, {memory}"] = compare_changes(layer, of_rank)
    return found


def cases_of(name: str, tier: str) -> dict[str, QuantisedCase]:
    scheme = SCHEMES[name]
    if tier == "fast":
        return {label: QuantisedCase(scheme, rank) for label, rank in RANKS.items()}
    of_ranks = {label: QuantisedCase(scheme.doubled, rank) for label, rank in MORE_RANKS.items()}
    return {"float16": QuantisedCase(scheme.doubled, dtype=torch.float16), **of_ranks}


def main(tier: str) -> None:
    cuda_view.as_cuda()
    results: Found = {"is_interpreted": cuda_view.is_interpreted()}
    run = run_fast if tier == "fast" else run_full
    plain = {
        name: {label: Plain(case) for label, case in cases_of(name, tier).items()}
        for name in SCHEMES
    }
    for name, of_scheme in plain.items():
        for each in of_scheme.values():
            each.make()
        results[name] = run(name, of_scheme)
    hook_ledger.install(hook_table.WEAVE_HOOKS)
    for name, of_scheme in plain.items():
        results[name]["woven"] = run_woven(tier, of_scheme)
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
