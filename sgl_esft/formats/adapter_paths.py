"""Names and folders that clients give: which are accepted, and which files in them are read.

    request, /load_lora_adapter, command line -> [adapter_paths] -> adapter_format

A client of a server may be a stranger. Errors repeat what it sent and tell it nothing about the
rest of the file system: outside the root, existing and missing folders look the same.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from sgl_esft.errors import (
    AdapterFormatError,
    AdapterNameError,
    AdapterPathError,
    UnsupportedAdapterError,
)
from sgl_esft.formats.adapter_config import EXPERT_CONFIG_NAME, config_name_of
from sgl_esft.formats.strict_json import read_object, shown

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
PICKLE_SUFFIXES: Final = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})


def validate_adapter_name(name: object) -> str:
    """Return `name` if it is ``[A-Za-z0-9._-]{1,64}`` and neither ``.`` nor ``..``."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in {".", ".."}:
        raise AdapterNameError(
            f"adapter name {shown(name, 200)} is not allowed. "
            "Use 1 to 64 of the characters A-Z a-z 0-9 . _ - (not '.' or '..')."
        )
    return name


def resolve_adapter_path(path: str, root: Path | None) -> Path:
    """The real path of an adapter folder; AdapterPathError if there is none inside `root`.

    With a root, a relative path counts from it and the folder must lie in it after every symbolic
    link is followed. Without one, a relative path counts from the working directory.
    """
    if not path or "\0" in path:
        raise AdapterPathError(f"adapter path {shown(path, 200)} is not a path.")
    real = os.path.realpath(path if root is None else os.path.join(root, path))  # noqa: PTH118
    if root is not None and not _is_inside(real, os.path.realpath(root)):
        raise AdapterPathError(
            f"adapter path {shown(path, 200)} is not inside the adapter root (--adapter-root)."
        )
    if not os.path.exists(real):  # noqa: PTH110  # unlike Path.exists it never raises
        raise AdapterPathError(f"adapter path {shown(path, 200)} does not exist.")
    if not os.path.isdir(real):  # noqa: PTH112
        raise AdapterPathError(
            f"adapter path {shown(path, 200)} is not a folder. Name the folder that holds "
            f"{EXPERT_CONFIG_NAME}."
        )
    return Path(real)


def adapter_weight_files(path: Path) -> tuple[Path, ...]:
    """The adapter folder's ``*.safetensors`` in the order of their names; refuses unsafe folders.

    Raises AdapterPathError for a symbolic link that leaves the folder, AdapterFormatError for
    pickles and for a folder without safetensors, UnsupportedAdapterError for remote code. Other
    files and all subfolders are ignored.
    """
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise AdapterPathError(f"cannot list {shown(path.name, 200)}: {error.strerror}.") from error
    for entry in entries:
        _refuse_foreign_link(entry)
        if entry.suffix.lower() in PICKLE_SUFFIXES:
            raise AdapterFormatError(
                f"the adapter holds {entry.name}, a pickle file, which is never read: convert to "
                "safetensors and remove it."
            )
    _refuse_remote_code(path / "config.json")
    files = tuple(entry for entry in entries if entry.suffix == ".safetensors")
    if not files:
        raise AdapterFormatError(
            f"the adapter holds no *.safetensors beside {config_name_of(path)}."
        )
    return files


def _refuse_foreign_link(entry: Path) -> None:
    if entry.is_symlink() and not _is_inside(
        os.path.realpath(entry), os.path.realpath(entry.parent)
    ):
        raise AdapterPathError(
            f"{entry.name} is a symbolic link out of the adapter folder: copy the file instead "
            "(for a Hugging Face cache, download with --local-dir)."
        )


def _refuse_remote_code(config_path: Path) -> None:
    if not os.path.lexists(config_path):
        return
    if "auto_map" in read_object(config_path, AdapterFormatError):
        raise UnsupportedAdapterError(
            "the adapter's config.json has auto_map, which names code to run. No code of an "
            "adapter is ever run: remove auto_map, or the config.json, which is not needed."
        )


def _is_inside(real: str, root: str) -> bool:
    return real == root or real.startswith(root.rstrip("/") + "/")
