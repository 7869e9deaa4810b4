"""What `sgl-esft inspect` says about an adapter folder, with or without its base model.

folder (+ base folder) -> [inspect_adapter] -> AdapterReport -> table or JSON
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from sgl_esft.errors import AdapterFormatError, AdapterMismatchError
from sgl_esft.formats.adapter_config import EXPERT_CONFIG_NAME, kind_of, read_config
from sgl_esft.formats.adapter_paths import adapter_weight_files, resolve_adapter_path
from sgl_esft.formats.expert_scheme import BLOCK, GROUP_SIZES, NIBBLES, ExpertScheme
from sgl_esft.formats.finite import check_weights
from sgl_esft.formats.manifest import AdapterManifest, read_manifest
from sgl_esft.formats.model_spec import DTYPE_BYTES, MoeSpec, read_moe_spec
from sgl_esft.formats.safetensors_header import TensorInfo, read_header
from sgl_esft.tools.lora_report import LoraReport, inspect_lora

# One architecture for each way of naming experts; without a base the name is all there is to see.
_NAMING_STYLES: Final = ("DeepseekV2ForCausalLM", "MixtralForCausalLM")
_SHARED_STYLES: Final = {
    "shared_experts": "DeepseekV2ForCausalLM",
    "shared_expert": "Qwen2MoeForCausalLM",
}
_SHARED_GATE: Final = re.compile(
    r"(?:model\.)?layers\.([0-9]{1,9})\.mlp\.(shared_experts?)\.gate_proj\.weight", re.ASCII
)


@dataclass(frozen=True)
class AdapterReport:
    """A validated adapter, and the base it was checked against (None: against itself only)."""

    manifest: AdapterManifest
    base: Path | None

    def as_json(self) -> dict[str, object]:
        """The report as JSON values; sizes in bytes, `experts` from layer id to expert ids,
        `shared_experts` the layers whose shared experts are tuned.
        """
        manifest = self.manifest
        return {
            "kind": "esft",
            "path": str(manifest.path),
            "base": None if self.base is None else str(self.base),
            "dtype": manifest.dtype,
            "scheme": None if manifest.scheme is None else manifest.scheme.label,
            "num_bytes": manifest.num_bytes,
            "num_experts": manifest.num_experts,
            "num_moe_layers": manifest.num_moe_layers,
            "max_experts_per_layer": manifest.max_experts_per_layer,
            "mean_experts_per_layer": manifest.mean_experts_per_layer,
            "sparsity": manifest.sparsity,
            "experts": {str(layer): list(ids) for layer, ids in manifest.experts.items()},
            "shared_experts": list(manifest.shared_layers),
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
        if shared := manifest.shared_layers:
            yield f"shared    shared experts of {len(shared)} layers: {' '.join(map(str, shared))}"
        yield f"sparsity  {manifest.sparsity:.2f} of padded slots would be empty"
        scheme = manifest.scheme
        stored = manifest.dtype if scheme is None else f"quantised as {scheme.label}"
        yield f"size      {manifest.num_bytes / 1e6:,.1f} MB, {stored}"
        yield ""
        yield "layer  experts  ids"
        for layer, ids in manifest.experts.items():
            yield f"{layer:5}  {len(ids):7}  {' '.join(map(str, ids))}"


def inspect_adapter(path: str, base_dir: Path | None) -> AdapterReport | LoraReport:
    """Validate the folder against its base model or, without one, against itself.

    Reads its weights too: raises AdapterNotFiniteError.
    """
    folder = resolve_adapter_path(path, None)
    if kind_of(folder) == "lora":
        return inspect_lora(folder, base_dir)
    spec = _implied_spec(folder) if base_dir is None else read_moe_spec(base_dir)
    manifest = read_manifest(folder, spec)
    check_weights(folder.name, manifest)
    return AdapterReport(manifest, base_dir)


def _implied_spec(folder: Path) -> MoeSpec:
    """The smallest model that the adapter could be for: its own layers, ids, shapes and dtype."""
    headers = [read_header(file) for file in adapter_weight_files(folder)]
    config = read_config(folder / EXPERT_CONFIG_NAME)
    experts = config.experts
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
        stem = spec.expert_tensor_name(layer, expert, "gate").removesuffix("weight")
        for start in (stem, stem.removeprefix("model.")):
            parts = {n.removeprefix(start): i for n, i in found.items() if n.startswith(start)}
            if parts:
                stored = _as_stored(spec, start, parts)
                return _with_shared(stored, found) if config.shared_experts else stored
    raise AdapterFormatError(
        f"the adapter has no gate tensor of expert {expert} in layer {layer}, which "
        f"{EXPERT_CONFIG_NAME} lists."
    )


def _as_stored(spec: MoeSpec, stem: str, parts: Mapping[str, TensorInfo]) -> MoeSpec:
    """With the widths, the dtype and the scheme of one gate projection's tensors, by suffix."""
    suffix = next((each for each in ("weight", "qweight") if each in parts), None)
    if suffix is None:
        raise AdapterFormatError(
            f"the adapter has {stem}{next(iter(parts))}, but not the numbers that belong to it."
        )
    info = parts[suffix]
    known = {*DTYPE_BYTES, "int8", "float8_e4m3fn"} if suffix == "weight" else {"int32"}
    if len(info.shape) != 2 or info.dtype not in known:
        raise AdapterMismatchError(
            f"tensor {stem}{suffix} is {info.dtype} {list(info.shape)}; an expert's is a matrix of "
            f"{', '.join(sorted(known))}."
        )
    width, hidden = info.shape
    if suffix == "qweight":
        width, hidden = hidden, width * NIBBLES
    scheme = _implied_scheme(info.dtype, hidden, parts)
    # Of a quantised adapter's base, the scales alone tell the dtype, and only int4's.
    dtype = info.dtype if scheme is None else scheme.scale_dtype
    sized = replace(spec, hidden_size=hidden, expert_intermediate_size=width)
    return replace(sized, dtype=dtype, scheme=scheme)


