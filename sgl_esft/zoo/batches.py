"""Token batches for `train`: lines of like length together, so that little is padding.

A row starts at position 0 as a served prompt does, and is padded on the right, where a
causal model needs no mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random

import torch
from torch import Tensor

from sgl_esft.zoo import tokenizer
from sgl_esft.zoo.taskset import Example


@dataclass(frozen=True)
class Batch:
    """``ids [rows, length]`` int64 and each position's loss weight for predicting the next."""

    ids: Tensor
    weights: Tensor


def batches(
    examples: Iterator[Example], tokens: int, prompt_weight: float, seed: int
) -> Iterator[Batch]:
    """Endless batches of about `tokens` tokens, in a shuffled order of lengths.

    `prompt_weight` weighs the loss on the prompt's tokens; the answer's weigh 1.
    """
    random = Random(f"batches:{seed}")
    while True:
        window = sorted(islice(examples, 2048), key=lambda e: len(e.prompt) + len(e.answer))
        groups = list(_groups(window, tokens))
        random.shuffle(groups)
        for group in groups:
            yield to_batch(group, prompt_weight)


def to_batch(examples: list[Example], prompt_weight: float = 0.0) -> Batch:
    """One batch of `examples`, padded on the right to the longest."""
    length = max(len(e.prompt) + len(e.answer) + 1 for e in examples)
    ids = torch.full((len(examples), length), tokenizer.PAD_ID)
    weights = torch.zeros(len(examples), length)
    for row, example in enumerate(examples):
        line = tokenizer.encode(example.prompt + example.answer + tokenizer.END)
        start = len(example.prompt) - 1
        ids[row, : len(line)] = torch.tensor(line)
        weights[row, :start] = prompt_weight
        weights[row, start : len(line) - 1] = 1.0
    return Batch(ids, weights)


def by_length(examples: Iterable[Example]) -> list[list[Example]]:
    """`examples` in groups of equal length, so that a batch of one group has no padding."""
    groups: dict[int, list[Example]] = {}
    for example in examples:
        groups.setdefault(len(example.prompt) + len(example.answer), []).append(example)
    return list(groups.values())


def _groups(examples: list[Example], tokens: int) -> Iterator[list[Example]]:
    """Runs of `examples`, each of about `tokens` tokens once padded."""
    start = 0
    while start < len(examples):
        first = examples[start]
        rows = max(1, tokens // (len(first.prompt) + len(first.answer) + 1))
        yield examples[start : start + rows]
        start += rows
