"""The base's experts in one file, each in one aligned run: read in place, without a copy.

    base checkpoint --sgl-esft pack--> [pack_experts] -> packed file
    packed file, the base's headers -> [read_layout] -> PackedLayout -> source.py

File: `_MAGIC`, 8 bytes little-endian header length, a JSON object, zeros up to a multiple of
ALIGNMENT; then expert after expert, layers ascending, each its gate, up and down in one run, of a
quantised one their scales behind them, and zeros up to the next multiple. The header repeats what
the base says of itself. It is only ever compared with the base, so no number in it is trusted, and
what was packed from another is refused.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import BinaryIO, Final

import xxhash

from sgl_esft.byte_size import gigabytes
from sgl_esft.errors import ConfigError, UnsupportedModelError
from sgl_esft.formats.checkpoint import PACKED_SUFFIX, Checkpoint, open_checkpoint
from sgl_esft.formats.expert_scheme import ExpertPart
from sgl_esft.formats.model_spec import PROJS, MoeSpec, Proj, refuse_quantised
from sgl_esft.formats.safetensors_header import MAX_HEADER_BYTES
from sgl_esft.formats.strict_json import JsonObject, open_regular, parse_object, shown
from sgl_esft.support import TIER_SCHEMES

ALIGNMENT: Final = 4096
"""Of offsets, lengths and addresses: what every device and filesystem takes for O_DIRECT."""
PACKED_NAME: Final = f"experts{PACKED_SUFFIX}"
"""Found by this name in the base's folder."""

_MAGIC: Final = b"ESFTPACK"
_PREAMBLE_BYTES: Final = len(_MAGIC) + 8
_FORMAT: Final = "sgl-esft packed experts"
_VERSION: Final = 1
_SAMPLE_BYTES: Final = 4096
_AGAIN: Final = "Pack the base again with `sgl-esft pack`, or remove this file."
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

OnProgress = Callable[[int, int], None]
"""Experts written so far, and in all."""


def align_up(num_bytes: int) -> int:
    """The next multiple of ALIGNMENT that is not below."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class PackedLayout:
    """Where experts lie in a packed file whose header takes the first `data_start` bytes."""

    spec: MoeSpec
    data_start: int

    @property
    def stride(self) -> int:
        """Bytes from one expert to the next, a multiple of ALIGNMENT."""
        return align_up(self.spec.expert_bytes)

    @property
    def num_bytes(self) -> int:
        """Of the whole file."""
        num_experts = len(self.spec.moe_layer_ids) * self.spec.num_experts
        return self.data_start + num_experts * self.stride

    def start_of(self, layer_id: int, expert_id: int) -> int:
        """Offset of the expert's gate; the rest follows at once. The ids must be the model's."""
        layer = self.spec.moe_layer_ids.index(layer_id)
        return self.data_start + (layer * self.spec.num_experts + expert_id) * self.stride

    def starts_of(self, layer_id: int, expert_id: int) -> dict[Proj, tuple[int, ...]]:
        """Offsets of each projection's parts, in the order of `MoeSpec.expert_parts`."""
        starts: dict[Proj, tuple[int, ...]] = dict.fromkeys(PROJS, ())
        position = self.start_of(layer_id, expert_id)
        for proj, part in _parts(self.spec):
            starts[proj] += (position,)
            position += part.num_bytes
        return starts


def _parts(spec: MoeSpec) -> list[tuple[Proj, ExpertPart]]:
    """An expert's tensors in the order of the file: weights or numbers, then scales."""
    num_parts = len(spec.expert_parts("gate"))
    return [(proj, spec.expert_parts(proj)[n]) for n in range(num_parts) for proj in PROJS]


def open_base(path: Path, what: str) -> Checkpoint:
    """A base whose experts can be read one at a time. what: who wants to, as a subject.

    Raises UnsupportedModelError, also for one that is quantised in a way that was not shown.
    """
    checkpoint = open_checkpoint(path, may_be_quantised=True)
    refuse_quantised(checkpoint.spec, what, TIER_SCHEMES)
    return checkpoint


