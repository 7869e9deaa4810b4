"""An ESFT adapter folder, checked in full before a byte is allocated for it.

    folder + MoeSpec -> [read_manifest] -> AdapterManifest -> weave/host_cache.py, expert tensor
    folder           -> [content_digest] -> prefix-cache key

In: `expert_cfg.json` and ``*.safetensors`` (headers only). Out: where each projection of each
tuned expert lies. A manifest exists only for an adapter that fits the base model exactly.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from sgl_esft.config import EsftConfig
from sgl_esft.errors import AdapterExistsError, AdapterFormatError, AdapterMismatchError
from sgl_esft.formats.adapter_config import (
    EXPERT_CONFIG_NAME,
    check_ids,
    read_expert_config,
    refuse_lora,
)
from sgl_esft.formats.adapter_paths import (
    adapter_weight_files,
    resolve_adapter_path,
    validate_adapter_name,
)
from sgl_esft.formats.model_spec import PROJS, ExpertTensorKey, MoeSpec, Proj, expert_keys
from sgl_esft.formats.safetensors_header import SafetensorsHeader, TensorInfo, read_header
from sgl_esft.formats.strict_json import open_regular, read_object

_PREFIX: Final = "model."
_CHUNK_BYTES: Final = 8 << 20


@dataclass(frozen=True)
class TensorLocation:
    """One projection of one expert: which file, under which name, of which shape [out, in]."""

    file: Path
    name: str
    shape: tuple[int, int]


@dataclass(frozen=True)
class AdapterManifest:
    """A validated adapter: every listed expert has its three tensors, and there are no others.

    `experts` maps a layer id to its tuned expert ids, ascending; layers without any are absent.
    `dtype` is the tensors' and the base checkpoint's. `num_bytes` counts tensor bytes.
    """

    path: Path
    experts: Mapping[int, tuple[int, ...]]
    tensors: Mapping[ExpertTensorKey, TensorLocation]
    dtype: str
    num_bytes: int
    num_moe_layers: int

    @property
    def num_experts(self) -> int:
        """Tuned experts over all layers."""
        return sum(len(ids) for ids in self.experts.values())

    @property
    def max_experts_per_layer(self) -> int:
        """The paper's E_i: the most tuned experts in any layer."""
        return max(len(ids) for ids in self.experts.values())

    @property
    def mean_experts_per_layer(self) -> float:
        """Tuned experts a layer, over all of the model's MoE layers."""
        return self.num_experts / self.num_moe_layers

    @property
    def sparsity(self) -> float:
        """The paper's S_i (3.1): the share of E_i slots a layer that padding would waste.

        ``sum over layers of (E_i - e) / (L * E_i)``; L counts all of the model's MoE layers, and
        a layer without tuned experts has e = 0.
        """
        return 1.0 - self.mean_experts_per_layer / self.max_experts_per_layer

    @property
    def files(self) -> tuple[Path, ...]:
        """The safetensors files that hold tensors, in the order of their names."""
        return tuple(sorted({location.file for location in self.tensors.values()}))


def read_manifest(path: Path, spec: MoeSpec) -> AdapterManifest:
    """Validate the folder against the base model; reads JSON and safetensors headers only.

    Raises AdapterPathError, AdapterFormatError, UnsupportedAdapterError or AdapterMismatchError;
    the message names the file or tensor, the value seen and the value expected.
    """
    refuse_lora(path)
    files = adapter_weight_files(path)
    experts = read_expert_config(path / EXPERT_CONFIG_NAME)
    check_ids(experts, spec)
    headers = [read_header(file) for file in files]
    _check_index(path, headers)
    wanted = {spec.expert_tensor_name(*key): key for key in expert_keys(experts)}
    tensors: dict[ExpertTensorKey, TensorLocation] = {}
    num_bytes = 0
    for header, name, info in _expert_tensors(headers, wanted):
        key = wanted[_canonical(name)]
        if key in tensors:
            raise AdapterFormatError(
                f"tensor {name} is in {tensors[key].file.name} and again in {header.path.name}."
            )
        shape = _checked_shape(name, info, spec, key[2])
        tensors[key] = TensorLocation(header.path, name, shape)
        num_bytes += info.num_bytes
    _check_complete(tensors, wanted)
    return AdapterManifest(path, experts, tensors, spec.dtype, num_bytes, len(spec.moe_layer_ids))


def check_fits(manifest: AdapterManifest, max_experts_per_adapter: int) -> None:
    """Raise AdapterMismatchError if a layer holds more experts than a slot has room for."""
    layer, ids = max(manifest.experts.items(), key=lambda item: len(item[1]))
    if len(ids) > max_experts_per_adapter:
        raise AdapterMismatchError(
            f"the adapter replaces {len(ids)} experts in layer {layer}, but "
            f"{max_experts_per_adapter} are reserved. "
            f"Start the server with --max-experts-per-adapter {len(ids)} or more."
        )


