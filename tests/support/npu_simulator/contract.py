"""What every simulated operator checks with: tensors, their formats, and the refusal.

    operator -> [require, tensor, ...] -> ContractError, naming the operator, the rule and the value

A tensor's format belongs to its storage, as on an NPU: `npu_format_cast` gives a new storage, whose
bytes lie in blocks. Who reads those as rows and columns reads other numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

ND, FRACTAL_NZ = 2, 29  # aclFormat's numbers
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
BLOCK = 16  # rows of a block; its columns are 32 bytes


class ContractError(Exception):
    """A call that the vendor's documents do not allow, or say nothing about."""


# Storage -> its format, where that is not ND. Kept alive, so that no other gets its address.
_formats: dict[int, tuple[int, torch.UntypedStorage]] = {}


def require(rule: object, operator: str, text: str) -> None:
    """Raises ContractError unless `rule` holds."""
    if not rule:
        raise ContractError(f"{operator}: {text}")


def tensor(
    operator: str,
    name: str,
    value: torch.Tensor,
    *,
    dtypes: Iterable[torch.dtype],
    dims: Iterable[int],
    contiguous: bool = False,
) -> None:
    """An ND input with these dtypes and numbers of dimensions."""
    require(value.dtype in tuple(dtypes), operator, f"{name} is {value.dtype}")
    require(value.dim() in tuple(dims), operator, f"{name} has shape {tuple(value.shape)}")
    require(format_of(value) == ND, operator, f"{name} has an internal format")
    if contiguous:
        require(value.is_contiguous(), operator, f"{name} is not contiguous")


def absent(operator: str, **values: Any) -> None:
    """Arguments that a path never gives; what they would do is not simulated."""
    given = [name for name, value in values.items() if value is not None]
    require(not given, operator, f"{', '.join(given)} given, which is not simulated")


def format_of(value: torch.Tensor) -> int:
    """ND or FRACTAL_NZ."""
    return _formats.get(value.untyped_storage().data_ptr(), (ND, None))[0]


def mark_nz(value: torch.Tensor) -> torch.Tensor:
    """The tensor, whose storage is FRACTAL_NZ from now on."""
    storage = value.untyped_storage()
    _formats[storage.data_ptr()] = (FRACTAL_NZ, storage)
    return value


def undefined_like(value: torch.Tensor, *shape: int) -> torch.Tensor:
    """A floating-point output nobody has written yet: NaN."""
    return torch.full(shape, float("nan"), dtype=value.dtype)
