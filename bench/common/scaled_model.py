"""A random DeepSeek-V2 of V2-Lite's shape that two CPU cores can serve, and adapters of it.

    ScaledShape -> [scaled_model] -> build/bench-models/<hash>/base, adapters/a00..., merged/a00...

64 routed experts, top-6, 2 shared, as DeepSeek-V2-Lite; fewer and smaller layers. As there, the
routed experts are over nine tenths of the bytes, so that a decode step is spent in experts.

An adapter tunes the experts that a published config names, in as many of its 26 layers as there
are here; past the four configs they repeat (ExpertWeave 5.1 repeats its ten). Adapters with the
same ids have weights of their own. What is not like a real adapter: a random router does not
prefer the tuned experts, so fewer tokens are rerouted than the 20% or so of real ones.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from sgl_esft.formats.adapter_config import (
    EXPERT_CONFIG_NAME,
    read_expert_config,
    write_expert_config,
)
from sgl_esft.formats.model_spec import PROJS, read_moe_spec
from sgl_esft.tools.merge import merge_adapter

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "bench-models"
PUBLISHED = tuple(
    ROOT / "tests" / "data" / "esft" / f"{name}.json"
    for name in ("gate-intent", "gate-law", "token-intent", "token-law")
)
NUM_PUBLISHED_LAYERS = 26
FORMAT = 1  # of the files written here: another one is another cache folder
# The demo's tokenizer without its spare ids: each token decodes to text, and the client sees a
# token only where it has text.
VOCAB_SIZE = 98

Experts = Mapping[int, tuple[int, ...]]  # MoE layer id -> ascending expert ids


@dataclass(frozen=True)
class ScaledShape:
    """Sizes of the scaled model; the published configs need 64 routed experts."""

    hidden_size: int = 512
    expert_width: int = 384  # a multiple of 32 for each rank, or SGLang pads it on a CPU
    num_moe_layers: int = 4
    seed: int = 0

    @property
    def moe_layer_ids(self) -> range:
        """Layer 0 is dense."""
        return range(1, self.num_moe_layers + 1)

    def key(self) -> str:
        """Names the cache folder; other sizes or another FORMAT have another key."""
        said = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class ScaledModel:
    """Folders of a scaled model; what is missing is written when it is asked for."""

    shape: ScaledShape
    folder: Path

    @classmethod
    def of(cls, shape: ScaledShape, cache: Path = CACHE) -> ScaledModel:
        """The model of this shape under `cache`; nothing is written yet."""
        return cls(shape, cache / shape.key())

    def base(self) -> Path:
        """The base checkpoint with its tokenizer, float32."""
        return _once(self.folder / "base", lambda out: _write_base(self.shape, out))

    def adapters(self, count: int) -> dict[str, Path]:
        """The first `count` adapters by name: a00, a01, ..."""
        return {f"a{index:02}": self._adapter(index) for index in range(count)}

    def merged(self, index: int) -> Path:
        """The base with adapter `index` written in."""
        base, adapter = self.base(), self._adapter(index)
        out = self.folder / "merged" / adapter.name
        return _once(out, lambda part: merge_adapter(base, adapter, part))

    def tuned(self, count: int) -> list[Experts]:
        """What each of the first `count` adapters tunes."""
        return [published_experts(index, self.shape) for index in range(count)]

    def _adapter(self, index: int) -> Path:
        base, out = self.base(), self.folder / "adapters" / f"a{index:02}"
        return _once(out, lambda part: _write_adapter(self.shape, base, index, part))


def published_experts(index: int, shape: ScaledShape) -> Experts:
    """Adapter `index`'s experts: a published config's, of layers spread over its 26."""
    published = read_expert_config(PUBLISHED[index % len(PUBLISHED)])
    step = NUM_PUBLISHED_LAYERS // shape.num_moe_layers
    return {
        layer: tuple(sorted(published[1 + (layer - 1) * step])) for layer in shape.moe_layer_ids
    }


def config_changes(shape: ScaledShape) -> dict[str, object]:
    """What this shape changes in the demo model's config: V2-Lite's counts and proportions."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": shape.hidden_size,
        "intermediate_size": 8 * shape.expert_width,
        "moe_intermediate_size": shape.expert_width,
        "num_hidden_layers": 1 + shape.num_moe_layers,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "initializer_range": 1 / shape.hidden_size**0.5,
    }


def _write_base(shape: ScaledShape, folder: Path) -> None:
    from sgl_esft.zoo import model as zoo  # transformers, after sgl_esft has prepared for it

    config = zoo.DeepseekV2Config(**{**zoo.new_config().to_dict(), **config_changes(shape)})
    torch.manual_seed(shape.seed)
    zoo.save_model(zoo.DeepseekV2ForCausalLM(config), folder)


def _write_adapter(shape: ScaledShape, base: Path, index: int, folder: Path) -> None:
    """Fresh weights at the scale of the base's."""
    spec = read_moe_spec(base)
    experts = published_experts(index, shape)
    generator = torch.Generator().manual_seed(1000 * (shape.seed + 1) + index)
    scale = 1 / shape.hidden_size**0.5
    tensors = {
        spec.expert_tensor_name(layer, expert, proj): scale
        * torch.randn(spec.expert_tensor_shape(proj), generator=generator)
        for layer, ids in experts.items()
        for expert in ids
        for proj in PROJS
    }
    folder.mkdir(parents=True)
    write_expert_config(folder / EXPERT_CONFIG_NAME, experts)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _once(folder: Path, write: Callable[[Path], None]) -> Path:
    """`folder`, written first where it is missing; one that was cut off is never seen."""
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.parent.mkdir(parents=True, exist_ok=True)
        write(part)
        part.rename(folder)
    return folder
