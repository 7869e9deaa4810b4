"""An unquantised adapter's experts in its base's scheme, as an adapter folder of their own.

    AdapterManifest + MoeSpec (with a scheme) -> [write_quantised] -> expert_cfg.json, safetensors
      one expert is read, checked, rounded and written at a time

An expert becomes what it becomes in the merged checkpoint that is quantised, to the byte. So this
is what a server loads (adapter_cache.py), what `sgl-esft merge` writes into a quantised base, and
what `sgl-esft quantise --adapter` leaves to be published.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Final

import torch

from sgl_esft.errors import AdapterFormatError, ConfigError, InvariantError
from sgl_esft.formats.adapter_config import EXPERT_CONFIG_NAME, write_expert_config
from sgl_esft.formats.checkpoint import new_folder
from sgl_esft.formats.expert_scheme import ExpertPart
from sgl_esft.formats.finite import PIECE_BYTES, FiniteCheck, not_finite
from sgl_esft.formats.manifest import AdapterManifest, read_manifest
from sgl_esft.formats.model_spec import PROJS, ExpertTensorKey, MoeSpec, Proj, expert_keys
from sgl_esft.formats.safetensors_header import SafetensorsHeader, read_header
from sgl_esft.formats.strict_json import open_regular
from sgl_esft.quant.rounding import quantise_expert
from sgl_esft.quant.tensor_file import check_room, file_header, raw_bytes, told_of_room

WEIGHTS_NAME: Final = "model.safetensors"

OnRead = Callable[[int], None]
"""Called after each piece of the adapter that was read, with its bytes; may raise, to end it."""


def quantise_adapter(
    manifest: AdapterManifest,
    spec: MoeSpec,
    out_dir: Path,
    on_read: OnRead = lambda num_bytes: None,
) -> AdapterManifest:
    """Write the new folder `out_dir`, all or nothing, and return its manifest.

    Takes memory of a few times one expert. Raises ConfigError for a base or an adapter that leaves
    nothing to do, an `out_dir` that is not empty, or too little room; AdapterNotFiniteError; and
    AdapterFormatError when a file changed after it was validated. Then nothing is left.
    """
    if spec.scheme is None:
        raise ConfigError("the base is not quantised: an adapter of it is served as it is.")
    if manifest.scheme is not None:
        raise ConfigError(f"the adapter is quantised as {manifest.scheme.label} already.")
    num_bytes = quantised_bytes(manifest, spec)
    check_room(out_dir, num_bytes)
    with told_of_room(out_dir, num_bytes), new_folder(out_dir) as folder:
        write_quantised(manifest, spec, folder, on_read)
    return read_manifest(out_dir, spec)


def quantised_bytes(manifest: AdapterManifest, spec: MoeSpec) -> int:
    """Of the safetensors file that `write_quantised` writes."""
    header, _ = file_header(_tensors(manifest, spec))
    return len(header) + manifest.num_experts * spec.expert_bytes


def write_quantised(
    manifest: AdapterManifest, spec: MoeSpec, folder: Path, on_read: OnRead
) -> None:
    """Fill an empty folder, down to the disk. Raises as `quantise_adapter`, and OSError."""
    if spec.scheme is None or manifest.scheme is not None:
        raise InvariantError("there is no scheme to quantise with, or it was done before")
    write_expert_config(folder / EXPERT_CONFIG_NAME, manifest.experts)
    header, places = file_header(_tensors(manifest, spec))
    with (folder / WEIGHTS_NAME).open("xb") as out, _Reader(manifest, on_read) as reader:
        out.write(header)
        for layer, experts in manifest.experts.items():
            for expert in experts:
                weights = {proj: reader.read((layer, expert, proj)) for proj in PROJS}
                _write_expert(out, places, spec, (layer, expert), weights)
        out.flush()
        os.fsync(out.fileno())
    for path in (folder / EXPERT_CONFIG_NAME, folder):
        sync(path)


def sync(path: Path) -> None:
    """A file or a folder, down to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _tensors(manifest: AdapterManifest, spec: MoeSpec) -> dict[str, ExpertPart]:
    return {
        spec.expert_part_name(key, part): part
        for key in expert_keys(manifest.experts)
        for part in spec.expert_parts(key[2])
    }


def _write_expert(
    out: BinaryIO,
    places: Mapping[str, int],
    spec: MoeSpec,
    place: tuple[int, int],
    weights: Mapping[Proj, torch.Tensor],
) -> None:
    """place: layer id and expert id."""
    assert spec.scheme is not None
    parts = quantise_expert(weights, spec.scheme)
    for proj in PROJS:
        for part in spec.expert_parts(proj):
            out.seek(places[spec.expert_part_name((*place, proj), part)])
            out.write(raw_bytes(parts[proj][part.suffix]))


class _Reader:
    """The weights of a validated adapter, each checked while it is read."""

    def __init__(self, manifest: AdapterManifest, on_read: OnRead) -> None:
        self._manifest = manifest
        self._on_read = on_read
        self._check = FiniteCheck(manifest.dtype)
        self._files: dict[Path, tuple[int, SafetensorsHeader]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, key: ExpertTensorKey) -> torch.Tensor:
        """A weight [out, in], in memory of its own."""
        location = self._manifest.tensors[key]
        descriptor, header = self._open(location.file)
        info = location.info_in(header)
        buffer = bytearray(info.num_bytes)
        position = num_checked = 0
        while position < len(buffer):
            piece = memoryview(buffer)[position : position + PIECE_BYTES]
            position += self._read(descriptor, location.file, piece, info.start + position)
            # A read may end within a value.
            num_whole = position - position % self._check.item_bytes
            if not self._check.holds(memoryview(buffer)[num_checked:num_whole]):
                raise not_finite(self._manifest.path.name, key)
            num_checked = num_whole
        dtype = getattr(torch, info.dtype)
        return torch.frombuffer(buffer, dtype=dtype).reshape(info.shape)

    def _read(self, descriptor: int, path: Path, piece: memoryview, offset: int) -> int:
        try:
            num_read = os.preadv(descriptor, [piece], offset)
        except OSError as error:
            raise AdapterFormatError(f"{path.name} cannot be read: {error}.") from error
        if not num_read:
            raise AdapterFormatError(f"{path.name} was cut short since it was validated.")
        self._on_read(num_read)
        return num_read

    def _open(self, path: Path) -> tuple[int, SafetensorsHeader]:
        if path not in self._files:
            header = read_header(path)
            file = self._stack.enter_context(open_regular(path, AdapterFormatError))
            self._files[path] = (file.fileno(), header)
        return self._files[path]
