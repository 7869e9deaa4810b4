"""`sgl-esft tune`: trains the chosen experts of a base on examples, and writes the adapter.

    base, examples, expert_cfg.json --[tune]--> adapter folder

Hugging Face's Trainer takes the steps. It sees a whole model, of which only `TunedExperts` have
gradients, and saves and loads no more than those.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from sgl_esft.errors import ConfigError
from sgl_esft.formats.adapter_config import (
    EXPERT_CONFIG_NAME,
    check_ids,
    read_expert_config,
    write_expert_config,
)
from sgl_esft.formats.checkpoint import new_folder
from sgl_esft.formats.manifest import AdapterManifest, read_manifest
from sgl_esft.formats.model_spec import read_moe_spec, refuse_quantised
from sgl_esft.tune.base import Base, check_trainer, load_base
from sgl_esft.tune.examples import read_examples
from sgl_esft.tune.experts import TunedExperts, adapter_tensors, tune_only
from sgl_esft.tune.run_folder import Settings, describe_run, open_run, training_folder
from sgl_esft.tune.tokens import Report, TokenRow, collate, rows_to_learn

_WEIGHTS: Final = "experts.safetensors"
_REPORTS: Final = 20  # of one run, and one for each checkpoint


def tune(
    base_dir: Path,
    data: Path,
    config: Path,
    out: Path,
    settings: Settings,
    *,
    resume: bool = False,
    device: str = "cpu",
    report: Report = print,
) -> AdapterManifest:
    """Train, write `out` and remove the checkpoints. Raises ConfigError and what reading raises."""
    check_trainer()
    spec, experts = read_moe_spec(base_dir), read_expert_config(config)
    refuse_quantised(spec, "tune")
    check_ids(experts, spec)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder: name another --out.")
    examples = list(read_examples(data))
    folder = training_folder(out)
    checkpoint = open_run(folder, describe_run(base_dir, data, experts, settings), resume=resume)
    set_seed(settings.seed)
    base = load_base(base_dir, device)
    rows = rows_to_learn(base.encoder, examples, settings.max_length, report)
    tuned = tune_only(base.blocks, experts)
    trainer = _trainer(base, tuned, rows, folder, settings, report)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    manifest = write_adapter(base, tuned, out)
    shutil.rmtree(folder)
    return manifest


def write_adapter(base: Base, tuned: Mapping[int, TunedExperts], out: Path) -> AdapterManifest:
    """The adapter folder, all or nothing, read again as a server would."""
    with new_folder(out) as folder:
        experts = {layer: module.ids for layer, module in tuned.items()}
        write_expert_config(folder / EXPERT_CONFIG_NAME, experts)
        tensors = dict(adapter_tensors(tuned, base.spec))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return read_manifest(out, base.spec)


class _ExpertTrainer(Trainer):
    """Trainer whose checkpoints hold the trained experts only."""

    def __init__(self, tuned: Mapping[int, TunedExperts], pad: int, **rest: Any) -> None:
        super().__init__(data_collator=partial(collate, pad=pad), **rest)
        self._tuned = tuned

    def _own(self) -> dict[str, Tensor]:
        return {
            f"{layer}.{name}": parameter
            for layer, module in self._tuned.items()
            for name, parameter in module.named_parameters(recurse=False)
        }

    def _save(self, output_dir: str | None = None, state_dict: object = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: each.detach().cpu().contiguous() for name, each in self._own().items()}
        save_file(weights, folder / _WEIGHTS)

    @torch.no_grad()
    def _load_from_checkpoint(self, folder: str, model: nn.Module | None = None) -> None:
        saved = load_file(Path(folder) / _WEIGHTS)
        for name, parameter in self._own().items():
            parameter.copy_(saved[name])


class _Progress(TrainerCallback):
    """Tells of steps, loss and the time left; ends a run whose loss is not finite."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._first_step = 0
        self._started = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._first_step, self._started = state.global_step, time.monotonic()
        at = f", going on after {state.global_step}" if state.global_step else ""
        self._report(f"{state.max_steps:,} steps{at}")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **_: Any,
    ) -> None:
        loss = (logs or {}).get("loss")
        if loss is None:
            return
        if not math.isfinite(loss):
            raise ConfigError(
                f"the loss is {loss} at step {state.global_step}: give a lower --learning-rate."
            )
        seconds = time.monotonic() - self._started
        rate = seconds / max(1, state.global_step - self._first_step)
        left = rate * (state.max_steps - state.global_step)
        self._report(
            f"step {state.global_step:,}/{state.max_steps:,} loss {loss:.4f} "
            f"{seconds:.0f} s, {left:.0f} s left"
        )


def _trainer(
    base: Base,
    tuned: Mapping[int, TunedExperts],
    rows: list[TokenRow],
    folder: Path,
    settings: Settings,
    report: Report,
) -> _ExpertTrainer:
    per_epoch = math.ceil(len(rows) / (settings.batch_size * settings.accumulate))
    steps = math.ceil(per_epoch * settings.epochs)
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.accumulate,
        gradient_checkpointing=settings.recompute,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        lr_scheduler_type="cosine",
        warmup_steps=max(1, steps // 20),
        weight_decay=0.0,
        max_grad_norm=1.0,
        seed=settings.seed,
        data_seed=settings.seed,
        save_steps=settings.save_steps,
        save_total_limit=2,
        logging_steps=max(1, steps // _REPORTS),
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=base.model.device.type == "cpu",
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    trainer = _ExpertTrainer(
        tuned,
        base.pad,
        model=base.model,
        args=arguments,
        train_dataset=rows,
        callbacks=[_Progress(report)],
    )
    trainer.remove_callback(PrinterCallback)  # it prints to stdout what _Progress reports
    return trainer
