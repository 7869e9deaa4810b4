"""expert_cfg.json: which experts an ESFT adapter replaces, and whether the shared ones too.

    adapter folder -> [adapter_config] -> adapter_format

The file is the one that ESFT's own training writes:
``{"experts": {"1": [3, 17]}, "shared_experts": false, "non_expert_modules": false}``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from sgl_esft.errors import AdapterFormatError, AdapterMismatchError, UnsupportedAdapterError
from sgl_esft.formats.model_spec import MoeSpec
from sgl_esft.formats.strict_json import read_object, shown

EXPERT_CONFIG_NAME: Final = "expert_cfg.json"
LORA_CONFIG_NAME: Final = "adapter_config.json"

_LORA_FILES: Final = (LORA_CONFIG_NAME, "adapter_model.safetensors", "adapter_model.bin")

# ESFT: whole experts in place of the base's. LoRA: low-rank changes of attention and dense layers.
AdapterKind: TypeAlias = Literal["esft", "lora"]

# Decimal, no sign, no leading zero: one layer has one spelling, so no layer can come twice.
_LAYER_KEY = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)

_FLAG_REASONS: Final[Mapping[str, str]] = {
    "shared_experts": (
        "it tunes the shared experts too, and here only routed experts can be listed. "
        "Write false, with the same experts"
    ),
    "non_expert_modules": (
        "it tunes attention, router or embeddings, the trunk that all adapters share. "
        "Train with non_expert_modules false, or serve the tuned checkpoint as a model of its own"
    ),
}


@dataclass(frozen=True)
class ExpertConfig:
    """What an expert_cfg.json says."""

    experts: dict[int, tuple[int, ...]]  # layer id -> ascending ids, layers without any left out
    shared_experts: bool  # whether there are tensors of layers' shared experts, too


def read_expert_config(path: Path) -> dict[int, tuple[int, ...]]:
    """As `read_config`, its experts alone. Raises UnsupportedAdapterError for shared ones, too."""
    config = read_config(path)
    if config.shared_experts:
        raise _refused("shared_experts")
    return config.experts


def read_config(path: Path) -> ExpertConfig:
    """Read an expert_cfg.json. Ids are not compared with a model here.

    Raises AdapterFormatError for a missing, malformed or empty file and UnsupportedAdapterError
    for an adapter that tunes more than experts.
    """
    config = read_object(path, AdapterFormatError)
    has_shared = _flag(config, "shared_experts")
    if _flag(config, "non_expert_modules"):
        raise _refused("non_expert_modules")
    return ExpertConfig(_listed_experts(config.get("experts")), has_shared)


def _listed_experts(layers: object) -> dict[int, tuple[int, ...]]:
    if not isinstance(layers, dict):
        raise AdapterFormatError(
            f'{EXPERT_CONFIG_NAME} has no "experts" object, but {shown(layers)}. '
            'Write {"experts": {"<layer>": [<expert>, ...]}}.'
        )
    listed = {_layer_id(key): _expert_ids(key, ids) for key, ids in layers.items()}
    experts = {layer: ids for layer, ids in sorted(listed.items()) if ids}
    if not experts:
        raise AdapterFormatError(f"{EXPERT_CONFIG_NAME} lists no expert: the adapter is empty.")
    return experts


def kind_of(folder: Path) -> AdapterKind:
    """Which kind of adapter a folder holds, by its files; a folder with neither's files is ESFT's.

    Raises UnsupportedAdapterError for a folder with both kinds' files.
    """
    is_lora = any((folder / name).exists() for name in _LORA_FILES)
    if not (folder / EXPERT_CONFIG_NAME).exists():
        return "lora" if is_lora else "esft"
    if is_lora:
        raise UnsupportedAdapterError(
            f"the folder holds {EXPERT_CONFIG_NAME} and a LoRA adapter's files: an adapter is of "
            "one kind. Make a folder of each, load both, and name both in a request."
        )
    return "esft"


def config_name_of(folder: Path) -> str:
    """The file that describes the folder's adapter. Raises as `kind_of` does."""
    return LORA_CONFIG_NAME if kind_of(folder) == "lora" else EXPERT_CONFIG_NAME


