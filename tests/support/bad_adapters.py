"""The table of bad adapters: every way to break a good adapter folder that we know of.

    BAD_ADAPTERS[kind] -> what the damage is, which error reading it must raise, and in which words
    BAD_WEIGHTS[kind]  -> the same for what only weights show, and not their headers
    corrupt(folder, kind) -> the error's class

A folder is as `write_random_adapter` wrote it, with one shard and no index.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sgl_esft.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    AdapterNotFiniteError,
    AdapterPathError,
    UnsupportedAdapterError,
    UserError,
)

_CONFIG = "expert_cfg.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLE = b"\x80\x02}q\x00."
_MAX_HEADER = 16 << 20
_SHARED_NAME = "model.layers.1.mlp.shared_experts.up_proj.weight"

Json = dict[str, Any]
Damage = Callable[[Path], object]


@dataclass(frozen=True)
class BadAdapter:
    """One way to break a good adapter folder, in place."""

    error: type[UserError]
    message: str
    """Part of the message that must be there, so that a test cannot pass for a wrong reason."""
    damage: Damage
    needs_dense_layer: bool = False
    """Only a base with a dense layer 0 (DeepSeek-V2) can meet this one."""


def corrupt(adapter_dir: Path, kind: str) -> type[UserError]:
    """Break the folder as `kind` says; returns the class of error that reading it must raise."""
    bad = {**BAD_ADAPTERS, **BAD_WEIGHTS}[kind]
    bad.damage(adapter_dir)
    return bad.error


# ---- what is done to a file of the folder ----


def _write(name: str, content: str | bytes) -> Damage:
    raw = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(raw)


def _remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def _replace(name: str, make: Callable[[Path], object]) -> Damage:
    """Something else in the file's place."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return damage


def _link_out_of_folder(folder: Path) -> None:
    outside = folder.parent / f"{folder.name}-outside.safetensors"
    shutil.move(folder / _WEIGHTS, outside)
    (folder / _WEIGHTS).symlink_to(outside)


# ---- expert_cfg.json ----


def _config(edit: Callable[[Json], object]) -> Damage:
    def damage(folder: Path) -> None:
        config = json.loads((folder / _CONFIG).read_text())
        edit(config)
        (folder / _CONFIG).write_text(json.dumps(config))

    return damage


def _experts(**ids_by_layer: Any) -> Damage:
    """More entries below "experts"."""
    return _config(lambda config: config["experts"].update(ids_by_layer))


def _first_layer(config: Json) -> str:
    return next(layer for layer, ids in config["experts"].items() if ids)


def _append_id(expert: object) -> Damage:
    return _config(lambda config: config["experts"][_first_layer(config)].append(expert))


def _repeat_first_id(config: Json) -> None:
    ids = config["experts"][_first_layer(config)]
    ids.append(ids[0])


# ---- tensors ----


def _tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = {name: tensor.clone() for name, tensor in load_file(folder / _WEIGHTS).items()}
        edit(tensors)
        save_file(tensors, folder / _WEIGHTS)

    return damage


