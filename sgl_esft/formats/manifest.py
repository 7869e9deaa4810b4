"""An ESFT adapter folder, checked in full before a byte is allocated for it.

    folder + MoeSpec -> [read_manifest] -> AdapterManifest -> weave/host_cache.py, expert tensor
    folder           -> [content_digest] -> prefix-cache key

In: `expert_cfg.json` and ``*.safetensors`` (headers only). Out: where each projection of each
tuned expert lies. A manifest exists only for an adapter that fits the base model exactly: in its
dtype or, where the base is quantised, in its scheme as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Final

import xxhash

from sgl_esft.config import EsftConfig
from sgl_esft.errors import (
    AdapterExistsError,
    AdapterFormatError,
    AdapterMismatchError,
    UnsupportedAdapterError,
)
from sgl_esft.formats.adapter_config import (
    EXPERT_CONFIG_NAME,
    check_ids,
    config_name_of,
    read_config,
    refuse_lora,
)
from sgl_esft.formats.adapter_paths import (
    adapter_weight_files,
    resolve_adapter_path,
    validate_adapter_name,
)
from sgl_esft.formats.expert_scheme import ExpertPart, ExpertScheme
from sgl_esft.formats.model_spec import (
    PROJS,
    ExpertTensorKey,
    MoeSpec,
    SharedTensorKey,
    expert_keys,
)
from sgl_esft.formats.safetensors_header import SafetensorsHeader, TensorInfo, read_header
from sgl_esft.formats.strict_json import open_regular, read_object

_PREFIX: Final = "model."
_FLOATS: Final = frozenset({"float64", "float32", "bfloat16", "float16"})
# What the schemes of others keep beside a projection's numbers, or in the place of them.
_QUANTISED_LEAVES: Final = frozenset(
    {"weight_scale", "weight_scale_inv", "qweight", "scales", "qzeros", "g_idx", "input_scale"}
)
_CHUNK_BYTES: Final = 8 << 20


@dataclass(frozen=True)
class TensorLocation:
    """One tensor of a projection: which file, under which name, of which dtype and shape.

    A weight is [out, in]; numbers and scales of a quantised one are as in `ExpertScheme.parts`.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    def info_in(self, header: SafetensorsHeader) -> TensorInfo:
        """Its bytes in its file, read again. Raises AdapterFormatError if the tensor changed."""
        info = header.tensors.get(self.name)
        if info is None or (info.dtype, info.shape) != (self.dtype, self.shape):
            raise AdapterFormatError(
                f"tensor {self.name} changed since it was validated: it is now "
                f"{'gone' if info is None else f'{info.dtype} {list(info.shape)}'}."
            )
        return info


@dataclass(frozen=True)
class AdapterManifest:
    """A validated adapter: every listed expert has its three projections, and there are no others.

    `experts` maps a layer id to its tuned expert ids, ascending; layers without any are absent.
    `tensors` are the projections' weights and, of an adapter that is stored quantised, their
    numbers, whose `scales` have the same keys; `scheme` is then the base's, else None. `dtype` is
    that of `tensors`. `shared` are the weights of layers' shared experts, three a layer, of an
    adapter that tunes them. `num_bytes` counts the bytes of all of them.
    """

    path: Path
    experts: Mapping[int, tuple[int, ...]]
    tensors: Mapping[ExpertTensorKey, TensorLocation]
    dtype: str
    num_bytes: int
    num_moe_layers: int
    scheme: ExpertScheme | None = None
    scales: Mapping[ExpertTensorKey, TensorLocation] = field(default_factory=dict)
    shared: Mapping[SharedTensorKey, TensorLocation] = field(default_factory=dict)

    @property
    def shared_layers(self) -> tuple[int, ...]:
        """Layers whose shared experts are tuned, ascending."""
        return tuple(sorted({layer for layer, _ in self.shared}))

    @property
    def num_experts(self) -> int:
        """Tuned routed experts over all layers."""
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
        every = (*self.tensors.values(), *self.scales.values(), *self.shared.values())
        return tuple(sorted({location.file for location in every}))


