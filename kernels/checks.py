"""Checks at the boundary of an operator: shape, dtype, device, each with the tensor's name."""

from __future__ import annotations

import torch


def check_tensor(
    tensor: torch.Tensor,
    name: str,
    *,
    ndim: int,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Raises ValueError naming `name`, what it is and what it must be."""
    if tensor.ndim != ndim:
        raise ValueError(f"{name} has {tensor.ndim} dimensions, must have {ndim}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}, must be one of {dtypes}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, must be on {device}")
