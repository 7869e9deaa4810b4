"""Safetensors files whose header is known before their tensors are: what is common to writers.

write.py, adapter_copy.py -> [file_header] -> header, then each tensor at its place
                          -> [told_of_room] -> ConfigError where a disk is full
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

from sgl_esft.byte_size import gigabytes
from sgl_esft.errors import ConfigError
from sgl_esft.formats.expert_scheme import ExpertPart
from sgl_esft.formats.safetensors_header import (
    DATA_ALIGNMENT,
    ITEM_BYTES,
    header_block,
)

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def file_header(tensors: Mapping[str, ExpertPart]) -> tuple[bytes, dict[str, int]]:
    """A file's first bytes, and where each tensor begins, by name.

    Those come first that keep what follows at DATA_ALIGNMENT, then wider types: torch can map a
    tensor in place only where its type is aligned.
    """
    in_order = sorted(tensors.items(), key=_place_of)
    return header_block(in_order)


def _place_of(item: tuple[str, ExpertPart]) -> tuple[bool, int]:
    part = item[1]
    return part.num_bytes % DATA_ALIGNMENT != 0, -ITEM_BYTES[part.dtype]


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor as a file holds it."""
    return memoryview(tensor.flatten().view(torch.uint8).numpy().data)


def write_json(path: Path, value: object) -> None:
    """Indented, as Hugging Face writes a checkpoint's."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def check_room(out_dir: Path, num_bytes: int) -> None:
    """Raises ConfigError if there is not so much: told at once, not after most was written."""
    parent = next(each for each in out_dir.absolute().parents if each.exists())
    num_free = shutil.disk_usage(parent).free
    if num_bytes > num_free:
        raise _no_room(out_dir, num_bytes, f"{gigabytes(num_free)} are free in {parent}")


@contextmanager
def told_of_room(out_dir: Path, num_bytes: int) -> Iterator[None]:
    """Turns an OSError of a full disk into ConfigError; others pass."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            reason = f"the system says: {error.strerror}"
            raise _no_room(out_dir, num_bytes, reason) from error
        raise


def _no_room(out_dir: Path, num_bytes: int, reason: str) -> ConfigError:
    return ConfigError(
        f"{out_dir} needs {gigabytes(num_bytes)}, but {reason}. Name an --out with more room."
    )
