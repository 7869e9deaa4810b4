"""Bad tensors and safetensors files for the table in `bad_adapters`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sgl_esft.errors import (
    AdapterFormatError,
    AdapterMismatchError,
)
from tests.support.bad_adapters import bad

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def _edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / _WEIGHTS).items()}
    edit(tensors)
    save_file(tensors, folder / _WEIGHTS)


def _replace_first(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    _edit_tensors(
        folder, lambda tensors: tensors.update({min(tensors): change(tensors[min(tensors)])})
    )


@bad(AdapterFormatError, "missing")
def _missing_tensor(folder: Path) -> None:
    _edit_tensors(folder, lambda tensors: tensors.pop(min(tensors)))


@bad(AdapterFormatError, "lm_head.weight")
def _surplus_tensor(folder: Path) -> None:
    _edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(2)}))


@bad(AdapterMismatchError, "shape")
def _wrong_shape(folder: Path) -> None:
    _replace_first(folder, lambda tensor: tensor[:-1].contiguous())


@bad(AdapterMismatchError, "shape")
def _transposed(folder: Path) -> None:
    _replace_first(folder, lambda tensor: tensor.T.contiguous())


@bad(AdapterMismatchError, "dtype")
def _wrong_dtype(folder: Path) -> None:
    other = torch.float16
    _edit_tensors(
        folder, lambda tensors: tensors.update({n: t.to(other) for n, t in tensors.items()})
    )


@bad(AdapterFormatError, "two styles")
def _mixed_prefixes(folder: Path) -> None:
    _edit_tensors(
        folder,
        lambda tensors: tensors.update(
            {min(tensors).removeprefix("model."): tensors.pop(min(tensors))}
        ),
    )


@bad(AdapterFormatError, "again")
def _tensor_in_two_shards(folder: Path) -> None:
    name, tensor = min(load_file(folder / _WEIGHTS).items())
    save_file({name: tensor.clone()}, folder / "second.safetensors")


@bad(AdapterFormatError, "no *.safetensors")
def _no_weights(folder: Path) -> None:
    (folder / _WEIGHTS).unlink()


def _write_index(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    weight_map = dict.fromkeys(load_file(folder / _WEIGHTS), _WEIGHTS)
    edit(weight_map)
    (folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@bad(AdapterFormatError, "index")
def _index_names_missing_file(folder: Path) -> None:
    _write_index(folder, lambda weights: weights.update({min(weights): "gone.safetensors"}))


@bad(AdapterFormatError, "index")
def _index_lacks_tensor(folder: Path) -> None:
    _write_index(folder, lambda weights: weights.pop(min(weights)))


@bad(AdapterFormatError, "index")
def _index_has_surplus_tensor(folder: Path) -> None:
    _write_index(folder, lambda weights: weights.update({"x.weight": _WEIGHTS}))


@bad(AdapterFormatError, "weight_map")
def _index_without_map(folder: Path) -> None:
    (folder / _INDEX).write_text("{}")


def _edit_header(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite the header as `edit` leaves it; the tensors' bytes stay."""
    header, data = _split(folder)
    entries = json.loads(header)
    edit(entries)
    _join(folder, json.dumps(entries).encode(), data)


def _split(folder: Path) -> tuple[bytes, bytes]:
    raw = (folder / _WEIGHTS).read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    return raw[8:end], raw[end:]


def _join(folder: Path, header: bytes, data: bytes, length: int | None = None) -> None:
    prefix = (len(header) if length is None else length).to_bytes(8, "little")
    (folder / _WEIGHTS).write_bytes(prefix + header + data)


def _first(entries: dict[str, Any]) -> dict[str, Any]:
    """The entry of the tensor that lies first in the file."""
    entries.pop("__metadata__", None)
    return min(entries.values(), key=lambda entry: entry["data_offsets"])


@bad(AdapterFormatError, "truncated")
def _empty_file(folder: Path) -> None:
    (folder / _WEIGHTS).write_bytes(b"")


@bad(AdapterFormatError, "not a safetensors file")
def _not_safetensors(folder: Path) -> None:
    (folder / _WEIGHTS).write_bytes(b"GGUF" * 1000)


@bad(AdapterFormatError, "truncated")
def _truncated_in_header(folder: Path) -> None:
    os.truncate(folder / _WEIGHTS, 100)