def read_manifest(path: Path, spec: MoeSpec) -> AdapterManifest:
    """Validate the folder against the base model; reads JSON and safetensors headers only.

    Raises AdapterPathError, AdapterFormatError, UnsupportedAdapterError or AdapterMismatchError;
    the message names the file or tensor, the value seen and the value expected.
    """
    refuse_lora(path)
    files = adapter_weight_files(path)
    config = read_config(path / EXPERT_CONFIG_NAME)
    experts = config.experts
    check_ids(experts, spec)
    if config.shared_experts:
        _check_shared(spec)
    headers = [read_header(file) for file in files]
    _check_index(path, headers)
    stored = spec if _is_quantised(headers) else replace(spec, scheme=None)
    parts = _listed_parts(experts, stored)
    shared = _shared_parts(headers, spec) if config.shared_experts else {}
    wanted = {name: part for name, (_, part) in (*parts.items(), *shared.items())}
    found = _found(headers, wanted, stored)
    tensors: dict[ExpertTensorKey, TensorLocation] = {}
    scales: dict[ExpertTensorKey, TensorLocation] = {}
    for name, (key, _) in parts.items():  # a projection's scales come after its numbers
        (scales if key in tensors else tensors)[key] = found[name]
    return AdapterManifest(
        path=path,
        experts=experts,
        tensors=tensors,
        dtype=stored.expert_parts("gate")[0].dtype,
        num_bytes=sum(part.num_bytes for part in wanted.values()),
        num_moe_layers=len(spec.moe_layer_ids),
        scheme=stored.scheme,
        scales=scales,
        shared={key: found[name] for name, (key, _) in shared.items()},
    )


def check_fits(manifest: AdapterManifest, max_experts_per_adapter: int) -> None:
    """Raise AdapterMismatchError if a layer holds more experts than a slot has room for."""
    layer, ids = max(manifest.experts.items(), key=lambda item: len(item[1]))
    if len(ids) > max_experts_per_adapter:
        raise AdapterMismatchError(
            f"the adapter replaces {len(ids)} experts in layer {layer}, but "
            f"{max_experts_per_adapter} are reserved. "
            f"Start the server with --max-experts-per-adapter {len(ids)} or more."
        )


def content_digest(path: Path, on_piece: Callable[[], None] = lambda: None) -> str:
    """xxh3-128, in hex, of an adapter folder's configuration and safetensors files, streamed.

    Changes with any byte of them and with their names, not with the folder's. Not a defence
    against forgery: it tells one version of an adapter from the next. `on_piece` is called after
    each piece that was read. Raises what that raises, as `adapter_weight_files` does, and
    AdapterFormatError for an unreadable file.
    """
    digest = xxhash.xxh3_128()
    for file in (path / config_name_of(path), *adapter_weight_files(path)):
        # Name and length first, so that bytes cannot move from one file to the next unnoticed.
        with open_regular(file, AdapterFormatError) as stream:
            num_bytes = os.fstat(stream.fileno()).st_size
            digest.update(f"{file.name}\0{num_bytes}\0".encode("utf-8", "surrogateescape"))
            while chunk := _read_chunk(stream, file.name):
                digest.update(chunk)
                on_piece()
    return digest.hexdigest()


def _read_chunk(stream: BinaryIO, name: str) -> bytes:
    try:
        return stream.read(_CHUNK_BYTES)
    except OSError as error:
        raise AdapterFormatError(f"{name} cannot be read: {error.strerror}.") from error


