"""The header of a safetensors file, read without trusting a number in it.

    adapter folder -> [header] -> adapter_format (shapes, dtypes, duplicates)
    checkpoint     -> [header] -> merge, extract (byte ranges to copy)

File: 8 bytes little-endian header length, a JSON object, then the tensors' bytes. The object maps
a tensor's name to its dtype, its shape and its byte range; ranges must tile the rest of the file.
Nothing is allocated from a length that was not first compared with the file's own size.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol, TypeGuard

from sgl_esft.errors import AdapterFormatError, UserError
from sgl_esft.formats.strict_json import open_regular, parse_object

MAX_HEADER_BYTES: Final = 16 << 20
DATA_ALIGNMENT: Final = 4096
"""In files that we write: where sizes are multiples of it too, tensors are read past the page cache
straight to their places (offload/reader.py)."""

_LENGTH_BYTES = 8
_METADATA_KEY = "__metadata__"
# More dimensions than any weight has, few enough that a product of them stays cheap.
_MAX_RANK = 8
_MAX_DIM = (1 << 63) - 1

_DTYPES: Final[Mapping[str, tuple[str, int]]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "C64": ("complex64", 8),
}
SAFETENSORS_CODES: Final[Mapping[str, str]] = {name: code for code, (name, _) in _DTYPES.items()}
ITEM_BYTES: Final[Mapping[str, int]] = dict(_DTYPES.values())
"""Of one element, by torch's word for its dtype."""

# What torch.save writes: a zip archive, or a bare pickle of protocol 2 to 5.
_PICKLE_MAGICS = (b"PK\x03\x04", b"PK\x05\x06", *(bytes((0x80, p)) for p in range(2, 6)))


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: dtype in torch's words ("bfloat16"), and its bytes ``[start, stop)`` in the file.

    Offsets are absolute, so they can be given to `pread` as they are.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor, equal to its element count times the size of its dtype."""
        return self.stop - self.start


class TensorShape(Protocol):
    """What a header says of a tensor: of one that is in a file, or of one that will be."""

    @property
    def dtype(self) -> str:
        """In torch's words."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True)
class SafetensorsHeader:
    """A checked header: `tensors` tile the file from `data_start` to its end, in any order."""

    path: Path
    data_start: int
    tensors: Mapping[str, TensorInfo]


def header_block(
    tensors: Iterable[tuple[str, TensorShape]],
) -> tuple[bytes, dict[str, int]]:
    """A file's first bytes, for these tensors in this order, and where each begins, by name.

    Padded so that the first one begins at DATA_ALIGNMENT.
    """
    entries: dict[str, object] = {_METADATA_KEY: {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for name, tensor in tensors:
        offsets[name], end = end, end + tensor.num_bytes
        entries[name] = {
            "dtype": SAFETENSORS_CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % DATA_ALIGNMENT)
    block = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return block, {name: len(block) + offset for name, offset in offsets.items()}


def read_header(path: Path, error: type[UserError] = AdapterFormatError) -> SafetensorsHeader:
    """Read and check the header; reads at most `MAX_HEADER_BYTES` + 16 bytes of the file.

    Raises `error` (naming the file, the value seen and the limit) if the file is missing,
    truncated, a pickle, or has a header that is too long, not JSON, or does not tile the file.
    """
    with open_regular(path, error) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        text = _header_text(file, file_bytes, path, error)
    entries = parse_object(text, f"the header of {path.name}", error)
    data_start = _LENGTH_BYTES + len(text)
    try:
        _check_metadata(entries.pop(_METADATA_KEY, None))
        tensors = {name: _tensor_info(name, raw, data_start) for name, raw in entries.items()}
        _check_tiling(tensors, data_start, file_bytes)
    except ValueError as cause:
        raise error(f"{path.name} is damaged: {cause}.") from cause
    return SafetensorsHeader(path, data_start, tensors)


def _header_text(file: BinaryIO, file_bytes: int, path: Path, error: type[UserError]) -> bytes:
    start = file.read(_LENGTH_BYTES + 1)
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    # Asked before the magic: the length of a sound header may well begin with a pickle's bytes.
    if len(start) > _LENGTH_BYTES and start[_LENGTH_BYTES:] == b"{":
        if length > MAX_HEADER_BYTES:
            raise error(f"{path.name} has a header of {length} bytes, over {MAX_HEADER_BYTES}.")
        if length > file_bytes - _LENGTH_BYTES:
            raise error(
                f"{path.name} is truncated: a header of {length} bytes in {file_bytes} bytes."
            )
        file.seek(_LENGTH_BYTES)
        return file.read(length)
    if start.startswith(_PICKLE_MAGICS):
        raise error(f"{path.name} is a pickle or zip archive: convert to safetensors.")
    raise error(f"{path.name} ({file_bytes} bytes) is not a safetensors file, or is truncated.")


def _check_metadata(metadata: object) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{_METADATA_KEY} is not a map of strings")


def _tensor_info(name: str, raw: object, data_start: int) -> TensorInfo:
    shown = repr(name[:200])
    if not isinstance(raw, dict) or raw.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {shown} has no dtype, shape and data_offsets, or more than these")
    code, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(code, str) or code not in _DTYPES:
        raise ValueError(f"tensor {shown} has the unknown dtype {str(code)[:50]!r}")
    if not _is_int_list(shape) or len(shape) > _MAX_RANK:
        raise ValueError(f"tensor {shown} has the shape {str(shape)[:100]}")
    if not _is_int_list(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {shown} has the data_offsets {str(offsets)[:100]}")
    dtype, item_bytes = _DTYPES[code]
    begin, end = offsets
    if end - begin != math.prod(shape) * item_bytes:
        raise ValueError(f"tensor {shown} {code} {shape} has data_offsets [{begin}, {end}]")
    return TensorInfo(dtype, tuple(shape), data_start + begin, data_start + end)


def _is_int_list(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(v) is int and 0 <= v <= _MAX_DIM for v in value)


def _check_tiling(tensors: Mapping[str, TensorInfo], data_start: int, file_bytes: int) -> None:
    position = data_start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.start != position:
            kind = "a hole before" if info.start > position else "an overlap at"
            raise ValueError(f"{kind} tensor {name[:200]!r} at byte {position}")
        position = info.stop
    if position != file_bytes:
        raise ValueError(f"its tensors end at byte {position}, the file at {file_bytes}")