@bad(AdapterFormatError, "damaged")
def _truncated_in_data(folder: Path) -> None:
    os.truncate(folder / _WEIGHTS, (folder / _WEIGHTS).stat().st_size - 7)


@bad(AdapterFormatError, "damaged")
def _trailing_bytes(folder: Path) -> None:
    with (folder / _WEIGHTS).open("ab") as file:
        file.write(b"surplus")


@bad(AdapterFormatError, "header of")
def _header_length_hostile(folder: Path) -> None:
    header, data = _split(folder)
    _join(folder, header, data, length=(1 << 63) - 1)


@bad(AdapterFormatError, "header of")
def _header_over_the_limit(folder: Path) -> None:
    header, data = _split(folder)
    _join(folder, header, data, length=(16 << 20) + 1)
    os.truncate(folder / _WEIGHTS, 32 << 20)


@bad(AdapterFormatError, "header of")
def _header_longer_than_file(folder: Path) -> None:
    header, data = _split(folder)
    _join(folder, header, data, length=len(header) + len(data) + 1)


@bad(AdapterFormatError, "not valid JSON")
def _header_not_json(folder: Path) -> None:
    header, data = _split(folder)
    _join(folder, header.rstrip()[:-1], data)


@bad(AdapterFormatError, "twice")
def _header_names_tensor_twice(folder: Path) -> None:
    header, data = _split(folder)
    entry = next(iter(json.loads(header).items()))
    _join(folder, f"{{{json.dumps(entry[0])}:{json.dumps(entry[1])},".encode() + header[1:], data)


@bad(AdapterFormatError, "damaged")
def _offsets_out_of_file(folder: Path) -> None:
    def edit(entries: dict[str, Any]) -> None:
        entry = max(entries.values(), key=lambda entry: entry.get("data_offsets", []))
        begin, end = entry["data_offsets"]
        entry["data_offsets"] = [begin + (1 << 40), end + (1 << 40)]

    _edit_header(folder, edit)


@bad(AdapterFormatError, "overlap")
def _offsets_overlap(folder: Path) -> None:
    def edit(entries: dict[str, Any]) -> None:
        first = _first(entries)
        second = min(
            (entry for entry in entries.values() if entry is not first),
            key=lambda entry: entry["data_offsets"],
        )
        second["data_offsets"] = first["data_offsets"]

    _edit_header(folder, edit)


@bad(AdapterFormatError, "hole")
def _offsets_leave_a_hole(folder: Path) -> None:
    header, data = _split(folder)
    entries = json.loads(header)
    entries.pop("__metadata__", None)
    for entry in entries.values():
        entry["data_offsets"] = [offset + 64 for offset in entry["data_offsets"]]
    _join(folder, json.dumps(entries).encode(), bytes(64) + data)


@bad(AdapterFormatError, "data_offsets")
def _offsets_reversed(folder: Path) -> None:
    _edit_header(folder, lambda entries: _first(entries)["data_offsets"].reverse())


@bad(AdapterFormatError, "data_offsets")
def _offsets_disagree_with_shape(folder: Path) -> None:
    _edit_header(folder, lambda entries: _first(entries)["shape"].append(2))


@bad(AdapterFormatError, "unknown dtype")
def _dtype_unknown(folder: Path) -> None:
    _edit_header(folder, lambda entries: _first(entries).update(dtype="F31"))


@bad(AdapterFormatError, "shape")
def _shape_negative(folder: Path) -> None:
    _edit_header(folder, lambda entries: _first(entries).update(shape=[-1, -1]))


@bad(AdapterFormatError, "shape")
def _shape_of_many_dimensions(folder: Path) -> None:
    _edit_header(folder, lambda entries: _first(entries).update(shape=[1 << 62] * 1000))


@bad(AdapterFormatError, "convert to safetensors")
def _pickle_beside_weights(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")


@bad(AdapterFormatError, "convert to safetensors")
def _pickle_only(folder: Path) -> None:
    (folder / _WEIGHTS).rename(folder / "adapter.pt")


@bad(AdapterFormatError, "convert to safetensors")
def _pickle_renamed(folder: Path) -> None:
    (folder / _WEIGHTS).write_bytes(b"\x80\x02}q\x00." + bytes(1000))


@bad(AdapterFormatError, "convert to safetensors")
def _torch_zip_renamed(folder: Path) -> None:
    torch.save({"weight": torch.zeros(4)}, folder / _WEIGHTS)
