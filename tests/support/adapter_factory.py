"""Random ESFT adapters for a random base, and every way of breaking one.

    base = write_random_base(tmp / "base", "DeepseekV2ForCausalLM", seed=1)
    adapter = write_random_adapter(tmp / "math", base, seed=2)
    expected_error = corrupt(adapter, "missing_tensor")

`BAD_ADAPTERS` names the breakages, for tests of the reader and of a whole server alike.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from sgl_esft.formats.adapter_config import EXPERT_CONFIG_NAME, write_expert_config
from sgl_esft.formats.model_spec import PROJS, MoeSpec, expert_keys, read_moe_spec
from tests.support.bad_adapters import BAD_ADAPTERS, BAD_WEIGHTS, BadAdapter, corrupt
from tests.support.base_factory import (
    SERVED_ARCHITECTURES,
    random_base_config,
    random_weight,
    save_shards,
    write_random_base,
)

__all__ = [
    "BAD_ADAPTERS",
    "BAD_WEIGHTS",
    "SERVED_ARCHITECTURES",
    "BadAdapter",
    "corrupt",
    "random_base_config",
    "random_experts",
    "write_random_adapter",
    "write_random_base",
]


def random_experts(spec: MoeSpec, seed: int, max_experts: int) -> dict[int, tuple[int, ...]]:
    """Different counts a layer: one layer full, one without any, the others in between."""
    rng = random.Random(seed)
    layers = list(spec.moe_layer_ids)
    rng.shuffle(layers)
    counts = [max_experts, 0, *(rng.randint(1, max_experts) for _ in layers[2:])]
    return {
        layer: tuple(sorted(rng.sample(range(spec.num_experts), count)))
        for layer, count in sorted(zip(layers, counts, strict=False))
        if count
    }


def write_random_adapter(
    folder: Path,
    base_dir: Path,
    seed: int,
    experts: Mapping[int, Sequence[int]] | None = None,
    *,
    max_experts: int = 4,
    old_prefix: bool = False,
    num_shards: int = 1,
    shared_layers: Sequence[int] = (),
) -> Path:
    """Write an adapter for `base_dir` into `folder`: fresh weights at the scale of the base's.

    `experts` (layer id -> expert ids) or, without it, a random choice of up to `max_experts`.
    `old_prefix` writes names without ``model.``; several shards come with an index.
    `shared_layers`: those whose shared experts it has too.
    """
    spec = read_moe_spec(base_dir)
    if experts is None:
        experts = random_experts(spec, seed, max_experts)
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, spec.dtype)
    shapes: dict[str, tuple[int, ...]] = {
        spec.expert_tensor_name(*key): spec.expert_tensor_shape(key[2])
        for key in expert_keys(experts)
    }
    for layer in shared_layers:
        for proj in PROJS:
            shapes[spec.shared_tensor_name(layer, proj)] = spec.shared_part(proj).shape
    tensors = {
        name.removeprefix("model.") if old_prefix else name: random_weight(
            name, shape, generator
        ).to(dtype)
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_expert_config(
        folder / EXPERT_CONFIG_NAME,
        {layer: tuple(ids) for layer, ids in experts.items()},
        shared_experts=bool(shared_layers),
    )
    save_shards(folder, tensors, num_shards)
    return folder
