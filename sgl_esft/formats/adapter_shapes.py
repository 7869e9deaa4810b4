"""How many experts an adapter has in each layer: all that planning its memory needs.

expert_cfg.json, or a row of the paper's table 1 -> [AdapterShape] -> memory/plan.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sgl_esft.errors import AdapterPathError, ConfigError
from sgl_esft.formats.adapter_config import EXPERT_CONFIG_NAME, check_ids, read_config
from sgl_esft.formats.model_spec import MoeSpec

PROFILE_TABLE_1: Final = "table1"

# ExpertWeave, table 1: the most experts in a layer, and the average over all 26 layers.
TABLE_1: Final[Mapping[str, tuple[int, float]]] = {
    "gate-math": (12, 7.04),
    "token-math": (9, 6.12),
    "gate-intent": (12, 9.50),
    "token-intent": (8, 7.12),
    "gate-summary": (11, 7.73),
    "token-summary": (8, 5.15),
    "gate-law": (12, 7.35),
    "token-law": (10, 6.58),
    "gate-translation": (13, 4.69),
    "token-translation": (6, 3.85),
}


@dataclass(frozen=True)
class AdapterShape:
    """An adapter's number of experts in each layer that it tunes."""

    name: str
    experts: Mapping[int, int]  # layer id -> how many; layers without any may be missing

    @property
    def max_experts(self) -> int:
        """The most in any layer: the paper's E_i."""
        return max(self.experts.values())

    @property
    def num_experts(self) -> int:
        return sum(self.experts.values())


def read_adapter_shape(path: Path, spec: MoeSpec) -> AdapterShape:
    """Read an expert_cfg.json, or the one in an adapter folder; every expert must exist in `spec`.

    Shared experts take no slots, and are not in the shape.

    Raises AdapterPathError, AdapterFormatError, UnsupportedAdapterError or AdapterMismatchError.
    """
    file = path / EXPERT_CONFIG_NAME if path.is_dir() else path
    if not file.exists():
        raise AdapterPathError(f"{file} does not exist: name an adapter folder or its config.")
    experts = read_config(file).experts
    check_ids(experts, spec)
    name = file.resolve().parent.name if file.name == EXPERT_CONFIG_NAME else file.stem
    return AdapterShape(name, {layer: len(ids) for layer, ids in experts.items()})


def profile_shapes(profile: str, spec: MoeSpec) -> list[AdapterShape]:
    """Adapters of the paper's table 1 for this model: `table1`, or `table1:NAME,NAME,...`."""
    kind, colon, listed = profile.partition(":")
    names = listed.split(",") if colon else list(TABLE_1)
    unknown = [name for name in names if name not in TABLE_1]
    if kind != PROFILE_TABLE_1 or unknown:
        raise ConfigError(
            f"--profile is {profile!r}: write {PROFILE_TABLE_1}, or {PROFILE_TABLE_1}: and some of "
            f"{','.join(TABLE_1)}."
        )
    return [_table_1_shape(name, spec) for name in names]


def _table_1_shape(name: str, spec: MoeSpec) -> AdapterShape:
    most, average = TABLE_1[name]
    if most > spec.num_experts:
        raise ConfigError(
            f"{PROFILE_TABLE_1}'s {name} has {most} experts in a layer, the model only "
            f"{spec.num_experts}: give adapters of it with --adapters."
        )
    layers = spec.moe_layer_ids
    counts = _spread(most, round(average * len(layers)), len(layers))
    return AdapterShape(name, dict(zip(layers, counts, strict=True)))


def _spread(most: int, total: int, num_layers: int) -> Sequence[int]:
    """`total` experts over the layers: `most` in the first, then ever fewer, at least one.

    The paper gives no counts by layer; these have its maximum and its average.
    """
    counts = [most] + [1] * (num_layers - 1)
    missing = total - sum(counts)
    while missing > 0:
        for stop in range(num_layers, 1, -1):
            for layer in range(1, stop):
                if missing > 0 and counts[layer] < most:
                    counts[layer] += 1
                    missing -= 1
    return counts
