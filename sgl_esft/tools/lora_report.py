"""What `sgl-esft inspect` says about a LoRA adapter folder, with or without its base model.

folder (+ base folder) -> [inspect_lora] -> LoraReport -> table or JSON
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sgl_esft.errors import AdapterFormatError, UnsupportedModelError
from sgl_esft.formats.adapter_paths import adapter_weight_files
from sgl_esft.formats.lora_config import read_lora_config
from sgl_esft.formats.lora_manifest import LoraManifest, read_lora_manifest, read_matrix
from sgl_esft.formats.lora_targets import LoraModule, LoraPart, LoraTargets, targets_of
from sgl_esft.formats.safetensors_header import TensorInfo, read_header
from sgl_esft.formats.strict_json import read_object

_PROJECTION: Final = re.compile(
    r"(?:base_model\.model\.)?model\.layers\.(?P<layer>[0-9]{1,5})\.(?P<name>.+_proj(?:_with_mqa)?)"
    r"\.lora_(?P<side>[AB])(?:\.default)?\.weight"
)


@dataclass(frozen=True)
class LoraReport:
    """A validated LoRA adapter, and the base it was checked against (None: against itself only)."""

    manifest: LoraManifest
    base: Path | None

    @property
    def matrices(self) -> dict[str, int]:
        """Projection, as adapter_config.json calls it -> layers that have it, by name."""
        counts = Counter(
            m.parts[place].target for m, place, side in self.manifest.tensors if side == "A"
        )
        return dict(sorted(counts.items()))

    def as_json(self) -> dict[str, object]:
        """The report as JSON values; sizes in bytes."""
        manifest = self.manifest
        return {
            "kind": manifest.kind,
            "path": str(manifest.path),
            "base": None if self.base is None else str(self.base),
            "rank": manifest.config.rank,
            "scaling": manifest.config.scaling,
            "num_bytes": manifest.num_bytes,
            "targets": self.matrices,
        }

    def as_table(self) -> Iterator[str]:
        """The report as lines for a terminal."""
        manifest = self.manifest
        yield f"adapter   {manifest.path}"
        yield "kind      LoRA: for a server with --enable-lora (docs/lora.md)"
        yield f"base      {self.base or 'not given (--base): its shapes are unknown'}"
        yield f"rank      {manifest.config.rank}, scaling {manifest.config.scaling:g}"
        yield f"size      {manifest.num_bytes / 1e6:,.1f} MB"
        yield ""
        yield "layers  projection"
        for target, num_layers in self.matrices.items():
            yield f"{num_layers:6}  {target}"


def inspect_lora(folder: Path, base_dir: Path | None) -> LoraReport:
    """Validate the folder against its base model or, without one, against itself.

    Reads its weights too: raises AdapterNotFiniteError.
    """
    rank = read_lora_config(folder).rank
    manifest = read_lora_manifest(folder, _targets(folder, base_dir), rank)
    for tensor in manifest.tensors.values():
        read_matrix(folder.name, tensor)
    return LoraReport(manifest, base_dir)


def _targets(folder: Path, base_dir: Path | None) -> LoraTargets:
    if base_dir is not None:
        return targets_of(read_object(base_dir / "config.json", UnsupportedModelError))
    sizes: dict[tuple[int, str], dict[str, TensorInfo]] = {}
    for file in adapter_weight_files(folder):
        for name, info in read_header(file).tensors.items():
            found = _PROJECTION.fullmatch(name)
            if found is not None and ".experts." not in found["name"]:
                sizes.setdefault((int(found["layer"]), found["name"]), {})[found["side"]] = info
    return LoraTargets(tuple(_module(layer, name, info) for (layer, name), info in sizes.items()))


def _module(layer: int, name: str, sides: dict[str, TensorInfo]) -> LoraModule:
    """A layer of the sizes that its two matrices have."""
    if any(side not in sides or len(sides[side].shape) != 2 for side in ("A", "B")):
        raise AdapterFormatError(f"layer {layer}: {name[:200]} has not both of its matrices.")
    part = LoraPart(name, sides["B"].shape[0])
    return LoraModule(layer, name, sides["A"].shape[1], (part,))
