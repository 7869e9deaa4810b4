"""`sgl-esft score`: how much each expert has to do with the examples.

    base, examples --[score]--> {"gate_scores": ..., "token_scores": ...} -> select

The frozen base reads prompts and answers. An expert's *token* score is its share of the router's
choices, a layer's sum is 1; its *gate* score is its mean router weight over all tokens, 0 where it
is not chosen: what ESFT publishes. No more is kept than two sums an expert.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sgl_esft.errors import ConfigError
from sgl_esft.tune.base import Base, load_base
from sgl_esft.tune.examples import Example, read_examples
from sgl_esft.tune.experts import watch_routers
from sgl_esft.tune.tokens import TokenRow, collate

Report = Callable[[str], None]
_REPORT_EVERY = 20  # batches


@dataclass(frozen=True)
class Sampling:
    """How many examples are read, spread over the file, and how long one may be, in tokens."""

    samples: int = 512
    max_length: int = 4096
    batch_tokens: int = 4096


@dataclass
class _Sums:
    gate: Tensor  # [experts] float64
    chosen: Tensor  # [experts] float64


def score(
    base_dir: Path, data: Path, out: Path, sampling: Sampling, device: str, report: Report
) -> int:
    """Write both scores to `out`; returns the number of examples read. Raises ConfigError."""
    if out.exists():
        raise ConfigError(f"{out} exists: name another --out, or remove it.")
    total = sum(1 for _ in read_examples(data))  # each line is looked at before the base is loaded
    base = load_base(base_dir, device)
    picked = _spread(read_examples(data), total, sampling.samples)
    sums, tokens = _sums(base, _batches(base, picked, sampling), report)
    out.write_text(json.dumps(_scores(base, sums, tokens)) + "\n", encoding="utf-8")
    return min(total, sampling.samples)


def _spread(examples: Iterator[Example], total: int, count: int) -> Iterator[Example]:
    """`count` of `total` examples at even distances: a file may be sorted by task."""
    taken = 0
    for position, example in enumerate(examples):
        if position * min(count, total) >= taken * total:
            taken += 1
            yield example


def _batches(
    base: Base, examples: Iterator[Example], sampling: Sampling
) -> Iterator[list[TokenRow]]:
    batch: list[TokenRow] = []
    for example in examples:
        for row in base.encoder.encode(example):
            short = row.cut(sampling.max_length)
            longest = max(len(each.ids) for each in [*batch, short])
            if batch and longest * (len(batch) + 1) > sampling.batch_tokens:
                yield batch
                batch = []
            batch.append(short)
    yield batch


@torch.no_grad()
def _sums(
    base: Base, batches: Iterator[Sequence[TokenRow]], report: Report
) -> tuple[dict[int, _Sums], int]:
    sums = {layer: _Sums(*_zeros(base, 2)) for layer in base.blocks}
    real = torch.zeros(0, dtype=torch.bool)  # [T], which tokens of the batch are no padding
    tokens = 0

    def add(layer: int, weights: Tensor, ids: Tensor) -> None:
        chosen = ids[real].flatten().cpu()
        sums[layer].gate.index_add_(0, chosen, weights[real].flatten().double().cpu())
        sums[layer].chosen.index_add_(0, chosen, torch.ones(len(chosen), dtype=torch.float64))

    with watch_routers(base.blocks, add):
        for number, rows in enumerate(batches, start=1):
            inputs = collate(rows, base.pad)
            device = base.model.device
            real = inputs["attention_mask"].bool().flatten().to(device)
            # Without the head: logits would be the largest tensor, and nobody reads them.
            base.model.get_decoder()(input_ids=inputs["input_ids"].to(device), use_cache=False)
            tokens += int(real.sum())
            if number % _REPORT_EVERY == 0:
                report(f"read {tokens:,} tokens")
    report(f"read {tokens:,} tokens")
    return sums, tokens


def _zeros(base: Base, count: int) -> Iterator[Tensor]:
    return (torch.zeros(base.spec.num_experts, dtype=torch.float64) for _ in range(count))


def _scores(base: Base, sums: dict[int, _Sums], tokens: int) -> dict[str, object]:
    # DeepSeek's routers scale their weights; the scores, and select's thresholds, are unscaled.
    scale = tokens * float(getattr(base.model.config, "routed_scaling_factor", None) or 1.0)
    gate = {layer: (each.gate / scale).tolist() for layer, each in sums.items()}
    token = {layer: (each.chosen / each.chosen.sum()).tolist() for layer, each in sums.items()}
    return {
        kind: {layer: dict(enumerate(scores)) for layer, scores in layers.items()}
        for kind, layers in (("gate_scores", gate), ("token_scores", token))
    }