def _first_tensor(change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return _tensors(lambda found: found.update({min(found): change(found[min(found)])}))


def _last_value(value: float) -> Damage:
    """Of the last tensor in the order of names, the last value: no piece may be left out."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[max(tensors)].view(-1)[-1] = value

    return _tensors(change)


def _rename_first(tensors: dict[str, torch.Tensor]) -> None:
    name = min(tensors)
    tensors[name.removeprefix("model.")] = tensors.pop(name)


def _second_shard(folder: Path) -> None:
    name, tensor = min(load_file(folder / _WEIGHTS).items())
    save_file({name: tensor.clone()}, folder / "second.safetensors")


def _index(edit: Callable[[Json], object]) -> Damage:
    def damage(folder: Path) -> None:
        weight_map = dict.fromkeys(load_file(folder / _WEIGHTS), _WEIGHTS)
        edit(weight_map)
        (folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    return damage


# ---- the bytes of a safetensors file: 8 of the header's length, header, tensors ----


def _bytes(change: Callable[[bytes, bytes], tuple[int, bytes, bytes]]) -> Damage:
    """(header, tensors) -> the length that the file tells, header, tensors."""

    def damage(folder: Path) -> None:
        raw = (folder / _WEIGHTS).read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        length, header, data = change(raw[8:end], raw[end:])
        (folder / _WEIGHTS).write_bytes(length.to_bytes(8, "little") + header + data)

    return damage


def _header(edit: Callable[[Json], object], *, more_data: bytes = b"") -> Damage:
    """The header as `edit` leaves it; the tensors' bytes stay, behind `more_data`."""

    def change(header: bytes, data: bytes) -> tuple[int, bytes, bytes]:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        edit(entries)
        raw = json.dumps(entries).encode()
        return len(raw), raw, more_data + data

    return _bytes(change)


def _tells_length(length_of: Callable[[bytes, bytes], int]) -> Damage:
    return _bytes(lambda header, data: (length_of(header, data), header, data))


def _by_offset(entries: Json) -> list[Json]:
    """The entries in the order in which their tensors lie in the file."""
    return sorted(entries.values(), key=lambda entry: entry["data_offsets"])


def _move(entries: list[Json], num_bytes: int) -> None:
    for entry in entries:
        entry["data_offsets"] = [offset + num_bytes for offset in entry["data_offsets"]]


def _overlap(entries: Json) -> None:
    first, second, *_ = _by_offset(entries)
    second["data_offsets"] = first["data_offsets"]


def _name_twice(header: bytes, data: bytes) -> tuple[int, bytes, bytes]:
    name, entry = next(iter(json.loads(header).items()))
    twice = f"{{{json.dumps(name)}:{json.dumps(entry)},".encode() + header[1:]
    return len(twice), twice, data


def _without_brace(header: bytes, data: bytes) -> tuple[int, bytes, bytes]:
    cut = header.rstrip()[:-1]
    return len(cut), cut, data


def _over_the_limit(folder: Path) -> None:
    _tells_length(lambda header, data: _MAX_HEADER + 1)(folder)
    os.truncate(folder / _WEIGHTS, 2 * _MAX_HEADER)


def _cut(folder: Path) -> None:
    os.truncate(folder / _WEIGHTS, (folder / _WEIGHTS).stat().st_size - 7)


def _surplus_bytes(folder: Path) -> None:
    with (folder / _WEIGHTS).open("ab") as file:
        file.write(b"surplus")


def _first_entry(**fields: Any) -> Damage:
    return _header(lambda entries: _by_offset(entries)[0].update(fields))


_FORMAT, _MISMATCH = AdapterFormatError, AdapterMismatchError
_PATH, _UNSUPPORTED = AdapterPathError, UnsupportedAdapterError

BAD_ADAPTERS: Mapping[str, BadAdapter] = {
    # expert_cfg.json
    "missing_config": BadAdapter(_FORMAT, "expert_cfg.json", _remove(_CONFIG)),
    "config_not_json": BadAdapter(_FORMAT, "not valid JSON", _write(_CONFIG, "{'experts': }")),
    "config_not_utf8": BadAdapter(
        _FORMAT, "not valid JSON", _write(_CONFIG, b'{"experts": "\xff\xfe"}')
    ),
    "config_too_deep": BadAdapter(_FORMAT, "not valid JSON", _write(_CONFIG, "[" * 200_000)),
    "config_too_large": BadAdapter(
        _FORMAT, "limit", lambda folder: os.truncate(folder / _CONFIG, (16 << 20) + 1)
    ),
    "config_is_a_list": BadAdapter(_FORMAT, "not an object", _write(_CONFIG, "[1, 2]")),
    "layer_listed_twice": BadAdapter(
        _FORMAT, "twice", _write(_CONFIG, '{"experts": {"1": [0], "1": [1]}}')
    ),
    "config_is_a_pipe": BadAdapter(_FORMAT, "not a regular file", _replace(_CONFIG, os.mkfifo)),
    "no_experts_key": BadAdapter(_FORMAT, '"experts"', _config(lambda c: c.pop("experts"))),
    "experts_is_a_list": BadAdapter(
        _FORMAT, '"experts"', _config(lambda config: config.update(experts=[[1, 2]]))
    ),
    "layer_not_decimal": BadAdapter(_FORMAT, "decimal", _experts(one=[0])),
    "layer_negative": BadAdapter(_FORMAT, "decimal", _experts(**{"-1": [0]})),
    "layer_leading_zero": BadAdapter(_FORMAT, "decimal", _experts(**{"01": [0]})),
    "ids_not_a_list": BadAdapter(
        _FORMAT, "not a list", _config(lambda c: c["experts"].update({_first_layer(c): 3}))
    ),
    "id_is_a_bool": BadAdapter(_FORMAT, "True", _append_id(True)),
    "id_is_a_string": BadAdapter(_FORMAT, "'3'", _append_id("3")),
    "id_is_a_float": BadAdapter(_FORMAT, "3.0", _append_id(3.0)),
    "id_negative": BadAdapter(_FORMAT, "-1", _append_id(-1)),
    "id_duplicate": BadAdapter(_FORMAT, "twice", _config(_repeat_first_id)),
    "no_expert_at_all": BadAdapter(
        _FORMAT, "empty", _config(lambda config: config.update(experts={"1": [], "2": []}))
    ),
    "layer_out_of_range": BadAdapter(_MISMATCH, "layer 9999", _experts(**{"9999": [0]})),
    "layer_is_dense": BadAdapter(
        _MISMATCH, "dense", _experts(**{"0": [0]}), needs_dense_layer=True
    ),
    "expert_out_of_range": BadAdapter(_MISMATCH, "expert 9999", _append_id(9999)),
    "tunes_non_expert_modules": BadAdapter(
        _UNSUPPORTED, "non_expert_modules", _config(lambda c: c.update(non_expert_modules=True))
    ),
    "flag_is_a_string": BadAdapter(
        _FORMAT, "shared_experts", _config(lambda c: c.update(shared_experts="false"))
    ),
    # the folder
    "weights_link_out_of_folder": BadAdapter(_PATH, "symbolic link", _link_out_of_folder),
    "config_link_out_of_folder": BadAdapter(
        _PATH, "symbolic link", lambda f: (f / "config.json").symlink_to("/etc/hostname")
    ),
    "weights_dangling_link": BadAdapter(
        _FORMAT, "cannot read", _replace(_WEIGHTS, lambda path: path.symlink_to("gone"))
    ),
    "weights_is_a_pipe": BadAdapter(_FORMAT, "not a regular file", _replace(_WEIGHTS, os.mkfifo)),
    "weights_is_a_folder": BadAdapter(
        _FORMAT, "not a regular file", _replace(_WEIGHTS, lambda path: path.mkdir())
    ),
    "asks_for_remote_code": BadAdapter(
        _UNSUPPORTED, "auto_map", _write("config.json", '{"auto_map": {"AutoConfig": "x.Y"}}')
    ),
    # tensors and the index
    "missing_tensor": BadAdapter(_FORMAT, "missing", _tensors(lambda found: found.pop(min(found)))),
    "surplus_tensor": BadAdapter(
        _FORMAT, "lm_head.weight", _tensors(lambda t: t.update({"lm_head.weight": torch.zeros(2)}))
    ),
    "shared_experts_not_told": BadAdapter(
        _FORMAT, _SHARED_NAME, _tensors(lambda t: t.update({_SHARED_NAME: torch.zeros(2)}))
    ),
    "wrong_shape": BadAdapter(_MISMATCH, "shape", _first_tensor(lambda t: t[:-1].contiguous())),
    "transposed": BadAdapter(_MISMATCH, "shape", _first_tensor(lambda t: t.T.contiguous())),
    "wrong_dtype": BadAdapter(
        _MISMATCH,
        "dtype",
        _tensors(lambda found: found.update({n: t.half() for n, t in found.items()})),
    ),
    "mixed_prefixes": BadAdapter(_FORMAT, "two styles", _tensors(_rename_first)),
    "tensor_in_two_shards": BadAdapter(_FORMAT, "again", _second_shard),
    "no_weights": BadAdapter(_FORMAT, "no *.safetensors", _remove(_WEIGHTS)),
    "index_names_missing_file": BadAdapter(
        _FORMAT, "index", _index(lambda files: files.update({min(files): "gone.safetensors"}))
    ),
    "index_lacks_tensor": BadAdapter(_FORMAT, "index", _index(lambda files: files.pop(min(files)))),
    "index_has_surplus_tensor": BadAdapter(
        _FORMAT, "index", _index(lambda files: files.update({"x.weight": _WEIGHTS}))
    ),
    "index_without_map": BadAdapter(_FORMAT, "weight_map", _write(_INDEX, "{}")),
    # safetensors' bytes
    "empty_file": BadAdapter(_FORMAT, "truncated", _write(_WEIGHTS, b"")),
    "not_safetensors": BadAdapter(
        _FORMAT, "not a safetensors file", _write(_WEIGHTS, b"GGUF" * 1000)
    ),
    "truncated_in_header": BadAdapter(
        _FORMAT, "truncated", lambda folder: os.truncate(folder / _WEIGHTS, 100)
    ),
    "truncated_in_data": BadAdapter(_FORMAT, "damaged", _cut),
    "trailing_bytes": BadAdapter(_FORMAT, "damaged", _surplus_bytes),
    "header_length_hostile": BadAdapter(
        _FORMAT, "header of", _tells_length(lambda header, data: (1 << 63) - 1)
    ),
    "header_over_the_limit": BadAdapter(_FORMAT, "header of", _over_the_limit),
    "header_longer_than_file": BadAdapter(
        _FORMAT, "header of", _tells_length(lambda header, data: len(header) + len(data) + 1)
    ),
    "header_not_json": BadAdapter(_FORMAT, "not valid JSON", _bytes(_without_brace)),
    "header_names_tensor_twice": BadAdapter(_FORMAT, "twice", _bytes(_name_twice)),
    "offsets_out_of_file": BadAdapter(
        _FORMAT, "damaged", _header(lambda entries: _move(_by_offset(entries)[-1:], 1 << 40))
    ),
    "offsets_overlap": BadAdapter(_FORMAT, "overlap", _header(_overlap)),
    "offsets_leave_a_hole": BadAdapter(
        _FORMAT,
        "hole",
        _header(lambda entries: _move(_by_offset(entries), 64), more_data=bytes(64)),
    ),
    "offsets_reversed": BadAdapter(
        _FORMAT, "data_offsets", _header(lambda e: _by_offset(e)[0]["data_offsets"].reverse())
    ),
    "offsets_disagree_with_shape": BadAdapter(
        _FORMAT, "data_offsets", _header(lambda entries: _by_offset(entries)[0]["shape"].append(2))
    ),
    "dtype_unknown": BadAdapter(_FORMAT, "unknown dtype", _first_entry(dtype="F31")),
    "shape_negative": BadAdapter(_FORMAT, "shape", _first_entry(shape=[-1, -1])),
    "shape_of_many_dimensions": BadAdapter(_FORMAT, "shape", _first_entry(shape=[1 << 62] * 1000)),
    # pickles
    "pickle_beside_weights": BadAdapter(
        _FORMAT, "convert to safetensors", _write("pytorch_model.bin", _PICKLE)
    ),
    "pickle_only": BadAdapter(
        _FORMAT, "convert to safetensors", lambda f: (f / _WEIGHTS).rename(f / "adapter.pt")
    ),
    "pickle_renamed": BadAdapter(
        _FORMAT, "convert to safetensors", _write(_WEIGHTS, _PICKLE + bytes(1000))
    ),
    "torch_zip_renamed": BadAdapter(
        _FORMAT,
        "convert to safetensors",
        lambda folder: torch.save({"weight": torch.zeros(4)}, folder / _WEIGHTS),
    ),
}

BAD_WEIGHTS: Mapping[str, BadAdapter] = {
    "a_nan": BadAdapter(AdapterNotFiniteError, "expert", _last_value(float("nan"))),
    "an_infinity": BadAdapter(AdapterNotFiniteError, "expert", _last_value(float("-inf"))),
}
