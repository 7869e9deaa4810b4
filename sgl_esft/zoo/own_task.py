"""The two steps between which an adapter's experts are chosen, for examples of your own.

    examples.jsonl --[score]--> scores.json --sgl-esft select--> expert_cfg.json
    examples.jsonl, expert_cfg.json --[tune]--> checkpoint --sgl-esft extract--> adapter folder

`python -m sgl_esft.zoo score` and `tune` call these. The base is the demo's, or one of its
architecture; docs/guide_adapters.md goes through all steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

import torch
from transformers import DeepseekV2ForCausalLM
from transformers.utils import logging

from sgl_esft.errors import ConfigError
from sgl_esft.formats.adapter_config import read_expert_config
from sgl_esft.tools.select import ScoreKind
from sgl_esft.zoo.batches import batches, by_length, to_batch
from sgl_esft.zoo.esft import expert_scores
from sgl_esft.zoo.model import load_model, save_model
from sgl_esft.zoo.taskset import Example
from sgl_esft.zoo.tokenizer import UNKNOWN_ID, encode
from sgl_esft.zoo.train import SCORED_EXAMPLES, Report, Training, tune_experts

_TOKENS = 512  # of a step
_PEAK = 3e-3


def score(base: Path, examples: Path, kind: ScoreKind, out: Path) -> int:
    """Write the experts' scores on the examples to `out`; returns how many examples were scored.

    Raises ConfigError for a bad line, and for an `out` that is there already.
    """
    if out.exists():
        raise ConfigError(f"{out} exists: name another --out, or remove it.")
    sample = list(islice(read_examples(examples), SCORED_EXAMPLES))
    groups = (to_batch(group).ids for group in by_length(sample))
    scores = expert_scores(_load(base), groups, kind)
    out.write_text(json.dumps({f"{kind}_scores": scores}) + "\n", encoding="utf-8")
    return len(sample)


def tune(base: Path, examples: Path, config: Path, steps: int, out: Path, report: Report) -> None:
    """Train the experts that `config` lists, and nothing else; writes a whole checkpoint to `out`.

    Raises ConfigError for a bad line or config, and for an `out` that is there already.
    """
    if out.exists():
        raise ConfigError(f"{out} exists: name another --out, or remove it.")
    experts = read_expert_config(config)
    lines = batches(cycle(list(read_examples(examples))), _TOKENS, 0.0, seed=0)
    training = Training(steps, _TOKENS, _PEAK, warmup=max(1, steps // 10))
    save_model(tune_experts(_load(base), experts, lines, training, report), out)


def _load(base: Path) -> DeepseekV2ForCausalLM:
    torch.set_num_threads(1)  # so small a model is no faster on more
    logging.disable_progress_bar()
    return load_model(base)


def read_examples(path: Path) -> Iterator[Example]:
    """Lines such as `{"prompt": "cat -> ", "answer": "cats"}`. Raises ConfigError."""
    number = 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        yield _example(f"{path.name}, line {number}", line)
    if number == 0:
        raise ConfigError(f"{path.name} holds no examples.")


def _example(where: str, line: str) -> Example:
    try:
        found = json.loads(line)
        prompt, answer = found["prompt"], found["answer"]
    except (ValueError, KeyError, TypeError):
        prompt = answer = None
    if not (isinstance(prompt, str) and isinstance(answer, str) and prompt and answer):
        raise ConfigError(f'{where}: not {{"prompt": "some text", "answer": "some text"}}.')
    if UNKNOWN_ID in encode(prompt + answer):
        raise ConfigError(f"{where}: the demo's tokenizer knows printable ASCII only.")
    return Example(prompt, answer)
