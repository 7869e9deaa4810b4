"""A checkpoint of DeepSeek-V2-Lite's shape, random, and adapters of it, for bench/gpu/run.py.

    config.json, expert configs -> [write_base, write_adapter] -> folders that a server can load

Dummy weights that SGLang would make itself (`--load-format dummy`) do not go with weaving: they are
written to every slot, and a slot without memory cannot be written. Files are written straight from
one random buffer, as fast as the disk takes them. Layers are left out where 16B do not fit.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from sgl_esft.formats.adapter_config import (
    EXPERT_CONFIG_NAME,
    read_expert_config,
    write_expert_config,
)
from sgl_esft.formats.model_spec import PROJS, MoeSpec

# What the published config.json says beside the sizes.
SERVED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    # DeepSeek-V2's; V2-Lite's is 1. Experts of random weights would hardly be seen in the logits.
    "routed_scaling_factor": 16.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
_PROBE_BYTES = 512 << 20
_POOL_ELEMENTS = 64 << 20  # random numbers that all weights repeat

Shapes = Iterator[tuple[str, tuple[int, ...]]]


class Pool:
    """Bytes of bfloat16 noise, and of ones for norms."""

    def __init__(self, num_elements: int = _POOL_ELEMENTS, std: float = 0.02) -> None:
        noise = torch.randn(num_elements, generator=torch.Generator().manual_seed(0)).mul_(std)
        self._noise = memoryview(noise.bfloat16().view(torch.uint8).numpy())
        self._one = torch.ones(1, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
        self._at = 0

    def write(self, file: BinaryIO, name: str, shape: tuple[int, ...]) -> None:
        """One tensor's bytes; each goes on in the pool where the one before ended."""
        left = 2 * math.prod(shape)
        if "norm" in name:
            file.write(self._one * (left // 2))
            return
        while left:
            part = self._noise[self._at : self._at + left]
            file.write(part)
            left -= len(part)
            self._at = (self._at + len(part)) % len(self._noise)


def write_shard(path: Path, shapes: Mapping[str, tuple[int, ...]], pool: Pool) -> None:
    """A safetensors file of these tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            pool.write(file, name, shape)


def write_base(folder: Path, config: Mapping[str, Any], pool: Pool) -> None:
    """The checkpoint, a file a layer, and its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, shapes in enumerate(_shards(config)):
        file = f"model-{number:05}.safetensors"
        write_shard(folder / file, shapes, pool)
        weight_map |= dict.fromkeys(shapes, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_tokenizer(folder, config["vocab_size"])


def write_adapter(folder: Path, expert_config: Path, config: Mapping[str, Any], pool: Pool) -> None:
    """The experts that `expert_config` names in the layers that the model has."""
    spec = MoeSpec.from_config(config)
    listed = read_expert_config(expert_config)
    experts = {
        layer: tuple(expert for expert in ids if expert < spec.num_experts)
        for layer, ids in listed.items()
        if layer in spec.moe_layer_ids
    }
    experts = {layer: ids for layer, ids in experts.items() if ids}
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {
        spec.expert_tensor_name(layer, expert, proj): spec.expert_tensor_shape(proj)
        for layer, ids in experts.items()
        for expert in ids
        for proj in PROJS
    }
    write_shard(folder / "model.safetensors", shapes, pool)
    write_expert_config(folder / EXPERT_CONFIG_NAME, experts)


def bytes_by_layer(config: Mapping[str, Any]) -> tuple[int, int]:
    """(the trunk's ends and the dense layers, a layer with experts), in bfloat16."""
    ends, *layers = (sum(2 * math.prod(s) for s in shapes.values()) for shapes in _shards(config))
    return ends + sum(layers[: config["first_k_dense_replace"]]), layers[-1]


def layers_that_fit(config: Mapping[str, Any], folder: Path, seconds: float) -> int:
    """Layers of which model and adapters can be written in `seconds` and fit the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    bytes_a_second = _probe(folder)
    room = min(seconds * bytes_a_second, shutil.disk_usage(folder).free * 0.9)
    sizes = [sum(2 * math.prod(s) for s in shapes.values()) for shapes in _shards(config)]
    trunk, layers = sizes[0], sizes[1:]
    # The four published adapters have at most 0.4 of a layer's experts between them.
    fitting = int((room - trunk) / (max(layers) * 1.4))
    return max(2, min(len(layers), fitting))


def _probe(folder: Path) -> float:
    """Bytes a second, written and flushed."""
    path, chunk = folder / "probe", bytes(16 << 20)
    start = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(_PROBE_BYTES // len(chunk)):
            file.write(chunk)
    seconds = time.perf_counter() - start
    path.unlink()
    return _PROBE_BYTES / seconds


def _shards(config: Mapping[str, Any]) -> Iterator[dict[str, tuple[int, ...]]]:
    """The trunk's ends, then each layer: names and shapes."""
    spec = MoeSpec.from_config(config)
    vocab, hidden = config["vocab_size"], spec.hidden_size
    yield {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(spec.num_layers):
        yield dict(_layer_shapes(config, spec, layer))


def _layer_shapes(config: Mapping[str, Any], spec: MoeSpec, layer: int) -> Shapes:
    prefix, hidden = f"model.layers.{layer}", spec.hidden_size
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{norm}.weight", (hidden,)
    yield from _attention_shapes(f"{prefix}.self_attn", config, hidden)
    if layer not in spec.moe_layer_ids:
        yield from _mlp_shapes(f"{prefix}.mlp", hidden, config["intermediate_size"])
        return
    yield f"{prefix}.mlp.gate.weight", (spec.num_experts, hidden)
    width = config["n_shared_experts"] * spec.expert_intermediate_size
    yield from _mlp_shapes(f"{prefix}.mlp.shared_experts", hidden, width)
    for expert in range(spec.num_experts):
        for proj in PROJS:
            yield spec.expert_tensor_name(layer, expert, proj), spec.expert_tensor_shape(proj)


def _attention_shapes(prefix: str, config: Mapping[str, Any], hidden: int) -> Shapes:
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    yield f"{prefix}.q_proj.weight", (heads * (nope + rope), hidden)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (rank + rope, hidden)
    yield f"{prefix}.kv_a_layernorm.weight", (rank,)
    yield f"{prefix}.kv_b_proj.weight", (heads * (nope + value), rank)
    yield f"{prefix}.o_proj.weight", (hidden, heads * value)


def _mlp_shapes(prefix: str, hidden: int, width: int) -> Shapes:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A token a character of ASCII, fillers for all other ids: each decodes to some text."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ("<bos>", "<eos>", "<unk>")
    words = (*special, *map(chr, range(32, 127)))
    vocab = {word: number for number, word in enumerate(words)}
    vocab |= {f"t{number} ": number for number in range(len(words), vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=special[2]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in special])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special[0],
        eos_token=special[1],
        pad_token=special[1],
        unk_token=special[2],
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    ).save_pretrained(folder)
