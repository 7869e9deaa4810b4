"""What `sgl-esft inspect` says about an adapter folder, with or without its base model.

folder (+ base folder) -> [inspect_adapter] -> AdapterReport -> table or JSON
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from sgl_esft.errors import AdapterFormatError, AdapterMismatchError
from sgl_esft.formats.adapter_config import EXPERT_CONFIG_NAME, read_expert_config
from sgl_esft.formats.adapter_paths import adapter_weight_files, resolve_adapter_path
from sgl_esft.formats.finite import check_weights
from sgl_esft.formats.manifest import AdapterManifest, read_manifest
from sgl_esft.formats.model_spec import DTYPE_BYTES, MoeSpec, read_moe_spec
from sgl_esft.formats.safetensors_header import TensorInfo, read_header

# One architecture for each way of naming experts; without a base the name is all there is to see.
_NAMING_STYLES: Final = ("DeepseekV2ForCausalLM", "MixtralForCausalLM")


@dataclass(frozen=True)
class AdapterReport:
    """A validated adapter, and the base it was checked against (None: against itself only)."""

    manifest: AdapterManifest
    base: Path | None

    def as_json(self) -> dict[str, object]:
        """The report as JSON values; sizes in bytes, `experts` from layer id to expert ids."""
        manifest = self.manifest
        return {
            "path": str(manifest.path),
            "base": None if self.base is None else str(self.base),
            "dtype": manifest.dtype,
            "num_bytes": manifest.num_bytes,
            "num_experts": manifest.num_experts,
            "num_moe_layers": manifest.num_moe_layers,
            "max_experts_per_layer": manifest.max_experts_per_layer,
            "mean_experts_per_layer": manifest.mean_experts_per_layer,
            "sparsity": manifest.sparsity,
            "experts": {str(layer): list(ids) for layer, ids in manifest.experts.items()},
        }

    def as_table(self) -> Iterator[str]:
        """The report as lines for a terminal."""
        manifest = self.manifest
        tuned, layers = len(manifest.experts), manifest.num_moe_layers
        yield f"adapter   {manifest.path}"
        yield f"base      {self.base or 'not given (--base): layers without experts are unknown'}"
        yield (
            f"experts   {manifest.num_experts} in {tuned} of {layers} MoE layers, "
            f"at most {manifest.max_experts_per_layer} "
            f"and on average {manifest.mean_experts_per_layer:.2f} a layer"
        )
        yield f"sparsity  {manifest.sparsity:.2f} of padded slots would be empty"
        yield f"size      {manifest.num_bytes / 1e6:,.1f} MB, {manifest.dtype}"
        yield ""
        yield "layer  experts  ids"
        for layer, ids in manifest.experts.items():
            yield f"{layer:5}  {len(ids):7}  {' '.join(map(str, ids))}"


def inspect_adapter(path: str, base_dir: Path | None) -> AdapterReport:
    """Validate the folder against its base model or, without one, against itself.

    Reads its weights too: raises AdapterNotFiniteError.
    """
    folder = resolve_adapter_path(path, None)
    spec = _implied_spec(folder) if base_dir is None else read_moe_spec(base_dir)
    manifest = read_manifest(folder, spec)
    check_weights(folder.name, manifest)
    return AdapterReport(manifest, base_dir)


def _implied_spec(folder: Path) -> MoeSpec:
    """The smallest model that the adapter could be for: its own layers, ids, shapes and dtype."""
    headers = [read_header(file) for file in adapter_weight_files(folder)]
    experts = read_expert_config(folder / EXPERT_CONFIG_NAME)
    found = {name: info for header in headers for name, info in header.tensors.items()}
    layer, expert = next((layer, ids[0]) for layer, ids in experts.items())
    for architecture in _NAMING_STYLES:
        spec = MoeSpec(
            architecture=architecture,
            num_layers=max(experts) + 1,
            moe_layer_ids=tuple(experts),
            num_experts=max(ids[-1] for ids in experts.values()) + 1,
            hidden_size=0,
            expert_intermediate_size=0,
            dtype="",
        )
        name = spec.expert_tensor_name(layer, expert, "gate")
        info = found.get(name) or found.get(name.removeprefix("model."))
        if info is not None:
            return _with_shape(spec, name, info)
    raise AdapterFormatError(
        f"the adapter has no gate tensor of expert {expert} in layer {layer}, which "
        f"{EXPERT_CONFIG_NAME} lists."
    )


def _with_shape(spec: MoeSpec, name: str, info: TensorInfo) -> MoeSpec:
    if len(info.shape) != 2 or info.dtype not in DTYPE_BYTES:
        raise AdapterMismatchError(
            f"tensor {name} is {info.dtype} {list(info.shape)}; an expert's is a matrix of "
            f"{', '.join(DTYPE_BYTES)}."
        )
    width, hidden = info.shape
    return replace(spec, hidden_size=hidden, expert_intermediate_size=width, dtype=info.dtype)
