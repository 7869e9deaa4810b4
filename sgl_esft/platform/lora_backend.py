"""LoRA's matrices on the CPU reference platform: what SGLang's LoRA layers ask a backend for.

    LoRA manager --slot of each request--> [CpuLoraBackend.prepare_lora_batch] -> groups of rows
    LoRA layers  --x, A, B--> [run_*] -> base output + scaling * (x A^T) B^T, for each group's rows

SGLang's own torch backend asks for pinned memory, which needs an accelerator, and goes through a
batch by runs of requests; here each adapter's rows are taken together, wherever they lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from sglang.srt.lora.backend.base_backend import BaseLoRABackend
from sglang.srt.lora.backend.lora_registry import register_lora_backend
from sglang.srt.lora.utils import get_batch_token_counts

NAME = "torch_native"  # as SGLang calls the one that this stands for


@dataclass(frozen=True)
class AdapterRows:
    """The rows of a batch that are one adapter's."""

    slot: int
    rank: int
    scaling: float
    rows: slice | torch.Tensor  # of all tokens; ids [n] int64 where they do not lie together


@dataclass
class CpuLoraBatch:
    """Whose rows are whose, of one forward pass; SGLang's manager sets the two flags."""

    groups: tuple[AdapterRows, ...]
    has_active_lora: bool = False
    is_prefill: bool = False


class CpuLoraBackend(BaseLoRABackend):
    """SGLang's interface of LoRA kernels, less CUDA graphs, embeddings and MoE layers."""

    name = NAME

    def __init__(
        self, max_loras_per_batch: int, device: torch.device, server_args: Any = None
    ) -> None:
        super().__init__(max_loras_per_batch, device)

    def prepare_lora_batch(
        self,
        forward_batch: Any,
        weight_indices: Sequence[int],
        lora_ranks: Sequence[int],
        scalings: Sequence[float],
        use_cuda_graph: bool = False,
        use_prefill_cuda_graph: bool = False,
    ) -> None:
        """weight_indices: the slot of each request; lora_ranks, scalings: of each slot."""
        lengths = _lengths(forward_batch, len(weight_indices))
        self.batch_info = CpuLoraBatch(
            tuple(
                AdapterRows(slot, lora_ranks[slot], float(scalings[slot]), rows)
                for slot, rows in _rows_by_slot(weight_indices, lengths)
                if lora_ranks[slot]
            )
        )

    def run_lora_a_sgemm(
        self, x: torch.Tensor, weights: torch.Tensor, stack_num: int = 1, **_: Any
    ) -> torch.Tensor:
        """scaling * x A^T [num_tokens, parts * max_rank]; an adapter's parts lie packed.

        x [num_tokens, in]; weights [num_slots, parts * max_rank, in].
        """
        out = x.new_zeros((x.shape[0], weights.shape[1]))
        for group in self._groups():
            num_rows = stack_num * group.rank
            found = x[group.rows] @ weights[group.slot, :num_rows].T
            out[group.rows, :num_rows] = found * group.scaling
        return out

    def run_lora_b_sgemm(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        output_offset: torch.Tensor | None = None,
        output_offset_cpu: torch.Tensor | None = None,
        base_output: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """base_output [num_tokens, out], with every part's x B^T added in place.

        weights [num_slots, out, max_rank]; output_offset [parts + 1]: where parts begin and end.
        """
        found = output_offset_cpu if output_offset_cpu is not None else output_offset
        offsets = [0, weights.shape[1]] if found is None else found.tolist()
        out = x.new_zeros((x.shape[0], offsets[-1])) if base_output is None else base_output
        for group in self._groups():
            for part, (start, stop) in enumerate(pairwise(offsets)):
                inner = x[group.rows, part * group.rank : (part + 1) * group.rank]
                out[group.rows, start:stop] += (
                    inner @ weights[group.slot, start:stop, : group.rank].T
                )
        return out

    def run_qkv_lora(
        self,
        x: torch.Tensor,
        qkv_lora_a: torch.Tensor,
        qkv_lora_b: torch.Tensor,
        output_offset: torch.Tensor | None = None,
        output_offset_cpu: torch.Tensor | None = None,
        base_output: torch.Tensor | None = None,
        n_slices: int = 3,
        **_: Any,
    ) -> torch.Tensor:
        """Both steps of a layer whose parts have outputs of different sizes."""
        inner = self.run_lora_a_sgemm(x, qkv_lora_a, n_slices)
        return self.run_lora_b_sgemm(
            inner, qkv_lora_b, output_offset, output_offset_cpu, base_output
        )

    def run_gate_up_lora(
        self,
        x: torch.Tensor,
        gate_up_lora_a: torch.Tensor,
        gate_up_lora_b: torch.Tensor,
        output_offset: torch.Tensor | None = None,
        output_offset_cpu: torch.Tensor | None = None,
        base_output: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Both steps of a gate and an up projection."""
        return self.run_qkv_lora(
            x, gate_up_lora_a, gate_up_lora_b, output_offset, output_offset_cpu, base_output, 2
        )

    def _groups(self) -> tuple[AdapterRows, ...]:
        batch: Any = self.batch_info
        return () if batch is None else batch.groups


def _lengths(forward_batch: Any, num_requests: int) -> list[int]:
    """Tokens of each request."""
    if forward_batch.forward_mode.is_extend():
        return list(forward_batch.extend_seq_lens_cpu[:num_requests])
    total, most = get_batch_token_counts(forward_batch)
    return [most] * num_requests if total else [0] * num_requests


def _rows_by_slot(
    slots: Sequence[int], lengths: Sequence[int]
) -> Iterator[tuple[int, slice | torch.Tensor]]:
    """Each slot and its rows, by where each first occurs."""
    runs: dict[int, list[range]] = {}
    start = 0
    for slot, length in zip(slots, lengths, strict=True):
        of_slot = runs.setdefault(slot, [])
        if of_slot and of_slot[-1].stop == start:
            of_slot[-1] = range(of_slot[-1].start, start + length)
        elif length:
            of_slot.append(range(start, start + length))
        start += length
    for slot, of_slot in runs.items():
        if len(of_slot) == 1:
            yield slot, slice(of_slot[0].start, of_slot[0].stop)
        elif of_slot:
            yield slot, torch.tensor([row for run in of_slot for row in run])


def register() -> None:
    """In the place of SGLang's own torch backend."""
    register_lora_backend(NAME)(lambda: CpuLoraBackend)
