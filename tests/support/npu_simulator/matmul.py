"""Experts: grouped matmul, its activation, and the format of its weights.

Contracts: `schemas.py` names the documents. A group without rows does not read its weight, so the
weight of an expert that is not there may be memory that is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from tests.support.npu_simulator.contract import (
    BLOCK,
    FLOATS,
    FRACTAL_NZ,
    ND,
    absent,
    format_of,
    mark_nz,
    require,
    tensor,
    undefined_like,
)

MAX_GROUPS = 1024  # of one weight tensor
MAX_INNER = 65536


def grouped_matmul(
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    *,
    group_list: torch.Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    output_dtype: int | torch.dtype | None = None,
    **others: Any,
) -> list[torch.Tensor]:
    """x [[M, K]], weight [[G, K, N]] -> [[M, N]]: run of rows g times weight g.

    group_list [G] int64 has the rows' ends (type 0) or counts (type 1). Rows after the last run are
    not written. The weight may be a transposed view, and FRACTAL_NZ.
    """
    name = "npu_grouped_matmul"
    absent(name, **others)
    require(len(x) == len(weight) == 1, name, "one x and one weight tensor")
    (rows,), (experts,) = x, weight
    tensor(name, "x", rows, dtypes=FLOATS, dims=(2,), contiguous=True)
    _check_weight(name, rows, experts)
    require(split_item in (2, 3), name, f"split_item {split_item}, must be 2 or 3 here")
    require(group_type == 0, name, f"group_type {group_type}, must be 0 here")
    require(act_type == 0, name, f"act_type {act_type}, must be 0 without quantisation")
    _check_output(name, rows, output_dtype)
    counts = _counts(name, group_list, group_list_type, len(experts))
    require(sum(counts) <= len(rows), name, f"groups of {sum(counts)} rows, x has {len(rows)}")
    return [_multiply(rows, experts, counts)]


def _check_weight(name: str, rows: torch.Tensor, experts: torch.Tensor) -> None:
    require(experts.dtype is rows.dtype, name, f"weight is {experts.dtype}, x {rows.dtype}")
    require(experts.dim() == 3, name, f"weight has shape {tuple(experts.shape)}")
    plain = experts.is_contiguous() or experts.transpose(1, 2).is_contiguous()
    require(plain, name, f"weight has strides {experts.stride()}")
    require(experts.shape[1] == rows.shape[1], name, f"K {rows.shape[1]} and {experts.shape[1]}")
    inner = max(rows.shape[1], experts.shape[2])
    require(inner < MAX_INNER, name, f"{inner} columns")
    if rows.dtype is torch.float32:
        require(format_of(experts) == ND, name, "a float32 weight must be ND")


# c10's numbers of dtypes, which an `int?` argument of torch.ops gets for a torch.dtype.
_DTYPES = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16}


def _check_output(name: str, rows: torch.Tensor, wanted: int | torch.dtype | None) -> None:
    dtype = _DTYPES.get(wanted) if isinstance(wanted, int) else wanted
    require(
        wanted is None or dtype is rows.dtype,
        name,
        f"output_dtype {dtype or wanted} for x of {rows.dtype}",
    )


def _counts(
    name: str, group_list: torch.Tensor | None, list_type: int | None, num_groups: int
) -> list[int]:
    assert group_list is not None, "a group list is always given here"
    tensor(name, "group_list", group_list, dtypes=(torch.int64,), dims=(1,))
    length = len(group_list)
    require(length == num_groups, name, f"groupList {length} should be weight dim 0 {num_groups}")
    require(0 < length <= MAX_GROUPS, name, f"{length} groups, at most {MAX_GROUPS}")
    require(list_type in (0, 1), name, f"group_list_type {list_type}: 0 or 1 here")
    ends = group_list if list_type == 0 else group_list.cumsum(0)
    counts = ends.diff(prepend=ends.new_zeros(1))
    require((counts >= 0).all(), name, f"group_list {group_list.tolist()}")
    return [int(count) for count in counts]


def _multiply(rows: torch.Tensor, experts: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """In float64, so that a row's result does not depend on the rows beside it."""
    out = undefined_like(rows, len(rows), experts.shape[2])
    is_nz = format_of(experts) == FRACTAL_NZ
    start = 0
    for group, count in enumerate(counts):
        if count:
            weight = _rows_and_columns(experts[group]) if is_nz else experts[group]
            product = rows[start : start + count].double() @ weight.double()
            out[start : start + count] = product.to(rows.dtype)
        start += count
    return out


def swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """silu(first half) * second half, along the last dimension."""
    name = "npu_swiglu"
    tensor(name, "input", input, dtypes=FLOATS, dims=range(1, 9), contiguous=True)
    require(input.numel(), name, "an empty input is not supported")
    require(dim in (-1, input.dim() - 1), name, f"dim {dim} is not simulated")
    require(input.shape[-1] % 2 == 0, name, f"{input.shape[-1]} columns cannot be halved")
    gate, up = input.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(input.dtype)


def format_cast(
    input: torch.Tensor,
    acl_format: int,
    *,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> torch.Tensor:
    """A new tensor in that format: all of `input` is read, and it lies elsewhere."""
    name = "npu_format_cast"
    absent(name, customize_dtype=customize_dtype, input_dtype=input_dtype)
    require(acl_format in (ND, FRACTAL_NZ), name, f"acl_format {acl_format} is not simulated")
    require(format_of(input) == ND, name, "a cast from FRACTAL_NZ is not simulated")
    if acl_format == ND:
        return input
    require(input.is_contiguous() and input.dim() >= 2, name, "a contiguous matrix or batch")
    rows, columns = input.shape[-2:]
    width = 2 * BLOCK // input.element_size()
    require(rows % BLOCK == 0 == columns % width, name, f"[{rows}, {columns}] is not whole blocks")
    blocks = input.view(-1, rows // BLOCK, BLOCK, columns // width, width)
    moved = blocks.permute(0, 3, 1, 2, 4).clone(memory_format=torch.contiguous_format)
    return mark_nz(moved.view(input.shape))


def _rows_and_columns(weight: torch.Tensor) -> torch.Tensor:
    """One FRACTAL_NZ matrix, or a transposed view of one, as ND."""
    if not weight.is_contiguous():
        return _rows_and_columns(weight.t()).t()
    rows, columns = weight.shape
    width = 2 * BLOCK // weight.element_size()
    blocks = weight.view(columns // width, rows // BLOCK, BLOCK, width)
    return blocks.permute(1, 2, 0, 3).reshape(rows, columns)
