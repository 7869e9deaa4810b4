"""A random checkpoint of DeepSeek-V2-Lite's shape, 31.4 GB, and adapters of published configs.

    LargeShape --[write_base]--> a file a layer, each expert from a generator of its own seed
    expert_cfg.json of ESFT's authors --[write_adapter]--> a folder with those experts, random too

What is there already is kept, so a run that was cut off goes on. No model is made: of a shape only
the names and sizes of its tensors are asked for, on no device. Written files leave the page cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sgl_esft.byte_size import gigabytes
from sgl_esft.formats.adapter_config import (
    EXPERT_CONFIG_NAME,
    read_expert_config,
    write_expert_config,
)
from sgl_esft.formats.checkpoint import INDEX_NAME
from sgl_esft.formats.expert_scheme import ExpertPart
from sgl_esft.formats.model_spec import PROJS, MoeSpec, read_moe_spec
from sgl_esft.quant.tensor_file import file_header, raw_bytes

SPARE_BYTES = 2 * 10**9  # of the disk, that stay free
SHAPE_NAME = "shape.json"
CONTEXT = 4096
DTYPE = torch.bfloat16

Shapes = Mapping[str, tuple[int, ...]]  # tensor name -> shape
Experts = Mapping[int, tuple[int, ...]]  # layer id -> expert ids


@dataclass(frozen=True)
class LargeShape:
    """DeepSeek-V2-Lite's sizes; layer 0 is dense."""

    num_layers: int = 27
    hidden_size: int = 2048
    dense_width: int = 10944
    expert_width: int = 1408
    num_experts: int = 64
    top_k: int = 6
    num_shared: int = 2
    num_heads: int = 16
    kv_lora_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    vocab_size: int = 102400
    seed: int = 0

    @property
    def expert_bytes(self) -> int:
        """Of one routed expert."""
        return len(PROJS) * self.hidden_size * self.expert_width * DTYPE.itemsize

    @property
    def routed_bytes(self) -> int:
        """Of all of them."""
        return (self.num_layers - 1) * self.num_experts * self.expert_bytes


def config_of(shape: LargeShape) -> Any:
    """transformers' configuration: the zoo's architecture at this shape."""
    from sgl_esft.zoo import model as zoo  # transformers, after sgl_esft has prepared for it

    known = zoo.new_config().to_dict()
    rope = {**known["rope_parameters"], "original_max_position_embeddings": CONTEXT}
    changes = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.dense_width,
        "moe_intermediate_size": shape.expert_width,
        "num_hidden_layers": shape.num_layers,
        "n_routed_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "n_shared_experts": shape.num_shared,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_nope_head_dim": shape.nope_dim,
        "qk_rope_head_dim": shape.rope_dim,
        "v_head_dim": shape.nope_dim,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": rope,
        "dtype": "bfloat16",
    }
    return zoo.DeepseekV2Config(**{**known, **changes})


def trunk_shapes(shape: LargeShape) -> dict[str, tuple[int, ...]]:
    """All tensors but the routed experts'."""
    from sgl_esft.zoo import model as zoo

    with torch.device("meta"):
        state = zoo.DeepseekV2ForCausalLM(config_of(shape)).state_dict()
    return {n: tuple(t.shape) for n, t in state.items() if ".mlp.experts." not in n}


@cache
def trunk_bytes(shape: LargeShape) -> int:
    """Of all tensors but the routed experts'."""
    return num_bytes_of(trunk_shapes(shape))


# ---- files ----


def write_base(shape: LargeShape, folder: Path) -> None:
    """Raises SystemExit for too little room, and for a folder that holds another shape."""
    from sgl_esft.zoo import tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    check_shape(shape, folder)
    if (folder / INDEX_NAME).exists():
        return
    trunk = trunk_shapes(shape)
    files = dict(files_of(shape, trunk))
    check_room(folder, missing_bytes(folder, _sizes(files)))
    config_of(shape).save_pretrained(folder)
    tokenizer.save(folder)
    _write_files(folder, files, shape.seed)
    weight_map = {name: file for file, shapes in files.items() for name in shapes}
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_adapter(config: Path, base: Path, shape: LargeShape, folder: Path) -> None:
    """The experts that a published config names, in the layers that there are."""
    if (folder / EXPERT_CONFIG_NAME).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    experts = adapter_experts(config, shape)
    spec = read_moe_spec(base)
    files = {
        f"layer-{layer:02}.safetensors": dict(expert_shapes(spec, layer, ids))
        for layer, ids in experts.items()
    }
    check_room(folder, missing_bytes(folder, _sizes(files)))
    _write_files(folder, files, adapter_seed(config, shape))
    write_expert_config(folder / EXPERT_CONFIG_NAME, experts)


