"""The table of bad adapters: the bad expert_cfg.json and the bad folders.

`bad_adapter_files` adds the bad tensors and safetensors files; import the table from
`adapter_factory`, where it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_esft.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    AdapterPathError,
    UnsupportedAdapterError,
    UserError,
)

_CONFIG = "expert_cfg.json"
_WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class BadAdapter:
    """One way to break a good adapter folder, in place."""

    damage: Callable[[Path], None]
    error: type[UserError]
    message: str
    """Part of the message that must be there, so that a test cannot pass for a wrong reason."""
    needs_dense_layer: bool = False
    """Only a base with a dense layer 0 (DeepSeek-V2) can meet this one."""


BAD_ADAPTERS: dict[str, BadAdapter] = {}


def corrupt(adapter_dir: Path, kind: str) -> type[UserError]:
    """Break the folder as `kind` says; returns the class of error that reading it must raise.

    The folder is as `write_random_adapter` wrote it, with one shard and no index.
    """
    BAD_ADAPTERS[kind].damage(adapter_dir)
    return BAD_ADAPTERS[kind].error


def bad(
    error: type[UserError], message: str, *, needs_dense_layer: bool = False
) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def register(damage: Callable[[Path], None]) -> Callable[[Path], None]:
        kind = damage.__name__.removeprefix("_")
        BAD_ADAPTERS[kind] = BadAdapter(damage, error, message, needs_dense_layer)
        return damage

    return register


def _edit_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / _CONFIG).read_text())
    edit(config)
    (folder / _CONFIG).write_text(json.dumps(config))


def _first_layer(config: dict[str, Any]) -> str:
    return next(layer for layer, ids in config["experts"].items() if ids)


@bad(AdapterFormatError, "expert_cfg.json")
def _missing_config(folder: Path) -> None:
    (folder / _CONFIG).unlink()


@bad(AdapterFormatError, "not valid JSON")
def _config_not_json(folder: Path) -> None:
    (folder / _CONFIG).write_text("{'experts': }")


@bad(AdapterFormatError, "not valid JSON")
def _config_not_utf8(folder: Path) -> None:
    (folder / _CONFIG).write_bytes(b'{"experts": "\xff\xfe"}')


@bad(AdapterFormatError, "not valid JSON")
def _config_too_deep(folder: Path) -> None:
    (folder / _CONFIG).write_text("[" * 200_000)


@bad(AdapterFormatError, "limit")
def _config_too_large(folder: Path) -> None:
    with (folder / _CONFIG).open("r+b") as file:
        file.truncate((16 << 20) + 1)


@bad(AdapterFormatError, "not an object")
def _config_is_a_list(folder: Path) -> None:
    (folder / _CONFIG).write_text("[1, 2]")


@bad(AdapterFormatError, "twice")
def _layer_listed_twice(folder: Path) -> None:
    (folder / _CONFIG).write_text('{"experts": {"1": [0], "1": [1]}}')


@bad(AdapterFormatError, "not a regular file")
def _config_is_a_pipe(folder: Path) -> None:
    (folder / _CONFIG).unlink()
    os.mkfifo(folder / _CONFIG)


@bad(AdapterFormatError, '"experts"')
def _no_experts_key(folder: Path) -> None:
    _edit_config(folder, lambda config: config.pop("experts"))


@bad(AdapterFormatError, '"experts"')
def _experts_is_a_list(folder: Path) -> None:
    _edit_config(folder, lambda config: config.update(experts=[[1, 2]]))


@bad(AdapterFormatError, "decimal")
def _layer_not_decimal(folder: Path) -> None:
    _edit_config(folder, lambda config: config["experts"].update(one=[0]))


@bad(AdapterFormatError, "decimal")
def _layer_negative(folder: Path) -> None:
    _edit_config(folder, lambda config: config["experts"].update({"-1": [0]}))


@bad(AdapterFormatError, "decimal")
def _layer_leading_zero(folder: Path) -> None:
    _edit_config(folder, lambda config: config["experts"].update({"01": [0]}))


@bad(AdapterFormatError, "not a list")
def _ids_not_a_list(folder: Path) -> None:
    _edit_config(folder, lambda config: config["experts"].update({_first_layer(config): 3}))


def _append_id(folder: Path, expert: object) -> None:
    _edit_config(folder, lambda config: config["experts"][_first_layer(config)].append(expert))


@bad(AdapterFormatError, "True")
def _id_is_a_bool(folder: Path) -> None:
    _append_id(folder, True)


@bad(AdapterFormatError, "'3'")
def _id_is_a_string(folder: Path) -> None:
    _append_id(folder, "3")


@bad(AdapterFormatError, "3.0")
def _id_is_a_float(folder: Path) -> None:
    _append_id(folder, 3.0)


@bad(AdapterFormatError, "-1")
def _id_negative(folder: Path) -> None:
    _append_id(folder, -1)


@bad(AdapterFormatError, "twice")
def _id_duplicate(folder: Path) -> None:
    _edit_config(
        folder,
        lambda config: config["experts"][_first_layer(config)].append(
            config["experts"][_first_layer(config)][0]
        ),
    )


@bad(AdapterFormatError, "empty")
def _no_expert_at_all(folder: Path) -> None:
    _edit_config(folder, lambda config: config.update(experts={"1": [], "2": []}))


@bad(AdapterMismatchError, "layer 9999")
def _layer_out_of_range(folder: Path) -> None:
    _edit_config(folder, lambda config: config["experts"].update({"9999": [0]}))


@bad(AdapterMismatchError, "dense", needs_dense_layer=True)
def _layer_is_dense(folder: Path) -> None:
    _edit_config(folder, lambda config: config["experts"].update({"0": [0]}))


@bad(AdapterMismatchError, "expert 9999")
def _expert_out_of_range(folder: Path) -> None:
    _append_id(folder, 9999)


@bad(UnsupportedAdapterError, "shared_experts")
def _tunes_shared_experts(folder: Path) -> None:
    _edit_config(folder, lambda config: config.update(shared_experts=True))


@bad(UnsupportedAdapterError, "non_expert_modules")
def _tunes_non_expert_modules(folder: Path) -> None:
    _edit_config(folder, lambda config: config.update(non_expert_modules=True))


@bad(AdapterFormatError, "shared_experts")
def _flag_is_a_string(folder: Path) -> None:
    _edit_config(folder, lambda config: config.update(shared_experts="false"))


@bad(AdapterPathError, "symbolic link")
def _weights_link_out_of_folder(folder: Path) -> None:
    outside = folder.parent / f"{folder.name}-outside.safetensors"
    shutil.move(folder / _WEIGHTS, outside)
    (folder / _WEIGHTS).symlink_to(outside)


@bad(AdapterPathError, "symbolic link")
def _config_link_out_of_folder(folder: Path) -> None:
    (folder / "config.json").symlink_to("/etc/hostname")


@bad(AdapterFormatError, "cannot read")
def _weights_dangling_link(folder: Path) -> None:
    (folder / _WEIGHTS).unlink()
    (folder / _WEIGHTS).symlink_to("gone")


@bad(AdapterFormatError, "not a regular file")
def _weights_is_a_pipe(folder: Path) -> None:
    (folder / _WEIGHTS).unlink()
    os.mkfifo(folder / _WEIGHTS)


@bad(AdapterFormatError, "not a regular file")
def _weights_is_a_folder(folder: Path) -> None:
    (folder / _WEIGHTS).unlink()
    (folder / _WEIGHTS).mkdir()


@bad(UnsupportedAdapterError, "auto_map")
def _asks_for_remote_code(folder: Path) -> None:
    (folder / "config.json").write_text('{"auto_map": {"AutoConfig": "x.Y"}}')
