"""LoRA adapters beside ESFT ones: their flags, and what is checked of them before anything starts.

    --enable-lora, --lora-paths, ... -> [read_flags] -> LoraFlags -> [plan_lora] -> LoraLimits

The flags are SGLang's own, less those that would not work beside weaving; a server without weaving
gets them as they are.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_esft.config import EsftConfig, LoraLimits
from sgl_esft.errors import AdapterFormatError, ConfigError
from sgl_esft.formats.adapter_config import LORA_CONFIG_NAME, kind_of
from sgl_esft.formats.lora_config import read_lora_config
from sgl_esft.formats.lora_manifest import LoraManifest, check_lora, read_matrix
from sgl_esft.formats.lora_targets import LoraTargets
from sgl_esft.formats.model_spec import MoeSpec, refuse_quantised

DEFAULT_MAX_LORAS = 4
DEFAULT_MAX_RANK = 64
_ALL = "all"  # SGLang's word for every layer that can


@dataclass(frozen=True)
class LoraFlags:
    """What the command line says; None = not given."""

    enabled: bool
    paths: tuple[str, ...]  # NAME=DIR
    max_loras: int | None
    max_rank: int | None
    targets: tuple[str, ...] | None

    @property
    def is_on(self) -> bool:
        """Whether this server takes LoRA adapters: any of the flags says so."""
        given = (self.max_loras, self.max_rank, self.targets)
        return self.enabled or bool(self.paths) or any(each is not None for each in given)

    @property
    def argv(self) -> list[str]:
        """As SGLang's own flags, for a server without weaving."""
        argv = ["--enable-lora"] if self.enabled else []
        argv += ["--lora-paths", *self.paths] if self.paths else []
        argv += [] if self.max_rank is None else ["--max-lora-rank", str(self.max_rank)]
        return argv + ([] if self.targets is None else ["--lora-target-modules", *self.targets])


def add_flags(group: argparse._ArgumentGroup) -> None:
    """Of the launcher's parser."""
    group.add_argument(
        "--enable-lora",
        action="store_true",
        help="take LoRA adapters too, of attention and dense layers; a request may name one ESFT "
        "adapter, one LoRA adapter, or one of each (docs/lora.md). Each flag below does the same",
    )
    group.add_argument(
        "--lora-paths",
        nargs="*",
        action="extend",
        default=[],
        metavar="NAME=DIR",
        help="LoRA adapters to load at start; more can be loaded later over HTTP",
    )
    group.add_argument(
        "--max-loras",
        type=int,
        metavar="N",
        help="LoRA slots on the device: so many LoRA adapters can run in one batch (default: the "
        f"number of --lora-paths, {DEFAULT_MAX_LORAS} without any)",
    )
    group.add_argument(
        "--max-lora-rank",
        type=int,
        metavar="R",
        help="the largest rank that a LoRA adapter may have; its slots are of this size (default: "
        f"the largest of --lora-paths, {DEFAULT_MAX_RANK} without any)",
    )
    group.add_argument(
        "--lora-target-modules",
        nargs="+",
        metavar="NAME",
        help="projections that LoRA adapters may change, such as q_proj o_proj (default: all of "
        "the model's attention and dense layers; routed experts, router, embeddings and head take "
        "no LoRA)",
    )


def read_flags(found: argparse.Namespace) -> LoraFlags:
    """Of a parsed command line."""
    targets = found.lora_target_modules
    return LoraFlags(
        enabled=found.enable_lora,
        paths=tuple(found.lora_paths),
        max_loras=found.max_loras,
        max_rank=found.max_lora_rank,
        targets=None if targets is None else tuple(targets),
    )


def check_served(flags: LoraFlags, spec: MoeSpec, device: str, *, has_dp_attention: bool) -> None:
    """Raises ConfigError, or UnsupportedModelError, where LoRA beside ESFT was not shown."""
    if not flags.is_on:
        return
    refuse_quantised(spec, "--enable-lora")
    if device != "cpu":
        raise ConfigError(
            f"--enable-lora on a device of type {device}: LoRA beside ESFT was shown on the CPU "
            "platform only; leave it out, or serve LoRA alone with --no-esft"
        )
    if has_dp_attention:
        raise ConfigError(
            "--enable-lora and --attn-dp-size: there every adapter keeps a slot, and LoRA's do "
            "not; leave one of them out"
        )


def rank_of(folder: Path) -> int:
    """Of one of the first adapters. Raises AdapterFormatError, UnsupportedAdapterError."""
    if kind_of(folder) != "lora":
        raise AdapterFormatError(
            f"the folder holds no LoRA adapter ({LORA_CONFIG_NAME}): name ESFT adapters by "
            "--esft-adapters"
        )
    return read_lora_config(folder).rank


def plan_lora(flags: LoraFlags, targets: LoraTargets, ranks: Sequence[int]) -> LoraLimits:
    """The limits; `ranks` are the first adapters'. Raises ConfigError."""
    chosen = None if flags.targets in (None, (_ALL,)) else flags.targets
    if chosen is not None:
        targets.only(chosen)
    max_rank = flags.max_rank
    if max_rank is None:
        max_rank = max(ranks, default=DEFAULT_MAX_RANK)
    max_loras = flags.max_loras
    if max_loras is None:
        max_loras = len(ranks) or DEFAULT_MAX_LORAS
    return LoraLimits(max_loras, max_rank, chosen)


def check_first(name: str, folder: Path, targets: LoraTargets, config: EsftConfig) -> LoraManifest:
    """A LoRA adapter of the command line, in full, weights too. Raises one of the Adapter* errors.

    It was resolved against --adapter-root already.
    """
    manifest = check_lora(name, str(folder), (), targets, config)
    for tensor in manifest.tensors.values():
        read_matrix(name, tensor)
    return manifest
