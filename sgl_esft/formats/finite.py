"""Whether weights are finite: one NaN or infinity spoils every token that meets its expert.

    host_cache.py --each piece as it is read--> [FiniteCheck] --> AdapterNotFiniteError
    launch, inspect --manifest--> [check_weights] --'

A float's exponent bits are all ones in a NaN or an infinity and in no other value; float8_e4m3fn
has no infinity, and all ones, the sign apart, are its NaN. So the check is the largest of these
bits: exact, the same for each type, and within the processor's cache. Integers are always finite.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from sgl_esft.errors import AdapterFormatError, AdapterNotFiniteError
from sgl_esft.formats.checkpoint import TensorBytes
from sgl_esft.formats.manifest import AdapterManifest, TensorLocation
from sgl_esft.formats.model_spec import ExpertTensorKey, SharedTensorKey
from sgl_esft.formats.safetensors_header import ITEM_BYTES, read_header

PIECE_BYTES: Final = 256 << 10

# By dtype: an integer of its width, and its exponent's bits.
_EXPONENTS: Final[dict[str, tuple[Any, int]]] = {
    "float32": (np.uint32, 0x7F80_0000),
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
    "float8_e4m3fn": (np.uint8, 0x7F),
}

_INTEGERS: Final = frozenset({"int8", "int32"})


class FiniteCheck:
    """Looks at values of one type. Not for two threads at a time."""

    def __init__(self, dtype: str) -> None:
        """dtype: of weights, or of what they become in an `ExpertScheme`."""
        self.item_bytes: Final = ITEM_BYTES[dtype]
        self._is_integer = dtype in _INTEGERS
        integer, mask = (np.uint8, 0) if self._is_integer else _EXPONENTS[dtype]
        self._mask = integer(mask)
        self._exponents = np.empty(PIECE_BYTES // self._mask.itemsize, dtype=integer)

    def holds(self, values: bytes | memoryview) -> bool:
        """Whether all are finite; `values` is a whole number of them."""
        if self._is_integer or not values:
            return True
        bits = np.frombuffer(values, dtype=self._exponents.dtype)
        step = len(self._exponents)
        return all(self._holds(bits[at : at + step]) for at in range(0, len(bits), step))

    def _holds(self, bits: np.ndarray[Any, Any]) -> bool:
        exponents = np.bitwise_and(bits, self._mask, out=self._exponents[: len(bits)])
        return bool(exponents.max() != self._mask)


def not_finite(adapter: str, key: ExpertTensorKey | SharedTensorKey) -> AdapterNotFiniteError:
    """What is raised for this tensor."""
    layer, *expert, proj = key
    whose = f"expert {expert[0]}" if expert else "shared experts"
    return AdapterNotFiniteError(
        f"adapter {adapter!r} has a NaN or an infinity in layer {layer}, {whose}, "
        f"{proj} projection: save it from a checkpoint before its loss diverged, or train it "
        "with a lower learning rate."
    )


def check_weights(name: str, manifest: AdapterManifest) -> None:
    """Read all of a validated adapter's tensors, a few megabytes at a time.

    Raises AdapterNotFiniteError, or AdapterFormatError when a file changed since.
    """
    headers = {file: read_header(file) for file in manifest.files}
    locations: list[tuple[ExpertTensorKey | SharedTensorKey, TensorLocation]]
    locations = [*manifest.tensors.items(), *manifest.scales.items(), *manifest.shared.items()]
    checks = {dtype: FiniteCheck(dtype) for dtype in {each.dtype for _, each in locations}}
    for key, location in locations:
        info = location.info_in(headers[location.file])
        chunks = TensorBytes(location.file, info).chunks()
        try:
            is_finite = all(map(checks[location.dtype].holds, chunks))
        except OSError as error:
            raise AdapterFormatError(f"{location.file.name} cannot be read: {error}.") from error
        if not is_finite:
            raise not_finite(name, key)