def refuse_lora(folder: Path) -> None:
    """Raises UnsupportedAdapterError for a folder that holds a LoRA adapter, alone or too."""
    if kind_of(folder) == "lora":
        raise UnsupportedAdapterError(
            "the folder holds a LoRA adapter, no ESFT adapter, which has whole experts and "
            f"{EXPERT_CONFIG_NAME}. LoRA adapters are for a server that was started with "
            "--enable-lora, or with some of them as --lora-paths (docs/lora.md)."
        )


def check_ids(experts: Mapping[int, tuple[int, ...]], spec: MoeSpec) -> None:
    """Raise AdapterMismatchError unless every listed expert exists in the base model."""
    moe_layers = set(spec.moe_layer_ids)
    for layer, ids in experts.items():
        if layer >= spec.num_layers:
            raise AdapterMismatchError(
                f"{EXPERT_CONFIG_NAME} lists layer {layer}, but the base model has layers 0 to "
                f"{spec.num_layers - 1}. Was the adapter made for another model?"
            )
        if layer not in moe_layers:
            raise AdapterMismatchError(
                f"{EXPERT_CONFIG_NAME} lists layer {layer}, which is dense in the base model "
                "(it has no routed experts). Was the adapter made for another model?"
            )
        if ids[-1] >= spec.num_experts:
            raise AdapterMismatchError(
                f"{EXPERT_CONFIG_NAME} lists expert {ids[-1]} in layer {layer}, but the base model "
                f"has experts 0 to {spec.num_experts - 1}. Was the adapter made for another model?"
            )


def write_expert_config(
    path: Path, experts: Mapping[int, tuple[int, ...]], *, shared_experts: bool = False
) -> None:
    """Write the file that `read_config` reads, one layer a line."""
    lines = (f'    "{layer}": {json.dumps(list(ids))}' for layer, ids in sorted(experts.items()))
    body = ",\n".join(lines)
    path.write_text(
        f'{{\n  "experts": {{\n{body}\n  }},\n'
        f'  "shared_experts": {json.dumps(shared_experts)},\n  "non_expert_modules": false\n}}\n'
    )


def _flag(config: Mapping[str, object], flag: str) -> bool:
    value = config.get(flag, False)
    if not isinstance(value, bool):
        raise AdapterFormatError(
            f"{EXPERT_CONFIG_NAME} has {flag} = {shown(value)}, not true or false."
        )
    return value


def _refused(flag: str) -> UnsupportedAdapterError:
    return UnsupportedAdapterError(f"the adapter has {flag} = true: {_FLAG_REASONS[flag]}.")


def _layer_id(key: str) -> int:
    if not _LAYER_KEY.fullmatch(key):
        raise AdapterFormatError(
            f"{EXPERT_CONFIG_NAME} has the layer {shown(key)}: "
            'layers are decimal strings such as "12".'
        )
    return int(key)


def _expert_ids(layer: str, ids: object) -> tuple[int, ...]:
    if not isinstance(ids, list):
        raise AdapterFormatError(
            f"{EXPERT_CONFIG_NAME} gives layer {layer} {shown(ids)}, not a list of expert ids."
        )
    for expert in ids:
        # bool is a subclass of int, so `true` would pass isinstance as expert 1.
        if type(expert) is not int or expert < 0:
            raise AdapterFormatError(
                f"{EXPERT_CONFIG_NAME} lists {shown(expert)} in layer {layer}: "
                "expert ids are integers from 0."
            )
    unique = sorted(set(ids))
    if len(unique) != len(ids):
        twice = next(expert for expert in unique if ids.count(expert) > 1)
        raise AdapterFormatError(
            f"{EXPERT_CONFIG_NAME} lists expert {twice} twice in layer {layer}."
        )
    return tuple(unique)
