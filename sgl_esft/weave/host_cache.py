"""Adapters in host memory, cut to what this rank will need of them.

manifest.py (validated folder) -> [host cache] -> moe_layer.py (device slots)

Read in pieces, straight into memory of our own: a rank reads beside its steps, and neither a file
that is cut short nor one that is slow may stop them. Each piece is checked while it is in the
processor's cache: a NaN would end the rank's sampler, and with it every request.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sgl_esft.errors import AdapterFormatError, InvariantError
from sgl_esft.formats.finite import PIECE_BYTES, FiniteCheck, not_finite
from sgl_esft.formats.manifest import AdapterManifest
from sgl_esft.formats.model_spec import DTYPE_BYTES, ExpertTensorKey, Proj
from sgl_esft.formats.safetensors_header import SafetensorsHeader, read_header
from sgl_esft.formats.strict_json import open_regular
from sgl_esft.weave.moe_layer import ExpertShard, ExpertWeights

# Called after each piece with its bytes; what it raises ends the reading. Between two pieces, some
# tens of microseconds, a reader yields to the rank's steps.
OnRead = Callable[[int], None]


@dataclass(frozen=True)
class HostAdapter:
    """One adapter's experts that live on this rank."""

    name: str
    manifest: AdapterManifest
    # layer id -> expert id -> weights, or where experts are in tiers their places in files
    experts: Mapping[int, Mapping[int, Any]]

    @property
    def num_bytes(self) -> int:
        """In host memory: places take none."""
        every = (w for layer in self.experts.values() for w in layer.values())
        return sum(w.num_bytes for w in every if isinstance(w, ExpertWeights))


def read_adapter(
    name: str,
    manifest: AdapterManifest,
    shards: Mapping[int, ExpertShard],
    *,
    on_read: OnRead = lambda num_bytes: None,
    pin_memory: bool = False,
) -> HostAdapter:
    """Read a validated adapter's experts for the layers and shards of this rank.

    shards: layer id -> what this rank holds of that layer. pin_memory: for copies to an
    accelerator. Raises AdapterNotFiniteError, and AdapterFormatError when a file changed or broke
    after it was validated.
    """
    with ExitStack() as stack:
        files = _ExpertFiles(name, manifest, on_read, stack, pin_memory=pin_memory)
        experts = {
            layer_id: {
                expert_id: _read_expert(files, layer_id, expert_id, shards[layer_id])
                for expert_id in expert_ids
                if expert_id in shards[layer_id].expert_ids
            }
            for layer_id, expert_ids in manifest.experts.items()
        }
    return HostAdapter(name, manifest, experts)


def num_bytes_to_read(manifest: AdapterManifest, shards: Mapping[int, ExpertShard]) -> int:
    """What `on_read` of `read_adapter` will have been told in the end."""
    num_bytes = 0
    for (layer_id, expert_id, proj), location in manifest.tensors.items():
        shard = shards[layer_id]
        if expert_id in shard.expert_ids:
            rows, columns = location.shape
            if proj != "down":
                rows = len(shard.intermediate)
            num_bytes += rows * columns * DTYPE_BYTES[manifest.dtype]
    return num_bytes


def _read_expert(
    files: _ExpertFiles, layer_id: int, expert_id: int, shard: ExpertShard
) -> ExpertWeights:
    rows = shard.intermediate
    hidden_size = files.shape_of(layer_id, expert_id, "gate")[1]
    w13 = files.empty(2 * len(rows), hidden_size)
    files.read_rows(layer_id, expert_id, "gate", rows, w13[: len(rows)])
    files.read_rows(layer_id, expert_id, "up", rows, w13[len(rows) :])
    height, width = files.shape_of(layer_id, expert_id, "down")
    w2 = files.empty(height, len(rows))
    # A tensor parallel rank's columns lie apart in the file.
    whole = w2 if len(rows) == width else torch.empty((height, width), dtype=w2.dtype)
    files.read_rows(layer_id, expert_id, "down", range(height), whole)
    if whole is not w2:
        w2.copy_(whole[:, rows.start : rows.stop])
    return ExpertWeights(w13=w13, w2=w2)


class _ExpertFiles:
    """The open files of one adapter, read by ranges of rows."""

    def __init__(
        self,
        name: str,
        manifest: AdapterManifest,
        on_read: OnRead,
        stack: ExitStack,
        *,
        pin_memory: bool,
    ) -> None:
        """stack: closes them."""
        self._name = name
        self._manifest = manifest
        self._check = FiniteCheck(manifest.dtype)
        self._on_read = on_read
        self._pin_memory = pin_memory
        self._dtype: torch.dtype = getattr(torch, manifest.dtype)
        self._files: dict[Path, tuple[int, SafetensorsHeader]] = {}
        self._stack = stack

    def empty(self, num_rows: int, num_columns: int) -> torch.Tensor:
        """Host memory for experts, page-locked where the device copies from it."""
        return torch.empty((num_rows, num_columns), dtype=self._dtype, pin_memory=self._pin_memory)

    def shape_of(self, layer_id: int, expert_id: int, proj: Proj) -> tuple[int, int]:
        return self._manifest.tensors[layer_id, expert_id, proj].shape

    def read_rows(
        self, layer_id: int, expert_id: int, proj: Proj, rows: range, out: torch.Tensor
    ) -> None:
        """`out` [len(rows), columns], contiguous, becomes these rows of the tensor.

        Raises AdapterFormatError if the file changed since it was validated, AdapterNotFiniteError.
        """
        location = self._manifest.tensors[layer_id, expert_id, proj]
        fd, header = self._open(location.file)
        info = header.tensors.get(location.name)
        if info is None or info.shape != location.shape or info.dtype != self._manifest.dtype:
            raise AdapterFormatError(
                f"tensor {location.name} changed since it was validated: it is now "
                f"{'gone' if info is None else f'{info.dtype} {list(info.shape)}'}."
            )
        row_bytes = location.shape[1] * out.element_size()
        if not 0 <= rows.start <= rows.stop <= location.shape[0] or out.nbytes != (
            len(rows) * row_bytes
        ):
            raise InvariantError(
                f"asked for rows {rows} of a {list(location.shape)} tensor into {out.nbytes} bytes"
            )
        offset = info.start + rows.start * row_bytes
        self._read(fd, location.file, offset, out, (layer_id, expert_id, proj))

    def _read(
        self, fd: int, path: Path, offset: int, out: torch.Tensor, key: ExpertTensorKey
    ) -> None:
        buffer = memoryview(out.view(-1).view(torch.uint8).numpy().data)
        position = num_checked = 0
        while position < len(buffer):
            piece = buffer[position : position + PIECE_BYTES]
            try:
                num_read = os.preadv(fd, [piece], offset + position)
            except OSError as error:
                raise AdapterFormatError(f"{path.name} cannot be read: {error}.") from error
            if not num_read:
                raise AdapterFormatError(f"{path.name} was cut short since it was validated.")
            position += num_read
            num_whole = position - position % self._check.item_bytes
            if not self._check.holds(buffer[num_checked:num_whole]):
                raise not_finite(self._name, key)
            num_checked = num_whole
            self._on_read(num_read)

    def _open(self, path: Path) -> tuple[int, SafetensorsHeader]:
        if path not in self._files:
            header = read_header(path)
            file = self._stack.enter_context(open_regular(path, AdapterFormatError))
            self._files[path] = (file.fileno(), header)
        return self._files[path]
