"""Adapters in host memory, cut to what this rank will need of them.

manifest.py (validated folder) -> [host cache] -> moe_layer.py (device slots)
                 quantised over a quantised base: quant/adapter_cache.py, which makes a copy once

Read in pieces, straight into memory of our own: a rank reads beside its steps, and neither a file
that is cut short nor one that is slow may stop them. Each piece is checked while it is in the
processor's cache: a NaN would end the rank's sampler, and with it every request.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from sgl_esft.config import EsftConfig
from sgl_esft.errors import AdapterFormatError, InvariantError
from sgl_esft.formats.finite import PIECE_BYTES, FiniteCheck, not_finite
from sgl_esft.formats.manifest import (
    AdapterManifest,
    TensorLocation,
    content_digest,
    refused_shared,
)
from sgl_esft.formats.model_spec import PROJS, ExpertTensorKey, MoeSpec, Proj, SharedTensorKey
from sgl_esft.formats.safetensors_header import ITEM_BYTES, SafetensorsHeader, read_header
from sgl_esft.formats.strict_json import open_regular
from sgl_esft.quant.adapter_cache import bytes_to_quantise, quantised_copy
from sgl_esft.quant.rounding import Parts
from sgl_esft.weave.moe_layer import ExpertShard, ExpertWeights
from sgl_esft.weave.quantised_experts import lay_out

# Called after each piece with its bytes; what it raises ends the reading. Between two pieces, some
# tens of microseconds, a reader yields to the rank's steps.
OnRead = Callable[[int], None]

NO_SHARED: Final[Mapping[int, range]] = {}

_Key: TypeAlias = ExpertTensorKey | SharedTensorKey


@dataclass(frozen=True)
class HostAdapter:
    """One adapter's experts that live on this rank."""

    name: str
    manifest: AdapterManifest
    # layer id -> expert id -> weights, or where experts are in tiers their places in files
    experts: Mapping[int, Mapping[int, Any]]
    stored: Any = None  # where experts are in tiers: what `AdapterFiles.prepare` found
    # layer id -> weights of its shared experts, as one expert's that is as wide as all of them
    shared: Mapping[int, ExpertWeights] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """In host memory: places take none."""
        routed = (w for layer in self.experts.values() for w in layer.values())
        every = (*routed, *self.shared.values())
        return sum(w.num_bytes for w in every if isinstance(w, ExpertWeights))


def read_for_base(
    name: str,
    manifest: AdapterManifest,
    spec: MoeSpec,
    shards: Mapping[int, ExpertShard],
    config: EsftConfig,
    on_size: Callable[[int], None],
    on_read: OnRead,
    *,
    shared: Mapping[int, range] = NO_SHARED,
    pin_memory: bool = False,
) -> HostAdapter:
    """As `read_adapter`, quantised as the base is; on_size is told what on_read will be told of.

    Where that is to be done, the adapter's copy is made first, by the first process that needs it.
    Raises as `quantised_copy` does, too.
    """
    if spec.scheme is None or manifest.scheme is not None:
        on_size(num_bytes_to_read(manifest, shards, shared))
        return read_adapter(
            name, manifest, shards, shared=shared, on_read=on_read, pin_memory=pin_memory
        )
    cache_dir, max_bytes = config.quantised_adapters_path, config.quantised_adapters_bytes
    digest = content_digest(manifest.path, lambda: on_read(0))
    num_own = sum(
        expert_id in shards[layer_id].expert_ids
        for layer_id, expert_ids in manifest.experts.items()
        for expert_id in expert_ids
    )
    to_quantise = bytes_to_quantise(manifest, spec, digest, cache_dir)
    on_size(to_quantise + num_own * spec.expert_bytes)
    with quantised_copy(manifest, spec, digest, cache_dir, on_read, max_bytes=max_bytes) as copy:
        found = read_adapter(name, copy, shards, on_read=on_read, pin_memory=pin_memory)
    return replace(found, manifest=manifest)


def read_adapter(
    name: str,
    manifest: AdapterManifest,
    shards: Mapping[int, ExpertShard],
    *,
    shared: Mapping[int, range] = NO_SHARED,
    on_read: OnRead = lambda num_bytes: None,
    pin_memory: bool = False,
) -> HostAdapter:
    """Read a validated adapter's experts for the layers and shards of this rank.

    shards: layer id -> what this rank holds of that layer; shared: the same of the rows of its
    shared experts' width. pin_memory: for copies to an accelerator. Raises AdapterNotFiniteError,
    AdapterFormatError when a file changed or broke after it was validated, and
    UnsupportedAdapterError for shared experts of a layer that is not in `shared`.
    """
    if not shared.keys() >= set(manifest.shared_layers):
        raise refused_shared(name, "here: serve it merged")
    with ExitStack() as stack:
        files = _ExpertFiles(name, manifest, on_read, stack, pin_memory=pin_memory)
        read = _read_expert if manifest.scheme is None else _read_quantised
        experts = {
            layer_id: {
                expert_id: read(files, layer_id, expert_id, shards[layer_id])
                for expert_id in expert_ids
                if expert_id in shards[layer_id].expert_ids
            }
            for layer_id, expert_ids in manifest.experts.items()
        }
        tuned_shared = {
            layer_id: _read_projections(
                files, {proj: (layer_id, proj) for proj in PROJS}, shared[layer_id]
            )
            for layer_id in manifest.shared_layers
        }
    return HostAdapter(name, manifest, experts, shared=tuned_shared)