def content_digest(path: Path) -> str:
    """xxh3-128, in hex, of an adapter folder's expert_cfg.json and safetensors files, streamed.

    Changes with any byte of them and with their names, not with the folder's. Not a defence
    against forgery: it tells one version of an adapter from the next. Raises as
    `adapter_weight_files` does, and AdapterFormatError for an unreadable file.
    """
    digest = xxhash.xxh3_128()
    for file in (path / EXPERT_CONFIG_NAME, *adapter_weight_files(path)):
        # Name and length first, so that bytes cannot move from one file to the next unnoticed.
        with open_regular(file, AdapterFormatError) as stream:
            num_bytes = os.fstat(stream.fileno()).st_size
            digest.update(f"{file.name}\0{num_bytes}\0".encode("utf-8", "surrogateescape"))
            try:
                while chunk := stream.read(_CHUNK_BYTES):
                    digest.update(chunk)
            except OSError as error:
                reason = error.strerror
                raise AdapterFormatError(f"{file.name} cannot be read: {reason}.") from error
    return digest.hexdigest()


def stamp_digest(path: Path) -> str:
    """As `content_digest`, without reading weights: their files' names, sizes, inodes and times.

    Files replaced by others, or written to, have another digest unless their times were set back.
    Raises as `adapter_weight_files` does, and AdapterFormatError for an unreadable file.
    """
    digest = xxhash.xxh3_128()
    for file in (path / EXPERT_CONFIG_NAME, *adapter_weight_files(path)):
        with open_regular(file, AdapterFormatError) as stream:
            stat = os.fstat(stream.fileno())
        stamp = f"{file.name}\0{stat.st_size}\0{stat.st_ino}\0{stat.st_mtime_ns}\0"
        digest.update(stamp.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _canonical(name: str) -> str:
    """Older ESFT files lack the `model.` prefix."""
    return name if name.startswith(_PREFIX) else _PREFIX + name


def _expert_tensors(
    headers: Sequence[SafetensorsHeader], wanted: Mapping[str, ExpertTensorKey]
) -> Iterator[tuple[SafetensorsHeader, str, TensorInfo]]:
    """Every tensor of the files; raises on one that is no listed expert's, or on mixed prefixes."""
    first: str | None = None
    for header in headers:
        for name, info in header.tensors.items():
            if _canonical(name) not in wanted:
                raise AdapterFormatError(
                    f"tensor {name[:200]!r} in {header.path.name} is of no expert that "
                    f"{EXPERT_CONFIG_NAME} lists. List its expert, or remove the tensor."
                )
            first = first or name
            if name.startswith(_PREFIX) != first.startswith(_PREFIX):
                raise AdapterFormatError(
                    f"tensor names mix two styles: {first} and {name}. "
                    f"Write all with the {_PREFIX!r} prefix."
                )
            yield header, name, info


def _checked_shape(name: str, info: TensorInfo, spec: MoeSpec, proj: Proj) -> tuple[int, int]:
    shape = spec.expert_tensor_shape(proj)
    if info.shape != shape:
        raise AdapterMismatchError(
            f"tensor {name} has shape {list(info.shape)}, the base model's is {list(shape)}. "
            "Was the adapter made for another model?"
        )
    if info.dtype != spec.dtype:
        raise AdapterMismatchError(
            f"tensor {name} has dtype {info.dtype}, the base checkpoint's is {spec.dtype}. "
            f"Save the adapter as {spec.dtype}."
        )
    return shape


def _check_complete(
    tensors: Mapping[ExpertTensorKey, TensorLocation], wanted: Mapping[str, ExpertTensorKey]
) -> None:
    missing = [name for name, key in wanted.items() if key not in tensors]
    if missing:
        raise AdapterFormatError(
            f"{len(missing)} of {len(wanted)} tensors are missing, the first is {missing[0]}. "
            f"Every expert that {EXPERT_CONFIG_NAME} lists needs its {len(PROJS)} tensors."
        )


def _check_index(path: Path, headers: Sequence[SafetensorsHeader]) -> None:
    """If a shard index is there, it must say exactly what the files say."""
    held = {name: header.path.name for header in headers for name in header.tensors}
    for index in sorted(path.glob("*.safetensors.index.json")):
        weight_map = read_object(index, AdapterFormatError).get("weight_map")
        if not isinstance(weight_map, dict):
            raise AdapterFormatError(f'{index.name} has no "weight_map" object.')
        for name in sorted(weight_map.keys() | held.keys()):
            if name not in held or weight_map.get(name) != held[name]:
                raise AdapterFormatError(
                    f"{index.name} puts tensor {name[:200]!r} in "
                    f"{str(weight_map.get(name, 'no file'))[:200]}, but it is in "
                    f"{held.get(name, 'no file')}. "
                    "Remove the index, or write it anew."
                )


# Everything that is checked of an adapter before it is read.
#
# name, folder -> [check_loadable] -> AdapterManifest -> host_cache.py


def check_loadable(
    name: str, folder: str, loaded: Collection[str], spec: MoeSpec, config: EsftConfig
) -> AdapterManifest:
    """Everything that is checked before an adapter is read; `loaded` are the names in use.

    Raises one of the Adapter* errors.
    """
    validate_adapter_name(name)
    if name in loaded:
        raise AdapterExistsError(
            f"adapter {name!r} is already loaded: unload it first, or choose another name"
        )
    path = resolve_adapter_path(folder, config.adapter_root_path)
    manifest = read_manifest(path, spec)
    check_fits(manifest, config.max_experts_per_adapter)
    return manifest
