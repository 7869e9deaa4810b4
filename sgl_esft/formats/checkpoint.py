"""A base checkpoint on disk as byte ranges, for tools that copy tensors without loading them.

    checkpoint folder -> [Checkpoint] -> merge, extract -> [new_folder] -> folder, all or nothing

No tensor is ever made: weights stay files, and what is in memory at once is one chunk.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from sgl_esft.errors import ConfigError, UnsupportedModelError
from sgl_esft.formats.expert_scheme import ExpertPart
from sgl_esft.formats.model_spec import MoeSpec, Proj, expert_keys, read_moe_spec
from sgl_esft.formats.safetensors_header import TensorInfo, header_block, read_header
from sgl_esft.formats.strict_json import read_object

INDEX_NAME: Final = "model.safetensors.index.json"

PACKED_SUFFIX: Final = ".esftpack"  # what `sgl-esft pack` makes of a base's experts

# Copies of a base's weights. Beside another model's they would be picked up as that model.
_WEIGHT_SUFFIXES: Final = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".h5", ".msgpack", ".onnx"}
    | {PACKED_SUFFIX}
)
_CHUNK_BYTES: Final = 8 << 20


@dataclass(frozen=True)
class TensorBytes:
    """One tensor's bytes in one file."""

    file: Path
    info: TensorInfo

    def chunks(self) -> Iterator[bytes]:
        """The bytes in order, a few megabytes at a time; OSError if the file ends early."""
        left = self.info.num_bytes
        with self.file.open("rb") as stream:
            stream.seek(self.info.start)
            while left:
                chunk = stream.read(min(left, _CHUNK_BYTES))
                if not chunk:
                    raise OSError(f"{self.file.name} became shorter while it was read.")
                left -= len(chunk)
                yield chunk

    def same_as(self, other: TensorBytes) -> bool:
        """Equal in dtype, shape and every bit; stops at the first chunk that differs."""
        mine, theirs = self.info, other.info
        if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            return False
        return all(a == b for a, b in zip(self.chunks(), other.chunks(), strict=True))


@dataclass(frozen=True)
class Checkpoint:
    """A safetensors checkpoint of a supported architecture."""

    path: Path
    spec: MoeSpec
    shards: tuple[Path, ...]
    tensors: Mapping[str, TensorBytes]


def open_checkpoint(path: Path, *, may_be_quantised: bool = False) -> Checkpoint:
    """Read config.json, the shard index if there is one, and every shard's header.

    Every routed expert that config.json promises is there afterwards, in its shape and dtype.
    may_be_quantised: for callers that know of experts' scales. Raises UnsupportedModelError, also
    for missing and damaged files.
    """
    spec = read_moe_spec(path)
    if spec.scheme is not None and not may_be_quantised:
        raise UnsupportedModelError(
            f"{path} has its routed experts quantised as {spec.scheme.label}, and is needed "
            "unquantised here: name the base that it was made of."
        )
    shards = _shards(path)
    tensors: dict[str, TensorBytes] = {}
    for shard in shards:
        for name, info in read_header(shard, UnsupportedModelError).tensors.items():
            if name in tensors:
                raise UnsupportedModelError(
                    f"{path} holds tensor {name} in {tensors[name].file.name} and {shard.name}."
                )
            tensors[name] = TensorBytes(shard, info)
    _check_routed_experts(path, spec, tensors)
    return Checkpoint(path, spec, shards, tensors)


def expert_tensor_names(
    spec: MoeSpec, experts: Mapping[int, Collection[int]]
) -> Iterator[tuple[str, Proj]]:
    """The checkpoint's names of these experts' tensors, in the order of a file to write."""
    for key in expert_keys(experts):
        yield spec.expert_tensor_name(*key), key[2]


def all_experts(spec: MoeSpec) -> dict[int, Collection[int]]:
    """Every routed expert of the model: MoE layer id -> expert ids."""
    return dict.fromkeys(spec.moe_layer_ids, range(spec.num_experts))


def routed_expert_names(spec: MoeSpec) -> frozenset[str]:
    """Of every tensor of every routed expert, scales too."""
    return frozenset(name for name, _ in _routed_parts(spec))


def _routed_parts(spec: MoeSpec) -> Iterator[tuple[str, ExpertPart]]:
    for key in expert_keys(all_experts(spec)):
        for part in spec.expert_parts(key[2]):
            yield spec.expert_part_name(key, part), part


def _check_routed_experts(path: Path, spec: MoeSpec, tensors: Mapping[str, TensorBytes]) -> None:
    for name, part in _routed_parts(spec):
        if name not in tensors:
            raise UnsupportedModelError(f"{path} has no tensor {name}.")
        info = tensors[name].info
        if (info.dtype, info.shape) != (part.dtype, part.shape):
            raise UnsupportedModelError(
                f"{path} has tensor {name} as {info.dtype} {list(info.shape)}, but its "
                f"config.json says {part.dtype} {list(part.shape)}."
            )


def _shards(path: Path) -> tuple[Path, ...]:
    """The files of the index; without one, every safetensors file."""
    index = path / INDEX_NAME
    if not index.exists():
        shards = tuple(sorted(path.glob("*.safetensors")))
        if not shards:
            raise UnsupportedModelError(f"{path} holds no *.safetensors: convert the checkpoint.")
        return shards
    weight_map = read_object(index, UnsupportedModelError).get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    # A name with a folder in it could make merge write outside its output.
    if not names or not all(isinstance(n, str) and n == Path(n).name for n in names):
        raise UnsupportedModelError(f"{index} has no weight_map of plain file names.")
    return tuple(path / name for name in sorted(names))


def companions(base_dir: Path, *, keeps_index: bool) -> list[Path]:
    """Files of a checkpoint to copy as they are: all at the top that is not weights or hidden.

    keeps_index: whether the copy has the shards that INDEX_NAME lists; any other index goes.
    """
    indices = ".bin.index.json" if keeps_index else ".index.json"
    return [
        file
        for file in sorted(base_dir.iterdir())
        if file.is_file()
        and not file.name.startswith(".")
        and file.suffix not in _WEIGHT_SUFFIXES
        and not file.name.endswith(indices)
    ]


def write_tensors(path: Path, tensors: Sequence[tuple[str, TensorBytes]]) -> None:
    """Write one safetensors file with these tensors in this order, copied chunk by chunk."""
    header, _ = header_block((name, source.info) for name, source in tensors)
    with path.open("xb") as stream:
        stream.write(header)
        for _, source in tensors:
            copy_to(source, stream)


def copy_to(source: TensorBytes, stream: BinaryIO) -> None:
    """Write the tensor's bytes at the stream's position."""
    for chunk in source.chunks():
        stream.write(chunk)


@contextmanager
def new_folder(out_dir: Path) -> Iterator[Path]:
    """A folder to fill that becomes `out_dir` when the block ends, and vanishes if it fails.

    `out_dir` must be missing or empty (ConfigError); its parents are made.
    """
    out_dir = out_dir.absolute()
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ConfigError(f"{out_dir} exists and is not an empty folder: name another --out.")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = out_dir.parent / f".{out_dir.name}.partial"
    try:
        partial.mkdir()
    except FileExistsError as error:
        raise ConfigError(
            f"{partial} exists: another run is writing {out_dir}, or one was killed. "
            "If none is running, remove it."
        ) from error
    try:
        yield partial
        partial.replace(out_dir)
    finally:
        # Nothing is left to remove after the rename.
        shutil.rmtree(partial, ignore_errors=True)