def num_bytes_to_read(
    manifest: AdapterManifest,
    shards: Mapping[int, ExpertShard],
    shared: Mapping[int, range] = NO_SHARED,
) -> int:
    """What `on_read` of `read_adapter` will have been told in the end."""
    num_bytes = 0
    for (layer_id, proj), location in manifest.shared.items():
        num_rows = location.shape[0] if proj == "down" else len(shared.get(layer_id, ()))
        num_bytes += num_rows * location.shape[1] * ITEM_BYTES[location.dtype]
    for key, location in (*manifest.tensors.items(), *manifest.scales.items()):
        layer_id, expert_id, proj = key
        if expert_id not in shards[layer_id].expert_ids:
            continue
        num_items = math.prod(location.shape)
        if proj != "down" and manifest.scheme is None:  # what is quantised is read whole
            num_items = len(shards[layer_id].intermediate) * location.shape[1]
        num_bytes += num_items * ITEM_BYTES[location.dtype]
    return num_bytes


def _read_expert(
    files: _ExpertFiles, layer_id: int, expert_id: int, shard: ExpertShard
) -> ExpertWeights:
    keys: dict[Proj, _Key] = {proj: (layer_id, expert_id, proj) for proj in PROJS}
    return _read_projections(files, keys, shard.intermediate)


def _read_projections(files: _ExpertFiles, keys: Mapping[Proj, _Key], rows: range) -> ExpertWeights:
    """`rows`: of the width of an MLP, as this rank holds them."""
    gate, up, down = (files.location(keys[proj]) for proj in PROJS)
    w13 = files.empty(gate.dtype, 2 * len(rows), gate.shape[1])
    files.read_rows(keys["gate"], gate, rows, w13[: len(rows)])
    files.read_rows(keys["up"], up, rows, w13[len(rows) :])
    height, width = down.shape
    w2 = files.empty(down.dtype, height, len(rows))
    # A tensor parallel rank's columns lie apart in the file.
    whole = w2 if len(rows) == width else torch.empty((height, width), dtype=w2.dtype)
    files.read_rows(keys["down"], down, range(height), whole)
    if whole is not w2:
        w2.copy_(whole[:, rows.start : rows.stop])
    return ExpertWeights(w13=w13, w2=w2)


def _read_quantised(
    files: _ExpertFiles, layer_id: int, expert_id: int, shard: ExpertShard
) -> ExpertWeights:
    """Whole projections: of int4 a row lies across all of them."""
    scheme = files.manifest.scheme
    if scheme is None:
        raise InvariantError("an adapter without a scheme was to be read as quantised")
    parts: dict[Proj, Parts] = {p: files.read_parts((layer_id, expert_id, p)) for p in PROJS}
    return files.pinned(lay_out(parts, scheme, shard.intermediate))


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
        self.manifest = manifest
        self._checks = {
            location.dtype: FiniteCheck(location.dtype)
            for locations in (manifest.tensors, manifest.scales, manifest.shared)
            for location in locations.values()
        }
        self._on_read = on_read
        self._pin_memory = pin_memory
        self._files: dict[Path, tuple[int, SafetensorsHeader]] = {}
        self._stack = stack

    def empty(self, dtype: str, *shape: int) -> torch.Tensor:
        """Host memory for experts, page-locked where the device copies from it."""
        return torch.empty(shape, dtype=getattr(torch, dtype), pin_memory=self._pin_memory)

    def pinned(self, expert: ExpertWeights) -> ExpertWeights:
        """The same, page-locked where the device copies from it."""
        if not self._pin_memory:
            return expert
        return ExpertWeights(*(tensor.pin_memory() for tensor in expert.tensors))

    def location(self, key: _Key) -> TensorLocation:
        return self.manifest.tensors[key] if len(key) == 3 else self.manifest.shared[key]

    def read_parts(self, key: ExpertTensorKey) -> Parts:
        """A quantised projection's numbers and scales, whole. Raises as `read_rows` does."""
        parts = {}
        for location in (self.manifest.tensors[key], self.manifest.scales[key]):
            out = torch.empty(location.shape, dtype=getattr(torch, location.dtype))
            fd, offset = self._place(location)
            self._read(fd, location, offset, out, key)
            parts[location.name.rpartition(".")[2]] = out
        return parts

    def read_rows(
        self, key: _Key, location: TensorLocation, rows: range, out: torch.Tensor
    ) -> None:
        """`out` [len(rows), columns], contiguous, becomes these rows of the tensor.

        Raises AdapterFormatError if the file changed since it was validated, AdapterNotFiniteError.
        """
        fd, start = self._place(location)
        row_bytes = location.shape[1] * out.element_size()
        if not 0 <= rows.start <= rows.stop <= location.shape[0] or out.nbytes != (
            len(rows) * row_bytes
        ):
            raise InvariantError(
                f"asked for rows {rows} of a {list(location.shape)} tensor into {out.nbytes} bytes"
            )
        self._read(fd, location, start + rows.start * row_bytes, out, key)

    def _place(self, location: TensorLocation) -> tuple[int, int]:
        """The open file and where in it the tensor begins."""
        fd, header = self._open(location.file)
        return fd, location.info_in(header).start

    def _read(
        self,
        fd: int,
        location: TensorLocation,
        offset: int,
        out: torch.Tensor,
        key: _Key,
    ) -> None:
        check, path = self._checks[location.dtype], location.file
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
            num_whole = position - position % check.item_bytes
            if not check.holds(buffer[num_checked:num_whole]):
                raise not_finite(self._name, key)
            num_checked = num_whole
            self._on_read(num_read)

    def _open(self, path: Path) -> tuple[int, SafetensorsHeader]:
        if path not in self._files:
            header = read_header(path)
            file = self._stack.enter_context(open_regular(path, AdapterFormatError))
            self._files[path] = (file.fileno(), header)
        return self._files[path]