def _with_shared(spec: MoeSpec, tensors: Mapping[str, TensorInfo]) -> MoeSpec:
    """With the layers, the width and the naming of the shared experts that are there."""
    found = [(_SHARED_GATE.fullmatch(name), info) for name, info in tensors.items()]
    gates = [(match, info) for match, info in found if match is not None and len(info.shape) == 2]
    if not gates:
        raise AdapterFormatError(
            f"{EXPERT_CONFIG_NAME} has shared_experts = true, but there is no gate tensor of them, "
            "such as model.layers.1.mlp.shared_experts.gate_proj.weight."
        )
    layers = sorted({*spec.moe_layer_ids, *(int(match[1]) for match, _ in gates)})
    first, info = gates[0]
    return replace(
        spec,
        architecture=_SHARED_STYLES[first[2]],
        num_layers=layers[-1] + 1,
        moe_layer_ids=tuple(layers),
        shared_intermediate_size=info.shape[0],
    )


def _implied_scheme(
    dtype: str, hidden: int, parts: Mapping[str, TensorInfo]
) -> ExpertScheme | None:
    """The scheme whose tensors these would be; `read_manifest` says what does not fit it."""
    if dtype in DTYPE_BYTES:
        return None
    if dtype == "int8":
        return ExpertScheme("int8", 1, 0)
    if dtype == "int32":
        scales = parts.get("scales")
        num_groups = scales.shape[0] if scales is not None and scales.shape else 0
        group = hidden // num_groups if num_groups else 0
        group = group if group in GROUP_SIZES else GROUP_SIZES[0]
        return ExpertScheme("int4", 1, group, scales.dtype if scales else "bfloat16")
    if "weight_scale_inv" in parts:
        return ExpertScheme("fp8", BLOCK, BLOCK)
    return ExpertScheme("fp8-tensor", 0, 0)
