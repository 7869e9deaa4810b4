"""Make a zoo: train the base, then fine-tune one ESFT adapter per task.

`python -m sgl_esft.zoo train` calls `train_zoo` with one of PLANS, which reads as the whole
recipe. The same seed gives the same data and the same order of steps.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DeepseekV2ForCausalLM

from sgl_esft.tools.select import ScoreKind, select_experts
from sgl_esft.zoo.batches import Batch, batches, by_length, to_batch
from sgl_esft.zoo.corpus import corpus
from sgl_esft.zoo.esft import (
    Experts,
    Routing,
    expert_scores,
    freeze_all_but,
    save_adapter,
    watch_routers,
)
from sgl_esft.zoo.model import (
    DEEP,
    DEMO,
    ZooSize,
    as_stored,
    exact_match,
    load_model,
    new_model,
    save_model,
)
from sgl_esft.zoo.taskset import TASKS, Task, held_out, training_examples

Report = Callable[[str], None]


@dataclass(frozen=True)
class Training:
    """How long and how fast to train: `tokens` per step, cosine decay from `peak` to 0."""

    steps: int
    tokens: int
    peak: float
    warmup: int = 50


@dataclass(frozen=True)
class Recipe:
    """How one adapter is made: which expert score, and the share of it to cover."""

    score: ScoreKind
    threshold: float
    training: Training


@dataclass(frozen=True)
class ZooPlan:
    """One zoo: its base, and the tasks that become adapters."""

    name: str
    size: ZooSize
    base: Training
    recipes: Mapping[str, Recipe]
    num_held_out: int = 200  # examples of each task that an adapter is judged by


BALANCE = 0.002
SCORED_EXAMPLES = 512
REPORTED_STEPS = 50
PLANS: dict[str, ZooPlan] = {
    plan.name: plan
    for plan in (
        ZooPlan(
            "demo",
            DEMO,
            Training(steps=3200, tokens=2048, peak=2.5e-3, warmup=150),
            {
                "caesar": Recipe("gate", 0.5, Training(450, 2048, 3e-3)),
                "date": Recipe("token", 0.6, Training(500, 2048, 3e-3)),
                "intent": Recipe("gate", 0.4, Training(300, 2048, 2e-3)),
                "reverse": Recipe("gate", 0.6, Training(600, 2048, 3e-3)),
                "sum": Recipe("gate", 0.7, Training(2600, 1024, 4e-3)),
                "translate": Recipe("token", 0.4, Training(300, 2048, 2e-3)),
            },
        ),
        # Thresholds are lower than the demo's: an expert is smaller, but there are eight times as
        # many, and what an adapter may weigh is counted in sgl_esft/zoo/model.py.
        ZooPlan(
            "deep",
            DEEP,
            Training(steps=3000, tokens=2048, peak=2e-3, warmup=200),
            {
                "date": Recipe("gate", 0.35, Training(400, 2048, 3e-3)),
                "translate": Recipe("token", 0.3, Training(400, 2048, 3e-3)),
            },
        ),
    )
}


def train_zoo(
    plan: ZooPlan, out: Path, seed: int, threads: int, keep_base: bool, report: Report
) -> None:
    """Write ``out/base``, ``out/adapters/<task>`` and ``out/zoo.json``.

    With `keep_base` the base that is in `out` already stays and only adapters are made.
    `report` is given a line of progress now and then.
    """
    torch.set_num_threads(threads)
    record = _read_record(out) if keep_base else _make_base(plan, out, seed, threads, report)
    base = load_model(out / "base")
    adapters = {}
    for name, recipe in plan.recipes.items():
        folder = out / "adapters" / name
        adapters[name] = _make_adapter(base, recipe, seed, folder, plan.num_held_out, report)
        _write_record(out, {**record, "adapters": adapters})


def _make_base(
    plan: ZooPlan, out: Path, seed: int, threads: int, report: Report
) -> dict[str, object]:
    """Train and save the base; returns its part of `zoo.json`."""
    started = time.monotonic()
    base = train_base(plan, seed, report)
    save_model(base, out / "base")
    model = "" if plan.name == "demo" else f" --model {plan.name}"
    record: dict[str, object] = {
        "command": f"python -m sgl_esft.zoo train{model} --out DIR --seed {seed} "
        f"--threads {threads}",
        "seed": seed,
        "base": {
            **asdict(plan.base),
            "balance": BALANCE,
            "parameters": sum(p.numel() for p in base.parameters()),
            "seconds": round(time.monotonic() - started),
        },
        "held_out_examples": plan.num_held_out,
    }
    _write_record(out, record)
    return record


def _read_record(out: Path) -> dict[str, object]:
    record = json.loads((out / "zoo.json").read_text())
    if not isinstance(record, dict):
        raise ValueError(f"{out}/zoo.json is not an object")
    return record


def _write_record(out: Path, record: Mapping[str, object]) -> None:
    (out / "zoo.json").write_text(json.dumps(record, indent=1) + "\n")


def train_base(plan: ZooPlan, seed: int, report: Report) -> DeepseekV2ForCausalLM:
    """The base model, trained on the mixed corpus with a balancing loss on its routers."""
    model, training = new_model(seed, plan.size), plan.base
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=training.peak, betas=(0.9, 0.98), weight_decay=0.01
    )
    lines = batches(corpus(seed), training.tokens, prompt_weight=0.1, seed=seed)
    _fit(model, optimiser, lines, training, BALANCE, lambda line: report(f"base: {line}"))
    return model.eval()


def finetune(
    base: DeepseekV2ForCausalLM, task: Task, recipe: Recipe, seed: int, report: Report
) -> tuple[DeepseekV2ForCausalLM, dict[int, tuple[int, ...]]]:
    """A copy of `base` with the experts relevant to `task` trained, and which those are."""
    sample = by_length(islice(training_examples(task, seed), SCORED_EXAMPLES))
    scores = expert_scores(base, (to_batch(group).ids for group in sample), recipe.score)
    selected = select_experts(scores, recipe.threshold)
    experts = {layer: tuple(sorted(ids)) for layer, ids in selected.items()}
    lines = batches(training_examples(task, seed), recipe.training.tokens, 0.0, seed)
    return tune_experts(base, experts, lines, recipe.training, report), experts


def tune_experts(
    base: DeepseekV2ForCausalLM,
    experts: Experts,
    lines: Iterator[Batch],
    training: Training,
    report: Report,
) -> DeepseekV2ForCausalLM:
    """A copy of `base` in which only `experts` were trained, `training.steps` steps on `lines`."""
    model = copy.deepcopy(base).train()
    optimiser = torch.optim.Adam(
        freeze_all_but(model, experts), lr=training.peak, betas=(0.9, 0.98)
    )
    _fit(model, optimiser, lines, training, 0.0, report)
    return model.eval()


def _make_adapter(
    base: DeepseekV2ForCausalLM,
    recipe: Recipe,
    seed: int,
    folder: Path,
    num_held_out: int,
    report: Report,
) -> dict[str, object]:
    """Fine-tune, save and measure one adapter; returns its entry of `zoo.json`."""
    started = time.monotonic()
    task = TASKS[folder.name]
    model, experts = finetune(base, task, recipe, seed, lambda line: report(f"{task.name}: {line}"))
    save_adapter(as_stored(model), experts, folder)
    examples = held_out(task, num_held_out)
    entry = {
        **asdict(recipe),
        "experts_per_layer": {str(layer): len(ids) for layer, ids in experts.items()},
        "seconds": round(time.monotonic() - started),
        "base_exact_match": exact_match(base, examples),
        "adapter_exact_match": exact_match(model, examples),
    }
    report(f"{task.name}: {entry}")
    return entry


def _fit(
    model: DeepseekV2ForCausalLM,
    optimiser: torch.optim.Optimizer,
    lines: Iterator[Batch],
    training: Training,
    balance: float,
    report: Report,
) -> None:
    """Take `training.steps` optimiser steps on `lines`."""
    started = time.monotonic()
    for step, batch in enumerate(islice(lines, training.steps)):
        for group in optimiser.param_groups:
            group["lr"] = training.peak * _schedule(step, training)
        loss = _loss(model, batch, balance)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        optimiser.step()
        if (step + 1) % REPORTED_STEPS == 0:
            seconds = time.monotonic() - started
            left = seconds / (step + 1) * (training.steps - step - 1)
            report(
                f"step {step + 1}/{training.steps} loss {loss.item():.4f} {seconds:.0f} s, "
                f"{left:.0f} s left"
            )


def _schedule(step: int, training: Training) -> float:
    """The share of the peak learning rate at `step`: linear warm-up, then half a cosine."""
    if step < training.warmup:
        return (step + 1) / training.warmup
    done = (step - training.warmup) / max(1, training.steps - training.warmup)
    return 0.5 * (1 + math.cos(math.pi * done))


def _loss(model: DeepseekV2ForCausalLM, batch: Batch, balance: float) -> Tensor:
    """Weighted next-token loss, plus `balance` times the routers' balancing loss."""
    routings: list[Routing] = []
    with watch_routers(model, lambda _, routing: routings.append(routing)):
        logits = model(batch.ids[:, :-1]).logits
    losses = F.cross_entropy(logits.flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none")
    weights = batch.weights[:, :-1].flatten()
    loss = (losses * weights).sum() / weights.sum()
    if balance:
        loss = loss + balance * torch.stack([_imbalance(r) for r in routings]).sum()
    return loss


def _imbalance(routing: Routing) -> Tensor:
    """1 where all experts of a layer are chosen alike, up to M / k where only k ever are."""
    tokens, experts = routing.probabilities.shape
    chosen = torch.bincount(routing.chosen.flatten(), minlength=experts)
    share = chosen / (tokens * routing.chosen.shape[1])
    return experts * (share * routing.probabilities.mean(0)).sum()