def read_layout(path: Path, checkpoint: Checkpoint) -> PackedLayout:
    """Check a packed file against the base it should be of. Reads headers and samples only.

    Raises ConfigError for a missing, damaged or truncated file, for another version's, and for one
    that was packed from another base; UnsupportedModelError when the base cannot be read.
    """
    with open_regular(path, ConfigError) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        header, data_start = _read_header(file, num_bytes, path.name)
    _check_header(header, _description(checkpoint), path.name)
    layout = PackedLayout(checkpoint.spec, data_start)
    if num_bytes != layout.num_bytes:
        raise ConfigError(
            f"{path.name} has {num_bytes} bytes, not {layout.num_bytes}: it is damaged. {_AGAIN}"
        )
    return layout


def _read_header(file: BinaryIO, num_bytes: int, name: str) -> tuple[JsonObject, int]:
    start = file.read(_PREAMBLE_BYTES)
    length = int.from_bytes(start[len(_MAGIC) :], "little")
    if not start.startswith(_MAGIC):
        raise ConfigError(f"{name} ({num_bytes} bytes) is no file that `sgl-esft pack` wrote.")
    if not 0 < length <= min(MAX_HEADER_BYTES, num_bytes - _PREAMBLE_BYTES):
        raise ConfigError(f"{name} is damaged: a header of {length} bytes in {num_bytes}. {_AGAIN}")
    header = parse_object(file.read(length), f"the header of {name}", ConfigError)
    return header, align_up(_PREAMBLE_BYTES + length)


def _check_header(header: JsonObject, wanted: JsonObject, name: str) -> None:
    # In the order of `wanted`: another version is told as such, not by a field it lacks.
    for key in (*wanted, *header):
        seen, expected = header.get(key), wanted.get(key)
        if seen != expected:
            raise ConfigError(
                f"{name} does not fit the base: its {key[:50]} is {shown(seen)}, not "
                f"{shown(expected)}. {_AGAIN}"
            )


def _description(checkpoint: Checkpoint) -> JsonObject:
    """What a packed file's header says, if it was made of this base as it is now."""
    spec = checkpoint.spec
    scheme = {} if spec.scheme is None else {"scheme": spec.scheme.label}
    try:
        return {
            "format": _FORMAT,
            "version": _VERSION,
            **scheme,
            "dtype": spec.dtype,
            "hidden_size": spec.hidden_size,
            "expert_intermediate_size": spec.expert_intermediate_size,
            "moe_layer_ids": list(spec.moe_layer_ids),
            "num_experts": spec.num_experts,
            "stride": PackedLayout(spec, 0).stride,
            "base_files": _file_entries(checkpoint),
            "samples": _samples_digest(checkpoint),
        }
    except OSError as error:
        raise UnsupportedModelError(f"{checkpoint.path} cannot be read: {error}.") from error


def _file_entries(checkpoint: Checkpoint) -> list[JsonObject]:
    """Name, size and header's digest of every file of the base."""
    header_ends: dict[Path, int] = {}
    for tensor in checkpoint.tensors.values():
        start = tensor.info.start
        header_ends[tensor.file] = min(start, header_ends.get(tensor.file, start))
    entries: list[JsonObject] = []
    for shard in checkpoint.shards:
        with open_regular(shard, UnsupportedModelError) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            header = file.read(header_ends.get(shard, num_bytes))
        digest = xxhash.xxh3_128_hexdigest(header)
        entries.append({"name": shard.name, "num_bytes": num_bytes, "header": digest})
    return entries


def _samples_digest(checkpoint: Checkpoint) -> str:
    """xxh3-128 of the first bytes of every expert.

    Checkpoints of one architecture, such as a base and one that an adapter was merged into, have
    equal headers. A page of each expert tells them apart, for one small read an expert; quantised,
    one of its scales too: experts of which one is twice the other have the same numbers.
    """
    digest, spec = xxhash.xxh3_128(), checkpoint.spec
    files: dict[Path, int] = {}
    with ExitStack() as stack:
        for (layer, expert), part in product(_experts(spec), spec.expert_parts("gate")):
            tensor = checkpoint.tensors[spec.expert_part_name((layer, expert, "gate"), part)]
            if tensor.file not in files:
                file = stack.enter_context(open_regular(tensor.file, UnsupportedModelError))
                files[tensor.file] = file.fileno()
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
            num_bytes = min(_SAMPLE_BYTES, tensor.info.num_bytes)
            digest.update(os.pread(files[tensor.file], num_bytes, tensor.info.start))
    return digest.hexdigest()


