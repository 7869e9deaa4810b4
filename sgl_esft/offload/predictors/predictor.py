"""What every predictor does in a step, and how what one has learned is kept in a file.

    StepTokens -> begin_step -> [Prediction]      before the first MoE layer
    router probabilities -> observe -> [Prediction]      after each one's router, 0 to L-1
    end_step      after the last one; forget      when requests have ended

A file of learned arrays is safetensors. It may come from anywhere, so its header is read without
trust, and its shapes and dtypes are compared with the model's before a byte of an array is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from sgl_esft.errors import ConfigError, InvariantError
from sgl_esft.formats.safetensors_header import read_header
from sgl_esft.offload.routing import Floats, Prediction, StepTokens

TINY: Final = np.float32(1e-30)  # in place of a norm of 0

Arrays = Mapping[str, NDArray[Any]]
Layouts = Mapping[str, tuple[str, tuple[int | None, ...]]]  # name -> dtype, shape; None: any length


class Predictor(Protocol):
    """One rank's predictor. Calls come in the order above; all are synchronous."""

    def begin_step(self, tokens: StepTokens) -> list[Prediction]:
        """A step begins, whether or not the one before was ended."""

    def observe(self, layer: int, probs: Floats) -> list[Prediction]:
        """`probs` [num_tokens, J] float32: the router's distribution at MoE layer `layer`.

        Predictions are of later layers only. Raises InvariantError out of order.
        """

    def observe_hidden(self, layer: int, hidden: Floats) -> list[Prediction]:
        """`hidden` [num_tokens, H] float32: what MoE layer `layer`'s router is given; after
        `observe`, and only for a predictor that `wants_hidden`.
        """

    @property
    def wants_hidden(self) -> bool:
        """Whether hidden states are worth handing over."""

    @property
    def wants_embeddings(self) -> bool:
        """Whether `begin_step` has use for the tokens' embeddings."""

    @property
    def is_quick(self) -> bool:
        """Whether `observe` takes less than to wake a thread for it; `end_step` may take more."""

    def end_step(self) -> None:
        """All layers ran; without this call nothing is learned from the step."""

    def forget(self, request_ids: Iterable[int]) -> None:
        """These requests have ended; their ids are never used again. Between two steps."""


def check_order(layer: int, expected: int, probs: Floats, shape: tuple[int, int]) -> None:
    """Raises InvariantError unless `probs` has this shape and is of the layer that is next."""
    if layer != expected or probs.shape != shape:
        raise InvariantError(
            f"a predictor was shown {probs.shape} of MoE layer {layer}, but {shape} of layer "
            f"{expected} comes next: call begin_step, then observe for every layer in order"
        )


def check_top_k(top_k: int, num_experts: int) -> None:
    """Raises ConfigError unless a token can have that many of the experts."""
    if not 1 <= top_k <= num_experts:
        raise ConfigError(f"{top_k} of {num_experts} experts a token: give 1 to {num_experts}")


def check_distance(distance: int, num_layers: int) -> None:
    """Raises ConfigError unless a layer that far ahead can exist."""
    if not 1 <= distance <= num_layers:
        raise ConfigError(
            f"a prefetch distance of {distance} in a model of {num_layers} MoE layers: give 1 to "
            f"{num_layers}"
        )


def unit(vectors: Floats) -> Floats:
    """`vectors` [n, E] at length 1; those of length 0 stay."""
    lengths = np.sqrt(np.einsum("ne,ne->n", vectors, vectors))
    units: Floats = vectors / np.maximum(lengths, TINY)[:, None]
    return units


def write_arrays(path: Path, arrays: Arrays, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file whole or not at all: what was at `path` stays until then."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    try:
        save_file(whole, temporary, metadata=dict(metadata or {}))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # there only after an error


def read_metadata(path: Path) -> dict[str, str]:
    """What `write_arrays` was given. Raises ConfigError for what is no sound safetensors file."""
    read_header(path, ConfigError)
    try:
        with safe_open(path, "numpy") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: {error}") from error


def check_about(path: Path, about: Mapping[str, str], what: str, remedy: str) -> None:
    """That a file says what `about` does: format, base, and the rest.

    Before sizes are compared: two bases may have the same. Raises ConfigError.
    """
    found = read_metadata(path)
    if found.get("format") != about["format"]:
        raise ConfigError(f"{path} is no file of {about['format']}: {remedy}")
    if found != about:
        raise ConfigError(
            f"{path} has {what} of the base {_said(found)}, and served is {_said(about)}: {remedy}"
        )


def _said(about: Mapping[str, str]) -> str:
    rest = [about[name] for name in sorted(about) if name not in ("format", "base")]
    return ", ".join([repr(about.get("base")), *rest])


def read_arrays(path: Path, layouts: Layouts, remedy: str) -> dict[str, NDArray[Any]]:
    """Exactly the arrays of `layouts`, all finite.

    Raises ConfigError, with the file, what it holds and `remedy`, where they are not that.
    """
    found = {
        name: (info.dtype, info.shape)
        for name, info in read_header(path, ConfigError).tensors.items()
    }
    if found.keys() != layouts.keys() or not all(
        _fits(found[name], layout) for name, layout in layouts.items()
    ):
        raise ConfigError(
            f"{path} holds {str(found)[:300]}, but {dict(layouts)} is needed: {remedy}"
        )
    arrays: dict[str, NDArray[Any]] = load_file(path)
    for name, array in arrays.items():
        # A search takes the largest score, and a NaN would be that for ever.
        if not np.isfinite(array).all():
            raise ConfigError(f"{path} has a NaN or an infinity in {name!r}: {remedy}")
    return arrays


def _fits(found: tuple[str, tuple[int, ...]], layout: tuple[str, tuple[int | None, ...]]) -> bool:
    (dtype, shape), (wanted_dtype, wanted) = found, layout
    same_rank = dtype == wanted_dtype and len(shape) == len(wanted)
    return same_rank and all(w in (None, n) for n, w in zip(shape, wanted, strict=True))
