"""LoRA's matrices on the CPU: what each layer of SGLang's asks, against W + scaling * B A."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

MAX_RANK, RANKS, SCALINGS = 4, (0, 2, 4), (0.0, 0.5, 2.0)  # of each slot; the first is the base's
IN = 6


def backend_for(slots: Sequence[int], lengths: Sequence[int] | None = None) -> Any:
    """A backend that was told of a batch: the slot of each request, and its tokens."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from sgl_esft.platform.lora_backend import CpuLoraBackend

    backend = CpuLoraBackend(len(RANKS), torch.device("cpu"))
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE if lengths is None else ForwardMode.EXTEND,
        extend_seq_lens_cpu=lengths,
        batch_size=len(slots),
    )
    backend.prepare_lora_batch(batch, slots, list(RANKS), list(SCALINGS))
    return backend


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pool(outs: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, list[list[torch.Tensor]]]:
    """A [slots, parts * rank, in] and B [slots, out, rank] as SGLang packs them, and B @ A.

    What lies beyond an adapter's rank is what an earlier adapter left there.
    """
    a = draw(len(RANKS), len(outs) * MAX_RANK, IN, seed=1)
    b = draw(len(RANKS), sum(outs), MAX_RANK, seed=2)
    changes = []
    for slot, rank in enumerate(RANKS):
        starts = [sum(outs[:part]) for part in range(len(outs))]
        changes.append(
            [
                SCALINGS[slot]
                * b[slot, start : start + out, :rank]
                @ a[slot, part * rank : (part + 1) * rank]
                for part, (start, out) in enumerate(zip(starts, outs, strict=True))
            ]
        )
    return a, b, changes


def offsets(outs: Sequence[int]) -> torch.Tensor:
    return torch.tensor([sum(outs[:part]) for part in range(len(outs) + 1)])


CASES = [
    ([1, 0, 2, 1, 2], None),  # decode: each slot's rows lie apart
    ([2], [5]),
    ([0, 1, 2, 1], [2, 3, 1, 4]),
    ([0, 0], [3, 1]),
    ([1, 2], [0, 3]),
]


@pytest.mark.parametrize("outs", [[5], [3, 2, 4], [4, 4]])
@pytest.mark.parametrize(("slots", "lengths"), CASES)
def test_each_token_meets_its_adapters_matrices(
    outs: list[int], slots: list[int], lengths: list[int] | None
) -> None:
    backend = backend_for(slots, lengths)
    a, b, changes = pool(outs)
    of_token = [
        s for s, n in zip(slots, lengths or [1] * len(slots), strict=True) for _ in range(n)
    ]
    x, base = draw(len(of_token), IN, seed=3), draw(len(of_token), sum(outs), seed=4)
    expected = torch.stack(
        [
            base[row] + torch.cat([change @ x[row] for change in changes[slot]])
            for row, slot in enumerate(of_token)
        ]
    )
    places = {"output_offset": offsets(outs), "output_offset_cpu": offsets(outs)}
    if len(outs) == 1:
        inner = backend.run_lora_a_sgemm(x, a)
        found = backend.run_lora_b_sgemm(inner, b, base_output=base.clone(), **places)
    elif len(outs) == 2:
        found = backend.run_gate_up_lora(x, a, b, base_output=base.clone(), **places)
    else:
        found = backend.run_qkv_lora(x, a, b, base_output=base.clone(), n_slices=3, **places)
    torch.testing.assert_close(found, expected)
    untouched = [row for row, slot in enumerate(of_token) if slot == 0]
    assert torch.equal(found[untouched], base[untouched]), "the base's rows are the base's bits"


def test_without_a_batch_nothing_is_added() -> None:
    backend = backend_for([1])
    backend.reset_batch_state()
    a, b, _ = pool([5])
    base = draw(2, 5, seed=4)
    assert not backend.run_lora_a_sgemm(draw(2, IN, seed=3), a).any()
    found = backend.run_lora_b_sgemm(torch.zeros(2, MAX_RANK), b.float(), base_output=base.clone())
    assert torch.equal(found, base)


@pytest.mark.parametrize(("slots", "lengths"), CASES)
def test_absorbed_mla_is_kv_b_proj_with_the_change(
    slots: list[int], lengths: list[int] | None
) -> None:
    from sgl_esft.platform import lora_hooks

    heads, nope, value = 2, 3, 4
    backend = backend_for(slots, lengths)
    a, b, changes = pool([heads * (nope + value)])
    of_token = [
        s for s, n in zip(slots, lengths or [1] * len(slots), strict=True) for _ in range(n)
    ]
    module = SimpleNamespace(
        kv_b_proj=SimpleNamespace(A_buffer=a, B_buffer=b, lora_backend=backend),
        qk_nope_head_dim=nope,
        v_head_dim=value,
        num_local_heads=heads,
    )
    q, out = draw(len(of_token), heads, nope, seed=5), draw(len(of_token), heads, IN, seed=6)
    seen, flat = draw(len(of_token), heads, IN, seed=7), draw(len(of_token), heads * value, seed=8)
    by_head = [change[0].view(heads, nope + value, IN) for change in changes]
    expected_q = torch.stack(
        [
            out[row] + torch.einsum("hn,hni->hi", q[row], by_head[slot][:, :nope])
            for row, slot in enumerate(of_token)
        ]
    )
    expected_v = torch.stack(
        [
            flat[row] + torch.einsum("hi,hvi->hv", seen[row], by_head[slot][:, nope:]).flatten()
            for row, slot in enumerate(of_token)
        ]
    )
    # As SGLang calls it: the product was made with the heads in front.
    view = out.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(lora_hooks.apply_q_correction(module, q, view), expected_q)
    torch.testing.assert_close(
        lora_hooks.apply_v_correction(module, seen, flat.clone()), expected_v
    )


def test_nothing_is_pinned_while_it_is_entered() -> None:
    from sgl_esft.platform.lora_hooks import Unpinned

    with Unpinned():
        found = torch.tensor([1, 2], pin_memory=True).pin_memory()
    assert found.tolist() == [1, 2]
    with pytest.raises(RuntimeError):
        torch.zeros(1).pin_memory()
