"""What was routed where, in a folder: written by a server, read by the simulator and the benches.

    a rank's steps --[TraceWriter]--> header.json, part-*.safetensors --[read_trace]--> events

There is no text in it and no token id: expert ids, the router's distributions for decoded tokens,
whose request and which adapter slot, a number made of each adapter's name, and a projection of each
token's embedding, by which somebody who has the model could tell which token it was. Distributions
and projections are kept in float16; a server whose decisions are recorded decides by the same
rounded numbers (`rounded`).
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from sgl_esft.errors import ConfigError
from sgl_esft.formats.safetensors_header import read_header
from sgl_esft.formats.strict_json import read_object
from sgl_esft.offload.routing import Floats, Ints

logger = logging.getLogger(__name__)

FORMAT: Final = "sgl-esft routing trace 1"
HEADER_NAME: Final = "header.json"
STEPS_PER_PART: Final = 256
_STEP, _CHANGE = 0, 1

Array = NDArray[Any]


@dataclass(frozen=True)
class TraceHeader:
    """The model and the server that a trace is of. Layers are MoE layers, numbered from 0."""

    num_layers: int
    num_experts: int
    top_k: int
    num_slots: int  # virtual slots of a layer
    num_base: int  # of them the base's
    embedding_size: int
    note: str = ""  # what it was recorded of, in words


@dataclass(frozen=True)
class TraceStep:
    """One forward pass of T tokens, of which the first n are decoded ones that are predicted for.

    `topk_ids` [L, T, k], -1 = none; `adapter_slots` [T], -1 = base; `probs` [L, n, J];
    `embeddings` [n, E].
    """

    request_ids: tuple[int, ...]
    adapter_slots: Ints
    topk_ids: Ints
    probs: Floats
    embeddings: Floats


@dataclass(frozen=True)
class SlotChange:
    """Other adapters are in the slots from now on.

    `maps` [L, N + 1, M]: the slot of each expert id by adapter slot, the last row the base's, -1 =
    another rank's. `forgotten`: (layer, slot) of experts that are not what they were. `owners`: of
    each adapter slot, `StepTokens.owners`; () = a trace that does not say.
    """

    maps: Ints
    forgotten: tuple[tuple[int, int], ...] = ()
    owners: tuple[int, ...] = ()


TraceEvent = TraceStep | SlotChange


def rounded(values: Floats) -> Floats:
    """As a trace keeps them."""
    return values.astype(np.float16).astype(np.float32)


class TraceWriter:
    """Appends events to a new folder until `max_bytes` are written; then it says so and stops."""

    def __init__(self, folder: Path, header: TraceHeader, max_bytes: int) -> None:
        """Raises ConfigError for a folder that has something in it."""
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty: name a new folder for the trace")
        (folder / HEADER_NAME).write_text(json.dumps({"format": FORMAT, **asdict(header)}))
        self._folder = folder
        self._left_bytes = max_bytes
        self._events: list[TraceEvent] = []
        self._num_parts = 0
        self._lock = threading.Lock()
        self.is_full = False

    def add(self, event: TraceEvent) -> None:
        """Keep an event; a part is written when it has enough of them."""
        with self._lock:
            if not self.is_full:
                self._events.append(event)
            is_due = len(self._events) >= STEPS_PER_PART
        if is_due:
            self.flush()

    def flush(self) -> None:
        """Write what is kept. Any thread may call it."""
        with self._lock:
            events, self._events = self._events, []
            if events and not self.is_full:
                self._write(events)

    def _write(self, events: Sequence[TraceEvent]) -> None:
        arrays = _arrays_of(events)
        self._left_bytes -= sum(array.nbytes for array in arrays.values())
        if self._left_bytes < 0:
            self.is_full = True
            logger.warning("the routing trace in %s is full, and ends here", self._folder)
            return
        path = self._folder / f"part-{self._num_parts:06d}.safetensors"
        partial = path.with_suffix(".partial")
        save_file(arrays, partial)
        partial.replace(path)
        self._num_parts += 1


def _arrays_of(events: Sequence[TraceEvent]) -> dict[str, Array]:
    steps = [event for event in events if isinstance(event, TraceStep)]
    changes = [event for event in events if isinstance(event, SlotChange)]
    arrays: dict[str, Array] = {
        "kinds": np.array(
            [_STEP if isinstance(event, TraceStep) else _CHANGE for event in events], np.uint8
        )
    }
    if steps:
        arrays |= _arrays_of_steps(steps)
    if changes:
        forgotten = [
            (number, *pair) for number, change in enumerate(changes) for pair in change.forgotten
        ]
        maps = np.stack([change.maps for change in changes])
        # safetensors saves the memory as it lies, whatever the strides say.
        arrays["maps"] = np.ascontiguousarray(maps.astype(np.int32))
        arrays["forgotten"] = np.array(forgotten, np.int32).reshape(-1, 3)
        arrays["owners"] = np.array([change.owners for change in changes], np.int64)
    return arrays


def _arrays_of_steps(steps: Sequence[TraceStep]) -> dict[str, Array]:
    def joined(parts: Sequence[Array], dtype: Any, axis: int = 0) -> Array:
        return np.ascontiguousarray(np.concatenate(parts, axis=axis).astype(dtype))

    return {
        "num_tokens": np.array([len(step.adapter_slots) for step in steps], np.int32),
        "num_predicted": np.array([len(step.request_ids) for step in steps], np.int32),
        "request_ids": joined([np.array(s.request_ids, np.int64) for s in steps], np.int64),
        "adapter_slots": joined([step.adapter_slots for step in steps], np.int16),
        "topk_ids": joined([step.topk_ids for step in steps], np.int16, axis=1),
        "probs": joined([step.probs for step in steps], np.float16, axis=1),
        "embeddings": joined([step.embeddings for step in steps], np.float16),
    }


def read_header_of(folder: Path) -> TraceHeader:
    """Raises ConfigError for a folder that is no trace of this version."""
    found = dict(read_object(folder / HEADER_NAME, ConfigError))
    if found.pop("format", None) != FORMAT:
        raise ConfigError(f"{folder} is no {FORMAT}: record it again")
    try:
        return TraceHeader(**found)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(f"{folder / HEADER_NAME}: {error}") from error


def read_trace(folder: Path) -> Iterator[TraceEvent]:
    """All events in order. Raises ConfigError for a damaged part."""
    header = read_header_of(folder)
    for path in sorted(folder.glob("part-*.safetensors")):
        read_header(path, ConfigError)  # before its numbers are believed
        try:
            yield from _events_of(load_file(path), header)
        except (KeyError, ValueError, IndexError) as error:
            raise ConfigError(f"{path.name} is damaged: {error!r}") from error


def _events_of(arrays: Mapping[str, Array], header: TraceHeader) -> Iterator[TraceEvent]:
    steps, changes = _steps_of(arrays, header), _changes_of(arrays)
    for kind in arrays["kinds"].tolist():
        yield next(steps) if kind == _STEP else next(changes)


def _steps_of(arrays: Mapping[str, Array], header: TraceHeader) -> Iterator[TraceStep]:
    if "num_tokens" not in arrays:
        return
    if arrays["topk_ids"].shape[0] != header.num_layers:
        raise ValueError(f"{arrays['topk_ids'].shape[0]} layers, not {header.num_layers}")
    token = predicted = 0
    counts = zip(arrays["num_tokens"].tolist(), arrays["num_predicted"].tolist(), strict=True)
    for num_tokens, num_predicted in counts:
        tokens = slice(token, token + num_tokens)
        of = slice(predicted, predicted + num_predicted)
        yield TraceStep(
            tuple(arrays["request_ids"][of].tolist()),
            arrays["adapter_slots"][tokens].astype(np.int64),
            arrays["topk_ids"][:, tokens].astype(np.int64),
            arrays["probs"][:, of].astype(np.float32),
            arrays["embeddings"][of].astype(np.float32),
        )
        token, predicted = tokens.stop, of.stop


def _changes_of(arrays: Mapping[str, Array]) -> Iterator[SlotChange]:
    if "maps" not in arrays:
        return
    forgotten = arrays["forgotten"].tolist()
    nobody = np.zeros((len(arrays["maps"]), 0), np.int64)  # a trace of before there were owners
    owners = arrays.get("owners", nobody).tolist()
    for number, maps in enumerate(arrays["maps"]):
        pairs = tuple((layer, slot) for of, layer, slot in forgotten if of == number)
        yield SlotChange(maps.astype(np.int64), pairs, tuple(owners[number]))
