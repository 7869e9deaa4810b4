"""adapter_config.json: what PEFT says of a LoRA adapter, and what of it can be served.

    adapter folder -> [read_lora_config] -> LoraConfig -> lora_manifest.py

LoRA adds ``scaling * B @ A`` to a layer's weight. Whatever PEFT may do beyond that would be served
wrongly if it were overlooked, so settings with another meaning are refused by their names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sgl_esft.errors import AdapterFormatError, UnsupportedAdapterError
from sgl_esft.formats.adapter_config import LORA_CONFIG_NAME
from sgl_esft.formats.strict_json import read_object, shown

# Setting -> what is wrong with it, where it is neither absent nor null, false, 0 or empty.
_REFUSED: Final[Mapping[str, str]] = {
    "use_dora": "DoRA also scales whole columns of the weight",
    "use_qalora": "QA-LoRA groups the inputs of A",
    "use_bdlora": "its matrices are block-diagonal",
    "fan_in_fan_out": "its matrices are of transposed layers",
    "lora_bias": "B has a bias, which SGLang does not add",
    "rank_pattern": "one rank is served for all layers of an adapter: train with one",
    "alpha_pattern": "one lora_alpha is served for all layers of an adapter: train with one",
    "modules_to_save": (
        "it has whole modules besides its matrices, of the trunk that all adapters share"
    ),
    "trainable_token_indices": "it has embeddings of its own, of the trunk that all adapters share",
    "target_parameters": (
        "its matrices are of parameters that are no linear layers, such as the routed experts"
    ),
    "layer_replication": "it changes which layers the model has",
    "megatron_config": "Megatron's layers have other names",
    "arrow_config": "it routes tokens between adapters",
    "alora_invocation_tokens": "it begins to work in the middle of a prompt",
}
# Ways of starting that leave the base's weights as they are; others subtract from them.
_KEEPS_BASE: Final = frozenset({"gaussian", "eva", "orthogonal"})


@dataclass(frozen=True)
class LoraConfig:
    """What the ranks need of an adapter_config.json."""

    rank: int
    scaling: float  # of B @ A
    targets: tuple[str, ...] | None  # as listed; None = a pattern, or all linear layers

    @property
    def alpha(self) -> float:
        """SGLang divides it by the rank."""
        return self.scaling * self.rank


def read_lora_config(folder: Path) -> LoraConfig:
    """Read and check the folder's adapter_config.json.

    Raises AdapterFormatError for a missing or malformed file, UnsupportedAdapterError for one
    that asks for more than ``W + scaling * B @ A``.
    """
    config = read_object(folder / LORA_CONFIG_NAME, AdapterFormatError)
    kind = config.get("peft_type")
    if not isinstance(kind, str) or kind.upper() != "LORA":
        raise UnsupportedAdapterError(
            f"{LORA_CONFIG_NAME} has peft_type {shown(kind)}: of PEFT's adapters only LORA can be "
            "served."
        )
    for setting, reason in _REFUSED.items():
        if config.get(setting):
            raise UnsupportedAdapterError(
                f"{LORA_CONFIG_NAME} has {setting} = {shown(config[setting])}: {reason}."
            )
    _check_bias(config.get("bias", "none"))
    _check_start(config.get("init_lora_weights", True))
    rank = _rank(config.get("r"))
    root = math.sqrt(rank) if config.get("use_rslora") else rank
    return LoraConfig(rank, _alpha(config.get("lora_alpha")) / root, _targets(config))


def _check_bias(bias: object) -> None:
    if bias != "none":
        raise UnsupportedAdapterError(
            f"{LORA_CONFIG_NAME} has bias = {shown(bias)}: biases belong to the trunk that all "
            'adapters share. Train with bias "none".'
        )


def _check_start(start: object) -> None:
    if not isinstance(start, bool) and start is not None and start not in _KEEPS_BASE:
        raise UnsupportedAdapterError(
            f"{LORA_CONFIG_NAME} has init_lora_weights = {shown(start)}: such training begins by "
            "changing the base's weights, and these matrices do not fit the base as it is. Convert "
            "the adapter to a plain one (PEFT: path_initial_model_for_weight_conversion)."
        )


def _rank(rank: object) -> int:
    if type(rank) is not int or rank < 1:
        raise AdapterFormatError(f"{LORA_CONFIG_NAME} has r = {shown(rank)}, not a rank from 1.")
    return rank


def _alpha(alpha: object) -> float:
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not is_number or not math.isfinite(float(alpha)):  # type: ignore[arg-type]
        raise AdapterFormatError(f"{LORA_CONFIG_NAME} has lora_alpha = {shown(alpha)}, no number.")
    return float(alpha)  # type: ignore[arg-type]


def _targets(config: Mapping[str, object]) -> tuple[str, ...] | None:
    targets = config.get("target_modules")
    if isinstance(targets, str):
        return None
    if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        raise AdapterFormatError(
            f"{LORA_CONFIG_NAME} has target_modules = {shown(targets)}, neither names nor a "
            "pattern."
        )
    return tuple(targets)
