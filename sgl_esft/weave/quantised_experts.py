"""A quantised expert as SGLang's loader would lay it out in a slot.

    parts of gate, up, down --[lay_out]--> ExpertWeights of one rank -> moe_layer.py

Pure: values in, values out. A rank of tensor parallelism takes rows of gate and up and columns of
down, of numbers and of scales alike, where a scale is of those rows or columns alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch

from sgl_esft.errors import AdapterMismatchError, InvariantError
from sgl_esft.formats.expert_scheme import ExpertScheme, SchemeName
from sgl_esft.formats.model_spec import Proj
from sgl_esft.quant.rounding import Parts
from sgl_esft.weave.moe_layer import ExpertWeights

_PAIR: Final = 2  # int4 values in a byte


def lay_out(parts: Mapping[Proj, Parts], scheme: ExpertScheme, rows: range) -> ExpertWeights:
    """One expert, whole, cut to `rows` of its width I, in memory of no more than that.

    Raises AdapterMismatchError for gate and up with two scales where SGLang keeps one, and
    InvariantError where `rows` cut through what shares a scale: SGLang loads no such base.
    """
    return _LAYOUTS[scheme.name](parts, scheme, rows)


def _by_rows(parts: Mapping[Proj, Parts], scheme: ExpertScheme, rows: range) -> ExpertWeights:
    """int8: a scale for each row, so down's are those of its whole rows."""
    scales = [_cut(parts[proj]["weight_scale"], rows) for proj in ("gate", "up")]
    return ExpertWeights(*_numbers(parts, rows), torch.cat(scales), parts["down"]["weight_scale"])


def _by_blocks(parts: Mapping[Proj, Parts], scheme: ExpertScheme, rows: range) -> ExpertWeights:
    blocks = _divided(rows, scheme.rows)
    first, second = (_cut(parts[proj]["weight_scale_inv"], blocks) for proj in ("gate", "up"))
    down = _columns(parts["down"]["weight_scale_inv"], blocks)
    return ExpertWeights(*_numbers(parts, rows), torch.cat([first, second]), down)


def _by_tensors(parts: Mapping[Proj, Parts], scheme: ExpertScheme, rows: range) -> ExpertWeights:
    gate, up, down = (parts[proj]["weight_scale"] for proj in ("gate", "up", "down"))
    if not torch.equal(gate, up):
        raise AdapterMismatchError(
            f"the gate and up projections of an expert have two scales, {float(gate)} and "
            f"{float(up)}, and SGLang keeps one: quantise them with one scale"
        )
    return ExpertWeights(*_numbers(parts, rows), gate, down)


def _by_groups(parts: Mapping[Proj, Parts], scheme: ExpertScheme, rows: range) -> ExpertWeights:
    """int4: gate's and up's groups lie along H, which is whole; down's along I, which is cut."""
    bytes_of = {proj: _transposed(parts[proj]["qweight"]) for proj in parts}
    hidden = bytes_of["down"].shape[0]
    # As MoeWNA16Method does: a group that the rank's part does not hold whole becomes several.
    group = scheme.columns
    while len(rows) % group or hidden % group:
        group //= 2
    num_parts = scheme.columns // group
    scales = {proj: parts[proj]["scales"].t().repeat_interleave(num_parts, dim=1) for proj in parts}
    columns, groups = _divided(rows, _PAIR), _divided(rows, group)
    return ExpertWeights(
        torch.cat([_cut(bytes_of[proj], rows) for proj in ("gate", "up")]),
        _columns(bytes_of["down"], columns),
        torch.cat([_cut(scales[proj], rows) for proj in ("gate", "up")]),
        _columns(scales["down"], groups),
    )


_Layout = Callable[[Mapping[Proj, Parts], ExpertScheme, range], ExpertWeights]
_LAYOUTS: Final[Mapping[SchemeName, _Layout]] = {
    "int8": _by_rows,
    "fp8": _by_blocks,
    "fp8-tensor": _by_tensors,
    "int4": _by_groups,
}


def _numbers(parts: Mapping[Proj, Parts], rows: range) -> tuple[torch.Tensor, torch.Tensor]:
    """w13 and w2 of numbers that a checkpoint has [out, in], one to an item."""
    w13 = torch.cat([_cut(parts[proj]["weight"], rows) for proj in ("gate", "up")])
    return w13, _columns(parts["down"]["weight"], rows)


def _transposed(words: torch.Tensor) -> torch.Tensor:
    """int32 [in / 8, out] -> uint8 [out, in / 2]: the lower of two values first, in a byte."""
    return words.t().contiguous().view(torch.uint8)


def _cut(tensor: torch.Tensor, rows: range) -> torch.Tensor:
    return tensor[rows.start : rows.stop]


def _columns(tensor: torch.Tensor, columns: range) -> torch.Tensor:
    """All of the tensor, or a copy: a view would keep all of it in memory."""
    is_whole = len(columns) == tensor.shape[1]
    return tensor if is_whole else tensor[:, columns.start : columns.stop].clone()


def _divided(rows: range, size: int) -> range:
    if rows.start % size or rows.stop % size:
        raise InvariantError(f"rows {rows} of an expert cut through a block of {size}")
    return range(rows.start // size, rows.stop // size)
