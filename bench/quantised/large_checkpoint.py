"""A random checkpoint of DeepSeek-V2-Lite's shape with quantised experts, and adapters alike.

    LargeShape, scheme --[write_base]--> what `sgl-esft quantise` makes of finemoe/large_model.py's
    expert_cfg.json of ESFT's authors --[write_adapter]--> what `sgl-esft quantise --adapter` makes

Tensor for tensor, but the 31.4 GB in bfloat16 are never on the disk. What is there
already is kept, so a run that was cut off goes on. Written files leave the page cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench.finemoe.large_model import (
    LargeShape,
    Shapes,
    adapter_experts,
    adapter_seed,
    check_room,
    check_shape,
    config_of,
    files_of,
    missing_bytes,
    missing_files,
    num_bytes_of,
    random_tensor,
    trunk_bytes,
    trunk_shapes,
    write_tensors,
)
from sgl_esft.formats.adapter_config import EXPERT_CONFIG_NAME, write_expert_config
from sgl_esft.formats.checkpoint import INDEX_NAME
from sgl_esft.formats.model_spec import PROJS, MoeSpec, read_moe_spec
from sgl_esft.quant.rounding import quantise_expert
from sgl_esft.quant.scheme_settings import choose_scheme, settings_of, unquantised_linears

Place = tuple[int, int]  # layer id, expert id


@dataclass(frozen=True)
class File:
    """Tensors as they are, and routed experts, quantised; `num_bytes` of all."""

    name: str
    plain: Shapes
    experts: tuple[Place, ...]
    num_bytes: int


def write_base(shape: LargeShape, scheme: str, folder: Path) -> None:
    """Raises SystemExit for too little room, and for a folder that holds another shape."""
    from sgl_esft.zoo import tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    check_shape(shape, folder)
    if (folder / INDEX_NAME).exists():
        return
    config_of(shape).save_pretrained(folder)
    tokenizer.save(folder)
    _name_scheme(scheme, folder / "config.json", trunk_shapes(shape))
    spec = read_moe_spec(folder)
    weight_map: dict[str, str] = {}
    files = list(_files_of_base(shape, spec))
    _write_files(folder, files, spec, shape.seed)
    for file in files:
        names = [*file.plain, *(n for place in file.experts for n in _part_names(spec, place))]
        weight_map |= dict.fromkeys(names, file.name)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_adapter(config: Path, base: Path, shape: LargeShape, folder: Path) -> None:
    """The experts that a published config names, quantised as the base's are."""
    if (folder / EXPERT_CONFIG_NAME).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    experts, spec = adapter_experts(config, shape), read_moe_spec(base)
    files = [_file(f"layer-{layer:02}", spec, layer, ids) for layer, ids in experts.items()]
    _write_files(folder, files, spec, adapter_seed(config, shape))
    write_expert_config(folder / EXPERT_CONFIG_NAME, experts)


def checkpoint_bytes(shape: LargeShape, spec: MoeSpec) -> int:
    """Of all tensors; `spec`: with its scheme."""
    return trunk_bytes(shape) + (shape.num_layers - 1) * shape.num_experts * spec.expert_bytes


def _name_scheme(scheme: str, config: Path, trunk: Shapes) -> None:
    """Into config.json, as write.py of sgl_esft/quant does."""
    said = json.loads(config.read_text())
    modules = {
        name.split(".", 3)[3].removesuffix(".weight")
        for name, shape in trunk.items()
        if name.startswith("model.layers.") and name.endswith(".weight") and len(shape) == 2
    }
    chosen = choose_scheme(scheme, MoeSpec.from_config(said), said)
    said["quantization_config"] = settings_of(chosen, unquantised_linears(modules))
    config.write_text(json.dumps(said, indent=2) + "\n")


def _files_of_base(shape: LargeShape, spec: MoeSpec) -> Iterator[File]:
    """A file a layer, and one of what is in no layer, as in bfloat16."""
    unquantised = replace(spec, scheme=None)
    layer_of = {f"layer-{layer:02}": layer for layer in spec.moe_layer_ids}
    for name, shapes in files_of(shape, trunk_shapes(shape)):
        plain, layer = dict(shapes), layer_of.get(Path(name).stem)
        if layer is None:
            yield File(name, plain, (), num_bytes_of(plain))
            continue
        for expert in range(spec.num_experts):
            for proj in PROJS:
                del plain[unquantised.expert_tensor_name(layer, expert, proj)]
        yield _file(Path(name).stem, spec, layer, range(spec.num_experts), plain)


def _file(
    stem: str, spec: MoeSpec, layer: int, experts: Iterable[int], plain: Shapes | None = None
) -> File:
    places, plain = tuple((layer, expert) for expert in experts), plain or {}
    num_bytes = num_bytes_of(plain) + len(places) * spec.expert_bytes
    return File(f"{stem}.safetensors", plain, places, num_bytes)


def _tensors(file: File, spec: MoeSpec, seed: int) -> dict[str, torch.Tensor]:
    """All of a file: one layer at most."""
    found = {name: random_tensor(name, shape, seed) for name, shape in file.plain.items()}
    for place in file.experts:
        found |= _expert(spec, place, seed)
    return found


def _expert(spec: MoeSpec, place: Place, seed: int) -> dict[str, torch.Tensor]:
    """Drawn as in bfloat16, and rounded."""
    assert spec.scheme is not None
    weights = {
        proj: random_tensor(
            spec.expert_tensor_name(*place, proj), spec.expert_tensor_shape(proj), seed
        )
        for proj in PROJS
    }
    parts = quantise_expert(weights, spec.scheme)
    return {
        spec.expert_part_name((*place, proj), part): parts[proj][part.suffix].contiguous()
        for proj in PROJS
        for part in spec.expert_parts(proj)
    }


def _part_names(spec: MoeSpec, place: Place) -> Iterator[str]:
    for proj in PROJS:
        for part in spec.expert_parts(proj):
            yield spec.expert_part_name((*place, proj), part)


def _write_files(folder: Path, files: Iterable[File], spec: MoeSpec, seed: int) -> None:
    """Those that are not there. Raises SystemExit for no room."""
    named = {file.name: file for file in files}
    sizes = {name: file.num_bytes for name, file in named.items()}
    check_room(folder, missing_bytes(folder, sizes))
    for name in missing_files(folder, sizes):
        write_tensors(folder / name, _tensors(named[name], spec, seed))
