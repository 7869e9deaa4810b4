"""Woven layers against merged ones through SGLang's Triton MoE path; in one process.

    python -m tests.fast.moe_interpreted.woven_runs fast|full  ->  JSON, which test_woven.py judges

Plain layers are made before the weaving hooks are installed, so they are SGLang's own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from sgl_esft import hook_ledger
from sgl_esft.config import EXPERT_MEMORY_KINDS, EsftConfig, current_config
from sgl_esft.errors import EsftError
from sgl_esft.plugin import hook_table
from tests.fast.moe_interpreted import cuda_view, kernel_choice
from tests.fast.moe_interpreted.blocks import (
    MAX_ADAPTERS,
    MAX_EXPERTS,
    NUM_EXPERTS,
    TUNED,
    WIDTH,
    Case,
    Woven,
    compare,
)
from tests.fast.moe_interpreted.cases import BETWEEN, EXPERTS, FEW, MANY, MORE_EXPERTS, STYLES

BASE = -1
LAST = MAX_ADAPTERS - 1
ONE_RANK, SECOND_RANK = "one rank, float32", "EP2 rank 1, float32"
# Those that SGLang's unquantised layer knows on CUDA.
BACKENDS = ("triton", "flashinfer_cutlass", "flashinfer_trtllm", "deep_gemm", "triton_kernel")
Found = dict[str, str]


class Plain:
    """SGLang's own layers of a case: the base's, and one for each adapter merged in."""

    def __init__(self, case: Case) -> None:
        self.case = case
        adapters = {number: case.adapter(number) for number in range(len(TUNED))}
        self._blocks = {n: case.plain(a) for n, a in ({BASE: {}} | adapters).items()}
        self._outputs: dict[tuple[int, int, int | None], torch.Tensor] = {}

    def __call__(
        self, number: int, num_tokens: int = FEW, num_live: int | None = None
    ) -> torch.Tensor:
        """What the layer with that adapter gives for the case's batch of so many tokens."""
        key = (number, num_tokens, num_live)
        if key not in self._outputs:
            batch = self.case.batch(num_tokens)
            self._outputs[key] = self._blocks[number](*batch, num_live=num_live)
        return self._outputs[key]

    def run(self, number: int, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The same for any batch."""
        result: torch.Tensor = self._blocks[number](*batch)
        return result


def weave(memory: Any) -> None:
    """Layers that are made from now on are woven."""
    EsftConfig(MAX_ADAPTERS, MAX_EXPERTS, expert_memory=memory).export()
    current_config.cache_clear()


def woven_with_adapters(case: Case) -> Woven:
    """Adapters 0 to 2 side by side; the last has the last slot of all."""
    woven = Woven(case)
    for slot in range(MAX_ADAPTERS):
        woven.place(slot, slot)
    return woven


def compare_adapters(case: Case, plain: Plain) -> Found:
    batch = case.batch(FEW)
    woven = woven_with_adapters(case)

    def seen(slot: int, number: int) -> str:
        return compare(woven.run(batch, slot), plain(number))

    found = {f"adapter in slot {slot}": seen(slot, slot) for slot in range(MAX_ADAPTERS)}
    found["base"] = seen(BASE, BASE)
    found["each token its own"] = compare_mixed(woven, plain)
    woven.displace(1)
    woven.place(1, 3)
    woven.check()
    found["another adapter in slot 1"] = seen(1, 3)
    for slot in range(MAX_ADAPTERS):
        woven.displace(slot)
    found["base after unloading"] = seen(0, BASE)
    return found


def compare_mixed(woven: Woven, plain: Plain) -> str:
    """Every token of another adapter, the base among them."""
    slots = [token % (MAX_ADAPTERS + 1) - 1 for token in range(FEW)]
    expected = torch.stack([plain(slot)[token] for token, slot in enumerate(slots)])
    return compare(woven.run(plain.case.batch(FEW), slots), expected)


def compare_style(case: Case, plain: Plain) -> str:
    return compare(woven_with_adapters(case).run(case.batch(FEW), LAST), plain(LAST))


def one_rank_runs(case: Case, plain: Plain) -> dict[str, Any]:
    woven, many = woven_with_adapters(case), case.batch(MANY)
    hidden, logits = case.batch(FEW)
    logits[:, list(TUNED[LAST])] += 100  # every token goes to the adapter's experts
    only = woven.run((hidden, logits), LAST)
    return {
        "many tokens": compare(woven.run(many, LAST), plain(LAST, MANY)),
        "only the adapter's experts": compare(only, plain.run(LAST, (hidden, logits))),
        "last slot": int(woven.layer.expert_map.table.max()),
        "slots": woven.layer.layout.num_slots,
    }


def compare_sum(ranks: list[Plain], whole: Plain) -> str:
    """SGLang's own ranks, to which woven ones are compared, make up the layer."""
    total = sum(rank(LAST) for rank in ranks)
    assert isinstance(total, torch.Tensor)
    is_close = torch.allclose(total, whole(LAST), atol=1e-6, rtol=1e-6)
    return "close" if is_close else compare(total, whole(LAST))


def run_padded(case: Case, plain: Plain) -> dict[str, Any]:
    """A batch with rows that SGLang's router is told are padding: id -1, whatever they hold.

    SGLang's own layer gives them something where ranks share the experts; nobody reads it.
    """
    batch, num_live = case.batch(FEW), FEW - 2
    output = woven_with_adapters(case).run(batch, LAST, num_live=num_live)
    expected = plain(LAST, FEW, num_live)
    return {
        "live rows": compare(output[:num_live], expected[:num_live]),
        "padding rows": distinct(output[num_live:]),
    }


def distinct(values: torch.Tensor) -> list[str]:
    return sorted({str(value) for value in values.flatten().tolist()})


def stray_reads(case: Case) -> dict[str, bool]:
    """That a read of what is not there would show."""
    woven, batch = woven_with_adapters(case), case.batch(FEW)
    woven.displace(0)
    woven.layer.expert_map.table[0, 0] = woven.layer.layout.adapter_range(0).start
    return {"unmapped slot": bool(woven.run(batch, 0).isnan().any())}


def kernel_choices(case: Case, plain: Plain, folder: Path) -> dict[str, Any]:
    """What SGLang looks up and launches for a plain layer and for a woven one."""
    woven, batch = woven_with_adapters(case), case.batch(BETWEEN)
    runs: dict[str, Callable[[], torch.Tensor]] = {
        "plain": lambda: plain.run(LAST, batch),
        "woven": lambda: woven.run(batch, LAST),
    }
    return {
        when: {name: watch(run) for name, run in runs.items()}
        for when in choose_with_and_without_tuned(folder)
    }


def choose_with_and_without_tuned(folder: Path) -> Any:
    yield "default blocks"
    kernel_choice.write_tuned(folder, NUM_EXPERTS, WIDTH, "float32")
    os.environ["SGLANG_MOE_CONFIG_DIR"] = str(folder)
    yield "tuned blocks"
    del os.environ["SGLANG_MOE_CONFIG_DIR"]


def watch(run: Callable[[], torch.Tensor]) -> dict[str, Any]:
    with kernel_choice.watched() as seen:
        run()
    return {"lookups": sorted(set(seen.lookups)), "launches": seen.launches}


def order_of_rows(backend: str) -> str:
    """Whether an adapter's copy of a base expert is what SGLang's loader made of that expert."""
    case = Case(runner_backend=backend)
    try:
        woven = Woven(case)
    except (ImportError, NotImplementedError) as error:
        return f"not made here: {error}"
    except EsftError as error:
        return f"{type(error).__name__}: {error}"
    expert = TUNED[0][1]
    try:
        woven.layer.place(0, case.base.chosen(expert), (expert,))
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    slot = int(woven.layer.expert_map.table[0, expert])
    is_same = [torch.equal(w[slot], w[expert]) for w in (woven.layer.w13, woven.layer.w2)]
    return "equal" if all(is_same) else f"w13 equal: {is_same[0]}, w2 equal: {is_same[1]}"


def main(tier: str) -> None:
    cuda_view.as_cuda()
    experts = EXPERTS if tier == "fast" else {**EXPERTS, **MORE_EXPERTS}
    plain = {name: Plain(case) for name, case in experts.items()}
    styles = {name: Plain(case) for name, case in STYLES.items()}
    hook_ledger.install(hook_table.WEAVE_HOOKS)
    results: dict[str, Any] = {"is_interpreted": cuda_view.is_interpreted()}
    for memory in EXPERT_MEMORY_KINDS:
        weave(memory)
        results[memory] = {
            name: compare_adapters(case, plain[name])
            for name, case in experts.items()
            if tier == "full" or memory == "padded" or name == ONE_RANK
        }
    weave("padded")
    if tier == "fast":
        results |= other_runs(plain, styles)
    sys.stdout.write(json.dumps(results))


def other_runs(plain: dict[str, Plain], styles: dict[str, Plain]) -> dict[str, Any]:
    case, own = EXPERTS[ONE_RANK], plain[ONE_RANK]
    with TemporaryDirectory() as folder:
        choices = kernel_choices(case, own, Path(folder))
    return {
        "styles": {name: compare_style(c, styles[name]) for name, c in STYLES.items()},
        "one_rank": one_rank_runs(case, own),
        "padded_batch": {
            name: run_padded(EXPERTS[name], plain[name]) for name in (ONE_RANK, SECOND_RANK)
        },
        "EP2": compare_sum([plain[f"EP2 rank {rank}, float32"] for rank in range(2)], own),
        "stray_reads": stray_reads(case),
        "choices": choices,
        "orders": {backend: order_of_rows(backend) for backend in BACKENDS},
    }


if __name__ == "__main__":
    main(sys.argv[1])
