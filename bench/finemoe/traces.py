"""Real router choices, as expert maps: each token's six weights, 0 elsewhere, by layer.

    .npz -> [read_trace] -> Trace without repeated sequences -> [split] -> known, judged

For each task T a file has T_lengths [sequences], T_ids [L, N, k] uint8 and T_weights [L, N, k]
float16: the experts of N tokens by falling weight. The rest of a router's distribution was not
published, so these maps are poorer than a server's: of DeepSeek-V2-Lite they have 0.4 of the mass.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.common.record import RESULTS
from sgl_esft.offload.routing import Floats, Ints

NUM_EXPERTS = 64  # DeepSeek-V2-Lite's, a layer; a file does not say
KNOWN_SHARE = 0.7  # FineMoE, section 6.1


@dataclass(frozen=True)
class Trace:
    """Tokens of whole sequences, in order.

    `maps` [N, L, J] float32, each row of sum 1; `chosen` [N, L, J] bool, the k experts;
    `sequences` [N]: 0, 1, ..., the sequence that a token is of.
    """

    maps: Floats
    chosen: NDArray[np.bool_]
    sequences: Ints

    @property
    def num_sequences(self) -> int:
        return int(self.sequences.max(initial=-1)) + 1

    @property
    def top_k(self) -> int:
        return int(self.chosen[0, 0].sum())

    def of(self, sequences: Ints) -> Trace:
        """Only these sequences, in this order."""
        tokens = [np.flatnonzero(self.sequences == sequence) for sequence in sequences]
        everyone = np.concatenate(tokens)
        numbers = np.repeat(np.arange(len(tokens)), [len(each) for each in tokens])
        return Trace(self.maps[everyone], self.chosen[everyone], numbers)

    def steps(self) -> Iterator[Ints]:
        """Tokens of one decode step after the other, all sequences side by side."""
        _, starts, lengths = np.unique(self.sequences, return_index=True, return_counts=True)
        for position in range(lengths.max()):
            yield starts[lengths > position] + position

    def repeats_of(self, known: Trace) -> NDArray[np.bool_]:
        """[N]: whose experts are those of some known token in every layer."""
        seen = {token.tobytes() for token in known.chosen}
        return np.array([token.tobytes() in seen for token in self.chosen])


def tasks_of(path: Path) -> list[str]:
    """Names of a file's tasks."""
    with np.load(path) as file:
        return [name.removesuffix("_lengths") for name in file.files if name.endswith("_lengths")]


def read_trace(path: Path, task: str, most_sequences: int | None = None) -> Trace:
    """A task's first `most_sequences` that are no copies. Raises ValueError for a damaged file."""
    with np.load(path) as file:
        lengths, ids, weights = (file[f"{task}_{name}"] for name in ("lengths", "ids", "weights"))
    if ids.shape != weights.shape or ids.shape[1] != lengths.sum() or ids.max() >= NUM_EXPERTS:
        raise ValueError(
            f"{path.name}: {task} has ids {ids.shape} up to {ids.max()}, weights {weights.shape} "
            f"and {lengths.sum()} tokens: give a trace of {NUM_EXPERTS} experts a layer"
        )
    stops = np.cumsum(lengths)
    tokens = [np.arange(stop - length, stop) for stop, length in zip(stops, lengths, strict=True)]
    # A copy has the same ids; its weights may differ by the batch that it was computed in.
    first_of = {ids[:, each].tobytes(): each for each in reversed(tokens)}
    unlike = [each for each in tokens if first_of[ids[:, each].tobytes()] is each]
    kept = unlike[:most_sequences]
    everyone = np.concatenate(kept)
    numbers = np.repeat(np.arange(len(kept)), [len(each) for each in kept])
    return _trace(ids[:, everyone], weights[:, everyone], numbers)


def _trace(ids: NDArray[np.uint8], weights: NDArray[np.float16], sequences: Ints) -> Trace:
    """From arrays [L, N, k]."""
    by_token = np.swapaxes(ids, 0, 1).astype(np.int64)  # [N, L, k]
    values = np.swapaxes(weights, 0, 1).astype(np.float32)
    shape = (*by_token.shape[:2], NUM_EXPERTS)
    maps, chosen = np.zeros(shape, np.float32), np.zeros(shape, np.bool_)
    np.put_along_axis(maps, by_token, values / values.sum(axis=2, keepdims=True), axis=2)
    np.put_along_axis(chosen, by_token, True, axis=2)
    return Trace(maps, chosen, sequences)


def split(trace: Trace, seed: int) -> tuple[Trace, Trace]:
    """What fills the store, and what is predicted: 70 and 30% of the sequences, at random."""
    order = np.random.default_rng(seed).permutation(trace.num_sequences)
    cut = round(KNOWN_SHARE * len(order))
    return trace.of(order[:cut]), trace.of(order[cut:])


def options_of(
    description: str, figures: Sequence[str], arguments: Sequence[str] | None
) -> argparse.Namespace:
    """--trace, --figures, --seed, --quick, --out: of every bench that reads published traces."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--trace", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--figures", nargs="+", choices=list(figures), default=list(figures))
    parser.add_argument("--seed", type=int, default=0, help="of the split into known and judged")
    parser.add_argument("--quick", action="store_true", help="few sequences, few points")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(arguments)
