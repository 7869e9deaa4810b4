"""MemoryShape as ranks declare it."""

from __future__ import annotations

import msgspec

from sgl_elastic.errors import WireError
from sgl_elastic.types import MemoryShape


def shape_from_json(data: bytes) -> MemoryShape:
    """Raises WireError for anything but a shape."""
    try:
        return msgspec.json.decode(data, type=MemoryShape)
    except msgspec.DecodeError as error:
        raise WireError(f"a rank declared no memory shape: {error}") from error
