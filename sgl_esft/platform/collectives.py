"""Collectives of the CPU reference platform, by gloo through torch.distributed.

They stand in for methods of SGLang's GroupCoordinator whose own versions want
pynccl or a CUDA-only operator. `group` is that coordinator: it knows
`world_size`, `rank_in_group` and `device_group`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from sgl_esft.errors import InvariantError


def all_gather_into_tensor(group: Any, output: torch.Tensor, input: torch.Tensor) -> None:
    """output [world * n, ...] becomes the ranks' inputs [n, ...], in rank order."""
    dist.all_gather_into_tensor(output, input.contiguous(), group=group.device_group)


def reduce_scatter_tensor(group: Any, output: torch.Tensor, input: torch.Tensor) -> None:
    """output [n, ...] becomes this rank's chunk of the sum of the inputs [world * n, ...].

    Gloo sums by all-reduce; the input is left alone.
    """
    total = input.clone()
    dist.all_reduce(total, group=group.device_group)
    output.copy_(total.view(group.world_size, *output.shape)[group.rank_in_group])


def reduce_scatterv(
    group: Any,
    input_: torch.Tensor,
    output: torch.Tensor | None = None,
    sizes: list[int] | None = None,
) -> torch.Tensor:
    """This rank's rows of the sum; rank r owns the r-th run of `sizes` rows (default: equal)."""
    sizes = sizes or [input_.shape[0] // group.world_size] * group.world_size
    total = input_.clone()
    dist.all_reduce(total, group=group.device_group)
    chunk = total.split(sizes)[group.rank_in_group]
    return chunk.clone() if output is None else output.copy_(chunk)


def all_gatherv(
    group: Any,
    input_: torch.Tensor | list[torch.Tensor],
    sizes: list[int] | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """The ranks' rows one after another; rank r contributes sizes[r] rows (default: equal).

    Returns a list, one tensor for each input, as SGLang's own does.
    """
    inputs = [input_] if isinstance(input_, torch.Tensor) else input_
    gathered = [_gather_rows(group, tensor, sizes) for tensor in inputs]
    if output is not None:
        output.copy_(gathered[0])
        return [output]
    return gathered


def _gather_rows(group: Any, rows: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
    sizes = sizes or [rows.shape[0]] * group.world_size
    if rows.shape[0] != sizes[group.rank_in_group]:
        raise InvariantError(
            f"rank {group.rank_in_group} gathers {rows.shape[0]} rows, announced are {sizes}"
        )
    padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    parts = padded.new_empty((group.world_size, *padded.shape))
    dist.all_gather_into_tensor(parts.flatten(0, 1), padded, group=group.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