def stamp_digest(path: Path) -> str:
    """As `content_digest`, without reading weights: their files' names, sizes, inodes and times.

    Files replaced by others, or written to, have another digest unless their times were set back.
    Raises as `adapter_weight_files` does, and AdapterFormatError for an unreadable file.
    """
    digest = xxhash.xxh3_128()
    for file in (path / config_name_of(path), *adapter_weight_files(path)):
        with open_regular(file, AdapterFormatError) as stream:
            stat = os.fstat(stream.fileno())
        stamp = f"{file.name}\0{stat.st_size}\0{stat.st_ino}\0{stat.st_mtime_ns}\0"
        digest.update(stamp.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _canonical(name: str) -> str:
    """Older ESFT files lack the `model.` prefix."""
    return name if name.startswith(_PREFIX) else _PREFIX + name


def _is_quantised(headers: Sequence[SafetensorsHeader]) -> bool:
    """By any tensor: what is quantised in part is checked, and named, as what is not whole."""
    return any(
        info.dtype not in _FLOATS or name.rpartition(".")[2] in _QUANTISED_LEAVES
        for header in headers
        for name, info in header.tensors.items()
    )


def _listed_parts(
    experts: Mapping[int, tuple[int, ...]], spec: MoeSpec
) -> dict[str, tuple[ExpertTensorKey, ExpertPart]]:
    """Checkpoint name -> what it is, of all that the listed experts have to have."""
    return {
        spec.expert_part_name(key, part): (key, part)
        for key in expert_keys(experts)
        for part in spec.expert_parts(key[2])
    }


def _check_shared(spec: MoeSpec) -> None:
    """Raises UnsupportedAdapterError where an adapter's shared experts have no place."""
    if not spec.shared_intermediate_size:
        raise UnsupportedAdapterError(
            "the adapter has shared_experts = true, and the base model has no shared experts: "
            "use the base that the adapter was made for, or write false and remove their tensors."
        )
    if spec.scheme is not None:
        raise UnsupportedAdapterError(
            "the adapter has shared_experts = true, which was not shown with a quantised base "
            f"({spec.scheme.label}): use the unquantised base that it was made of, or write false "
            "and remove their tensors."
        )


def _shared_parts(
    headers: Sequence[SafetensorsHeader], spec: MoeSpec
) -> dict[str, tuple[SharedTensorKey, ExpertPart]]:
    """Checkpoint name -> what it is, of all three tensors of each layer that has one of them."""
    held = {_canonical(name) for header in headers for name in header.tensors}
    names = {
        layer: {spec.shared_tensor_name(layer, proj): (layer, proj) for proj in PROJS}
        for layer in spec.moe_layer_ids
    }
    parts = {
        name: (key, spec.shared_part(key[1]))
        for of_layer in names.values()
        if not held.isdisjoint(of_layer)
        for name, key in of_layer.items()
    }
    if not parts:
        first = spec.shared_tensor_name(spec.moe_layer_ids[0], "gate")
        raise AdapterFormatError(
            f"{EXPERT_CONFIG_NAME} has shared_experts = true, but there is no tensor of them, such "
            f"as {first}. Add the layers' tensors, or write false."
        )
    return parts


def _found(
    headers: Sequence[SafetensorsHeader],
    parts: Mapping[str, ExpertPart],
    spec: MoeSpec,
) -> dict[str, TensorLocation]:
    """Where each of `parts` is; raises unless each is there once, and nothing else."""
    found: dict[str, TensorLocation] = {}
    for header, name, info in _expert_tensors(headers, parts, spec):
        canonical = _canonical(name)
        if canonical in found:
            raise AdapterFormatError(
                f"tensor {name} is in {found[canonical].file.name} and again in {header.path.name}."
            )
        _check_part(name, info, parts[canonical], spec)
        found[canonical] = TensorLocation(header.path, name, info.dtype, info.shape)
    missing = [name for name in parts if name not in found]
    if missing:
        num_parts = len(PROJS) * len(spec.expert_parts("gate"))
        raise AdapterFormatError(
            f"{len(missing)} of {len(parts)} tensors are missing, the first is {missing[0]}. "
            f"Every expert that {EXPERT_CONFIG_NAME} lists needs its {num_parts} tensors, and so "
            "do a layer's shared experts if one is there."
        )
    return found


def _expert_tensors(
    headers: Sequence[SafetensorsHeader], parts: Collection[str], spec: MoeSpec
) -> Iterator[tuple[SafetensorsHeader, str, TensorInfo]]:
    """Every tensor of the files; raises on one that is no listed expert's, or on mixed prefixes."""
    first: str | None = None
    for header in headers:
        for name, info in header.tensors.items():
            if _canonical(name) not in parts:
                raise _foreign(name, header.path.name, parts, spec)
            first = first or name
            if name.startswith(_PREFIX) != first.startswith(_PREFIX):
                raise AdapterFormatError(
                    f"tensor names mix two styles: {first} and {name}. "
                    f"Write all with the {_PREFIX!r} prefix."
                )
            yield header, name, info


def _foreign(
    name: str, file_name: str, parts: Collection[str], spec: MoeSpec
) -> AdapterFormatError | AdapterMismatchError:
    """What is raised for a tensor that is none of `parts`."""
    stem, _, leaf = _canonical(name).rpartition(".")
    listed = {part.rpartition(".")[0] for part in parts}
    if stem in listed and (leaf in _QUANTISED_LEAVES or leaf == "weight"):
        suffixes = " and ".join(part.suffix for part in spec.expert_parts("gate"))
        return AdapterMismatchError(
            f"tensor {name} in {file_name} is of a quantised adapter; for the base's experts, "
            f"{_in_words(spec)}, there are only {suffixes}. {_remedy(spec)}"
        )
    if leaf == "weight" and stem in _shared_stems(spec):
        return AdapterFormatError(
            f"tensor {name} in {file_name} is of shared experts, and {EXPERT_CONFIG_NAME} has "
            "shared_experts = false. Write true, or remove the tensor."
        )
    return AdapterFormatError(
        f"tensor {name[:200]!r} in {file_name} is of no expert that "
        f"{EXPERT_CONFIG_NAME} lists. List its expert, or remove the tensor."
    )


def _shared_stems(spec: MoeSpec) -> set[str]:
    """Names of layers' shared projections, without their last part."""
    if not spec.shared_intermediate_size:
        return set()
    names = (spec.shared_tensor_name(layer, p) for layer in spec.moe_layer_ids for p in PROJS)
    return {name.rpartition(".")[0] for name in names}


def _check_part(name: str, info: TensorInfo, part: ExpertPart, spec: MoeSpec) -> None:
    if (info.dtype, info.shape) == (part.dtype, part.shape):
        return
    if spec.scheme is not None:
        raise AdapterMismatchError(
            f"tensor {name} is {info.dtype} {list(info.shape)}; of the base's experts, "
            f"{_in_words(spec)}, it is {part.dtype} {list(part.shape)}. {_remedy(spec)}"
        )
    if info.shape != part.shape:
        raise AdapterMismatchError(
            f"tensor {name} has shape {list(info.shape)}, the base model's is {list(part.shape)}. "
            "Was the adapter made for another model?"
        )
    raise AdapterMismatchError(
        f"tensor {name} has dtype {info.dtype}, the base checkpoint's is {part.dtype}. "
        f"{_remedy(spec)}"
    )


def _in_words(spec: MoeSpec) -> str:
    return "not quantised" if spec.scheme is None else f"quantised as {spec.scheme.label}"


def _remedy(spec: MoeSpec) -> str:
    if spec.scheme is None:
        return f"Save the adapter as {spec.dtype}."
    return f"Save the adapter as {spec.dtype}, or quantise that by `sgl-esft quantise --adapter`."


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
    check_served(name, manifest, config)
    return manifest


def check_served(name: str, manifest: AdapterManifest, config: EsftConfig) -> None:
    """As `check_fits`; raises UnsupportedAdapterError for what the server's flags exclude, too."""
    check_fits(manifest, config.max_experts_per_adapter)
    if manifest.shared and config.tiers is not None:
        raise refused_shared(name, "with experts in tiers: leave --expert-cache out")


def refused_shared(name: str, why: str) -> UnsupportedAdapterError:
    """What is raised for a whole adapter that tunes shared experts, where they are not woven.

    why: where it was not shown, a colon, and what else than leaving them out can be done.
    """
    return UnsupportedAdapterError(
        f"adapter {name!r} has shared_experts = true, which was not shown {why}, or write false "
        "and remove their tensors"
    )
