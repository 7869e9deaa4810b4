"""Fine-tuned checkpoint - base checkpoint -> adapter folder: the inverse of merge.

base folder, tuned folder -> [extract_adapter] -> adapter folder
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Final

from sgl_esft.errors import AdapterMismatchError, ConfigError, UnsupportedAdapterError
from sgl_esft.formats.adapter_config import EXPERT_CONFIG_NAME, write_expert_config
from sgl_esft.formats.checkpoint import (
    Checkpoint,
    all_experts,
    expert_tensor_names,
    new_folder,
    open_checkpoint,
    write_tensors,
)
from sgl_esft.formats.manifest import AdapterManifest, read_manifest
from sgl_esft.formats.model_spec import MoeSpec

_SHOWN: Final = 5

_Experts = dict[int, tuple[int, ...]]


def extract_adapter(
    base_dir: Path, tuned_dir: Path, out_dir: Path, *, layers: Collection[int] | None = None
) -> AdapterManifest:
    """Write an adapter of the experts that differ in any bit, and return its manifest.

    With `layers`, only those MoE layers' experts are compared and kept; all else is compared
    either way. Raises UnsupportedAdapterError if any other tensor differs, or if nothing does;
    AdapterMismatchError if the checkpoints are of different models or dtypes; ConfigError for a
    layer without experts or a non-empty `out_dir`.
    """
    base, tuned = open_checkpoint(base_dir), open_checkpoint(tuned_dir)
    _check_same_model(base, tuned)
    _check_same_trunk(base, tuned)
    experts = _tuned_experts(base, tuned, _chosen_layers(base.spec, layers))
    if not experts:
        raise UnsupportedAdapterError("no routed expert differs: there is nothing to extract.")
    names = expert_tensor_names(base.spec, experts)
    with new_folder(out_dir) as folder:
        write_expert_config(folder / EXPERT_CONFIG_NAME, experts)
        tensors = [(name, tuned.tensors[name]) for name, _ in names]
        write_tensors(folder / "model.safetensors", tensors)
    return read_manifest(out_dir, base.spec)


def _check_same_model(base: Checkpoint, tuned: Checkpoint) -> None:
    ours, theirs = asdict(base.spec), asdict(tuned.spec)
    for field, value in ours.items():
        if theirs[field] != value:
            raise AdapterMismatchError(
                f"the base has {field} {value}, the tuned checkpoint {theirs[field]}: "
                "extract needs two checkpoints of one model in one dtype."
            )
    lost = sorted(base.tensors.keys() ^ tuned.tensors.keys())
    if lost:
        raise UnsupportedAdapterError(
            f"{len(lost)} tensors are in one of the checkpoints only: {_some(lost)}."
        )


def _check_same_trunk(base: Checkpoint, tuned: Checkpoint) -> None:
    routed = {name for name, _ in expert_tensor_names(base.spec, all_experts(base.spec))}
    trunk = (name for name in base.tensors if name not in routed)
    changed = [name for name in trunk if not base.tensors[name].same_as(tuned.tensors[name])]
    if changed:
        raise UnsupportedAdapterError(
            f"{len(changed)} tensors outside the routed experts differ: {_some(changed)}. "
            "Only routed experts can be woven; serve the tuned checkpoint as a model of its own."
        )


def _tuned_experts(base: Checkpoint, tuned: Checkpoint, layers: Iterable[int]) -> _Experts:
    def differs(layer: int, expert: int) -> bool:
        names = expert_tensor_names(base.spec, {layer: (expert,)})
        return not all(base.tensors[name].same_as(tuned.tensors[name]) for name, _ in names)

    every = range(base.spec.num_experts)
    found = {layer: tuple(e for e in every if differs(layer, e)) for layer in layers}
    return {layer: ids for layer, ids in found.items() if ids}


def _chosen_layers(spec: MoeSpec, layers: Collection[int] | None) -> tuple[int, ...]:
    if layers is None:
        return spec.moe_layer_ids
    unknown = sorted(set(layers) - set(spec.moe_layer_ids))
    if unknown:
        raise ConfigError(
            f"layers {unknown} have no routed experts; those with are {list(spec.moe_layer_ids)}."
        )
    return tuple(sorted(set(layers)))


def _some(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
