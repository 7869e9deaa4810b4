"""Random LoRA adapters for a random base, and the checkpoint that each of them means.

    lora = write_random_lora(tmp / "tone", base, seed=3)
    merge_lora(base, lora, tmp / "merged")    # W + scaling * B @ A, in float64

Which layers there are is read off the base checkpoint itself, not asked of the code under test.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LORA_CONFIG = "adapter_config.json"
LORA_WEIGHTS = "adapter_model.safetensors"
# Linear layers of all served families that are neither routed experts nor routers.
_LINEAR = re.compile(
    r"(model\.layers\.\d+\.(?:self_attn|mlp|mlp\.shared_experts?)\.(\w+_proj(?:_with_mqa)?))\.weight"
)


def linear_layers(base: Path) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """(path, target, [out, in]) of every layer that a LoRA adapter may change."""
    for name, tensor in load_file(base / "model.safetensors").items():
        found = _LINEAR.fullmatch(name)
        if found is not None:
            yield found[1], found[2], (tensor.shape[0], tensor.shape[1])


def write_random_lora(
    folder: Path,
    base: Path,
    seed: int,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    targets: Collection[str] | None = None,
    layers: Collection[int] | None = None,
    dtype: torch.dtype = torch.float32,
    loudness: float = 1.0,
    **settings: Any,
) -> Path:
    """Write an adapter as PEFT does. targets, layers: None = all; settings: of its config."""
    generator = torch.Generator().manual_seed(seed)
    tensors, used = {}, set()
    for path, target, (outs, ins) in linear_layers(base):
        if (targets is not None and target not in targets) or (
            layers is not None and int(path.split(".")[2]) not in layers
        ):
            continue
        used.add(target)
        prefix = f"base_model.model.{path}"
        a = torch.randn((rank, ins), generator=generator) / math.sqrt(ins)
        b = torch.randn((outs, rank), generator=generator) * loudness / (alpha * math.sqrt(rank))
        tensors[f"{prefix}.lora_A.weight"] = a.to(dtype)
        tensors[f"{prefix}.lora_B.weight"] = (b * rank).to(dtype)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "somewhere",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(used),
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
        "init_lora_weights": True,
        "rank_pattern": {},
        "alpha_pattern": {},
        **settings,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LORA_CONFIG).write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / LORA_WEIGHTS, metadata={"format": "pt"})
    return folder


def scaling_of(config: Mapping[str, Any]) -> float:
    """What PEFT multiplies B @ A by."""
    root = math.sqrt(config["r"]) if config.get("use_rslora") else config["r"]
    return float(config["lora_alpha"] / root)


def merge_lora(base: Path, lora: Path, out: Path) -> Path:
    """Write the base with the adapter written in, into a new folder."""
    shutil.copytree(base, out)
    weights = load_file(base / "model.safetensors")
    matrices = load_file(lora / LORA_WEIGHTS)
    scaling = scaling_of(json.loads((lora / LORA_CONFIG).read_text()))
    for name, a in matrices.items():
        if ".lora_A." in name:
            b = matrices[name.replace(".lora_A.", ".lora_B.")]
            path = name.removeprefix("base_model.model.").replace(".lora_A", "")
            changed = weights[path].double() + scaling * (b.double() @ a.double())
            weights[path] = changed.to(weights[path].dtype)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out