def _experts(spec: MoeSpec) -> Iterator[tuple[int, int]]:
    """Layer and expert ids in the order of the file."""
    for layer in spec.moe_layer_ids:
        for expert in range(spec.num_experts):
            yield layer, expert


def pack_experts(
    base_dir: Path, out: Path, on_progress: OnProgress = lambda done, total: None
) -> PackedLayout:
    """Write the base's experts into the new file `out`, all or nothing, a few megabytes at a time.

    Raises UnsupportedModelError for the base; ConfigError when `out` exists, when there is no room
    for it, or when the base changes meanwhile. Whatever it raises, no file is left.
    """
    checkpoint = open_base(base_dir, "pack")
    before = _stamps(checkpoint)
    header = _header_block(checkpoint)
    layout = PackedLayout(checkpoint.spec, len(header))
    experts = list(_experts(checkpoint.spec))
    with _new_file(out, layout.num_bytes) as stream:
        stream.write(header)
        for number, key in enumerate(experts, 1):
            _write_expert(stream, checkpoint, *key)
            on_progress(number, len(experts))
        if _stamps(checkpoint) != before:
            raise ConfigError(f"{base_dir} changed while it was packed: pack it again.")
    return layout


def _header_block(checkpoint: Checkpoint) -> bytes:
    text = json.dumps(_description(checkpoint), separators=(",", ":")).encode()
    block = _MAGIC + len(text).to_bytes(8, "little") + text
    return block.ljust(align_up(len(block)), b"\0")


def _write_expert(stream: BinaryIO, checkpoint: Checkpoint, layer: int, expert: int) -> None:
    spec = checkpoint.spec
    for proj, part in _parts(spec):
        name = spec.expert_part_name((layer, expert, proj), part)
        for chunk in checkpoint.tensors[name].chunks():
            stream.write(chunk)
    stream.write(bytes(PackedLayout(spec, 0).stride - spec.expert_bytes))


def _stamps(checkpoint: Checkpoint) -> list[tuple[int, int, int]]:
    stats = [shard.stat() for shard in checkpoint.shards]
    return [(each.st_ino, each.st_size, each.st_mtime_ns) for each in stats]


@contextmanager
def _new_file(out: Path, num_bytes: int) -> Iterator[BinaryIO]:
    """A file to fill that becomes `out` when the block ends, and vanishes if it fails."""
    out = out.absolute()
    if out.exists():
        raise ConfigError(f"{out} exists: name another --out, or remove it.")
    out.parent.mkdir(parents=True, exist_ok=True)
    _check_room(out, num_bytes, shutil.disk_usage(out.parent).free)
    partial = out.with_name(f".{out.name}.partial")
    try:
        stream = partial.open("xb")
    except FileExistsError as error:
        raise ConfigError(
            f"{partial} exists: another run is writing {out}, or one was killed. "
            "If none is running, remove it."
        ) from error
    try:
        with stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(out)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise _no_room(out, num_bytes, f"the system says: {error.strerror}") from error
        raise
    finally:
        # Nothing is left to remove after the rename.
        partial.unlink(missing_ok=True)


def _check_room(out: Path, num_bytes: int, num_free: int) -> None:
    # Told at once, and not after most of it was copied.
    if num_bytes > num_free:
        raise _no_room(out, num_bytes, f"{gigabytes(num_free)} are free in {out.parent}")


def _no_room(out: Path, num_bytes: int, reason: str) -> ConfigError:
    return ConfigError(
        f"{out} needs {gigabytes(num_bytes)}, but {reason}. Name an --out with more room."
    )