def adapter_seed(config: Path, shape: LargeShape) -> int:
    """Of an adapter's weights."""
    return shape.seed + 1 + sum(map(ord, config.stem))


def adapter_experts(config: Path, shape: LargeShape) -> Experts:
    """Of a published config, those that a model of so many layers and experts has."""
    listed = read_expert_config(config)
    found = {
        layer: tuple(expert for expert in ids if expert < shape.num_experts)
        for layer, ids in listed.items()
        if layer < shape.num_layers
    }
    return {layer: ids for layer, ids in found.items() if ids}


def check_room(folder: Path, num_bytes: int) -> None:
    """Raises SystemExit. Told at once, and not after most of it was written."""
    free = shutil.disk_usage(folder).free
    if num_bytes and num_bytes + SPARE_BYTES > free:
        raise SystemExit(
            f"{folder} needs {gigabytes(num_bytes)} and {gigabytes(SPARE_BYTES)} to spare, but "
            f"{gigabytes(free)} are free: name another --folder, or fewer --layers"
        )


def check_shape(shape: LargeShape, folder: Path) -> None:
    """Raises SystemExit where the folder holds a model of another shape."""
    said = folder / SHAPE_NAME
    if said.exists() and json.loads(said.read_text()) != asdict(shape):
        raise SystemExit(f"{folder} holds a model of another shape: name another --folder")
    said.write_text(json.dumps(asdict(shape)))


def files_of(shape: LargeShape, trunk: Shapes) -> Iterator[tuple[str, Shapes]]:
    """A file a layer, and one of what is in no layer."""
    spec = MoeSpec.from_config(json.loads(config_of(shape).to_json_string(use_diff=False)))
    outside = {n: s for n, s in trunk.items() if not n.startswith("model.layers.")}
    yield "outside.safetensors", outside
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        shapes = {n: s for n, s in trunk.items() if n.startswith(prefix)}
        if layer in spec.moe_layer_ids:
            shapes |= dict(expert_shapes(spec, layer, range(spec.num_experts)))
        yield f"layer-{layer:02}.safetensors", shapes


def expert_shapes(
    spec: MoeSpec, layer: int, ids: Iterable[int]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of these experts' projections."""
    for expert in ids:
        for proj in PROJS:
            yield spec.expert_tensor_name(layer, expert, proj), spec.expert_tensor_shape(proj)


def _sizes(files: Mapping[str, Shapes]) -> dict[str, int]:
    return {name: num_bytes_of(shapes) for name, shapes in files.items()}


def num_bytes_of(shapes: Shapes) -> int:
    """Of tensors of these shapes, unquantised."""
    return sum(torch.Size(shape).numel() for shape in shapes.values()) * DTYPE.itemsize


def _write_files(folder: Path, files: Mapping[str, Shapes], seed: int) -> None:
    for name in missing_files(folder, _sizes(files)):
        tensors = {each: random_tensor(each, s, seed) for each, s in files[name].items()}
        write_tensors(folder / name, tensors)


def missing_bytes(folder: Path, sizes: Mapping[str, int]) -> int:
    """sizes: bytes by file name."""
    return sum(size for name, size in sizes.items() if not (folder / name).exists())


def missing_files(folder: Path, sizes: Mapping[str, int]) -> Iterator[str]:
    """Names of those that are not there; of each, once it is written, a line of progress."""
    began, done, total = time.monotonic(), 0, missing_bytes(folder, sizes)
    for number, (name, size) in enumerate(sizes.items(), 1):
        if (folder / name).exists():
            continue
        yield name
        done += size
        seconds = time.monotonic() - began
        left = seconds / done * (total - done)
        print(
            f"{folder.name}: file {number} of {len(sizes)}, {gigabytes(done)} of "
            f"{gigabytes(total)}, {seconds:.0f} s, {left:.0f} s left",
            flush=True,
        )


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A safetensors file, whole or not at all; it leaves the page cache.

    Tensors begin where ours do, at DATA_ALIGNMENT, so that they can be read straight to their
    places; files that others wrote are packed for that (`sgl-esft pack`).
    """
    partial = path.with_suffix(".partial")
    header, places = file_header({name: _part_of(each) for name, each in tensors.items()})
    with partial.open("wb") as file:
        file.write(header)
        for name in places:  # as they lie
            file.write(raw_bytes(tensors[name]))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    partial.replace(path)


def _part_of(tensor: torch.Tensor) -> ExpertPart:
    return ExpertPart("weight", str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Norms are 1; all else is drawn for this tensor alone, at a scale that keeps sums small."""
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=DTYPE)
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randn(shape, generator=generator, dtype=DTYPE).mul_(shape[-1] ** -0.5)
