"""A base checkpoint in Hugging Face's classes: its model, its tokenizer, its MoE blocks."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from sgl_esft.errors import ConfigError, UnsupportedModelError
from sgl_esft.formats.checkpoint import open_checkpoint
from sgl_esft.formats.model_spec import MoeSpec
from sgl_esft.tune.tokens import Encoder


@dataclass(frozen=True)
class Base:
    """A loaded base in its checkpoint's dtype. `blocks`: layer id -> its MoE block."""

    spec: MoeSpec
    model: PreTrainedModel
    encoder: Encoder
    pad: int
    blocks: dict[int, nn.Module]


def load_base(path: Path, device: str) -> Base:
    """Read all weights. Raises UnsupportedModelError, ConfigError."""
    spec = open_checkpoint(path).spec
    logging.disable_progress_bar()
    model, info = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=getattr(torch, spec.dtype),
        # Visits one expert after the other, as experts.py does: the same sums on any device.
        experts_implementation="eager",
        output_loading_info=True,
        trust_remote_code=False,
        local_files_only=True,
    )
    if info["missing_keys"]:
        some = sorted(info["missing_keys"])[:3]
        raise UnsupportedModelError(f"{path} lacks weights of its architecture: {', '.join(some)}.")
    model.requires_grad_(False)
    model.config.use_cache = False
    encoder, pad = load_encoder(path, model.generation_config)
    return Base(spec, model.to(device).eval(), encoder, pad, _moe_blocks(model, spec))


def load_encoder(path: Path, generation: Any = None) -> tuple[Encoder, int]:
    """The base's tokenizer, and the id that pads. Raises ConfigError if it cannot end an answer."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} has no tokenizer that loads: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {path} has no eos_token: no answer could end.")
    more = getattr(generation, "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])} - {None}
    pad = tokenizer.pad_token_id
    return Encoder(tokenizer, frozenset(ends)), tokenizer.eos_token_id if pad is None else pad


def load_generation(path: Path) -> GenerationConfig:
    """What `load_base` would have its model end answers by, without its weights."""
    try:
        return GenerationConfig.from_pretrained(path, local_files_only=True)
    except OSError:  # no such file: transformers takes it from config.json then
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        return GenerationConfig.from_model_config(config)


def pick_device(asked: str | None) -> str:
    """`asked`, or the accelerator if torch sees one. Raises ConfigError."""
    device = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device is {device!r}, but this torch sees no CUDA device: use cpu.")
    return device


def check_trainer() -> None:
    """Raise ConfigError unless what Hugging Face's Trainer needs is installed."""
    if find_spec("accelerate") is None:
        raise ConfigError("tune needs the package accelerate: pip install 'sgl-esft[train]'.")


def _moe_blocks(model: PreTrainedModel, spec: MoeSpec) -> dict[int, nn.Module]:
    """The blocks with routed experts; each has `gate` and stacked `experts` in transformers 5."""
    layers = model.get_submodule("model.layers")
    blocks = {layer: layers.get_submodule(f"{layer}.mlp") for layer in spec.moe_layer_ids}
    for layer, block in blocks.items():
        stacked = hasattr(getattr(block, "experts", None), "gate_up_proj")
        if not stacked or not hasattr(block, "gate"):
            raise UnsupportedModelError(
                f"layer {layer} of {spec.architecture} in this transformers has no "
                "stacked experts: install the pinned one (requirements/cpu.txt)."
            )
    return blocks
