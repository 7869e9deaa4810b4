"""JSON and files from strangers, read so that nothing hostile gets further than an error.

    adapter folder, checkpoint -> [strict_json] -> model_spec, adapter_config, safetensors_header

Python's own reader lets a key appear twice (the last one wins) and recurses as deep as the text
says. Every function takes the error class to raise, because the same damage is an
`AdapterFormatError` in an adapter and an `UnsupportedModelError` in a base checkpoint. Messages
name files without their folders: a server's clients may read them.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

from sgl_esft.errors import UserError

JsonObject: TypeAlias = dict[str, object]

# An index of a thousand shards and a config with every option are both far below this.
MAX_JSON_BYTES: Final = 16 << 20


def shown(value: object, max_chars: int = 100) -> str:
    """The value seen, short enough for a message."""
    text = repr(value)
    return text if len(text) <= max_chars else f"{text[:max_chars]}..."


def open_regular(path: Path, error: type[UserError]) -> BinaryIO:
    """Open a regular file for reading; `error` if it is missing or anything else.

    Never blocks: a named pipe in place of a file would otherwise hold the reader for ever.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as cause:
        reason = cause.strerror if isinstance(cause, OSError) else str(cause)
        raise error(f"cannot read {path.name}: {reason}.") from cause
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise error(f"{path.name} is not a regular file.")
    return os.fdopen(descriptor, "rb")


def read_object(path: Path, error: type[UserError]) -> JsonObject:
    """Read a file that holds one JSON object of at most `MAX_JSON_BYTES`."""
    with open_regular(path, error) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes > MAX_JSON_BYTES:
            raise error(f"{path.name} has {num_bytes} bytes, the limit is {MAX_JSON_BYTES}.")
        text = file.read(num_bytes)
    return parse_object(text, path.name, error)


def parse_object(text: bytes, what: str, error: type[UserError]) -> JsonObject:
    """Parse UTF-8 JSON that must be one object with no key twice; `what` names it in errors."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as cause:
        raise error(f"{what} is not valid JSON: {cause}.") from cause
    if not isinstance(value, dict):
        raise error(f"{what} holds a JSON {type(value).__name__}, not an object.")
    return value


def _unique_keys(pairs: list[tuple[str, object]]) -> JsonObject:
    result: JsonObject = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key[:200]!r} appears twice")
        result[key] = value
    return result
