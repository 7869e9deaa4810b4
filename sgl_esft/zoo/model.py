"""The zoo's models: their sizes, their checkpoints on disk, and greedy answers in transformers.

`train` builds one with `new_model` and writes it with `save_model`; SGLang and tests read
the folder. transformers keeps a layer's experts in two stacked tensors, checkpoints name
every expert apart; `expert_tensors` is that step.

A model computes in float32 here; its config's dtype is what its checkpoints are stored in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

from sgl_esft.formats.model_spec import read_moe_spec, refuse_quantised
from sgl_esft.zoo import tokenizer
from sgl_esft.zoo.taskset import Example

CONTEXT = 512


@dataclass(frozen=True)
class ZooSize:
    """What the zoo's models differ in. Layer 0 is dense, all others are MoE layers."""

    hidden_size: int
    dense_width: int
    expert_width: int
    num_moe_layers: int
    num_experts: int  # routed, of a layer
    dtype: str  # of the checkpoint


DEMO = ZooSize(128, 256, 64, 3, 16, "float32")
# Deep enough to look layers ahead. Its checkpoints lie beside the demo's 15.6 MB, all of them below
# 25 MB (tests/repo/test_hygiene.py), so it has 9.4 MB:
#   routed experts   12 layers * 32 * (3 * 64 * 32)                       2,359,296 parameters
#   shared experts   12 * (3 * 64 * 32)                                      73,728
#   routers          12 * 32 * 64                                            24,576
#   attention        13 * (64 * 192 + 64 * 80 + 64 * 256 + 128 * 64)        545,792
#   the rest         embeddings 2 * 128 * 64, dense 3 * 64 * 128, norms      43,520
# 3,046,912 in bfloat16, and names: 6.2 MB. An adapter of 8 experts a layer has 12 * 8 * 12,288 B =
# 1.2 MB. With two: 8.6 MB. A projection is 64 * 32 * 2 B, one page, to which packed files align.
DEEP = ZooSize(64, 128, 32, 12, 32, "bfloat16")


def new_config(size: ZooSize = DEMO) -> DeepseekV2Config:
    """DeepSeek-V2-Lite's architecture at a size of two or three million parameters."""
    return DeepseekV2Config(
        architectures=["DeepseekV2ForCausalLM"],
        vocab_size=tokenizer.VOCAB_SIZE,
        hidden_size=size.hidden_size,
        intermediate_size=size.dense_width,
        moe_intermediate_size=size.expert_width,
        num_hidden_layers=1 + size.num_moe_layers,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        n_routed_experts=size.num_experts,
        num_experts_per_tok=4,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        scoring_func="softmax",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        max_position_embeddings=CONTEXT,
        initializer_range=0.06,
        # SGLang wants a yarn entry for this architecture and scales by it otherwise than
        # transformers does; at factor 1 both leave rotary angles and attention alone.
        # The low theta tells positions apart within the forty or so tokens of a line.
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": CONTEXT,
        },
        bos_token_id=None,
        eos_token_id=tokenizer.END_ID,
        pad_token_id=tokenizer.PAD_ID,
        tie_word_embeddings=False,
        dtype=size.dtype,
    )


def new_model(seed: int, size: ZooSize = DEMO) -> DeepseekV2ForCausalLM:
    """A float32 model with random weights, the same for the same seed."""
    torch.manual_seed(seed)
    # "eager" visits one expert after the other, which on a CPU is the fastest.
    model = DeepseekV2ForCausalLM._from_config(
        new_config(size), dtype=torch.float32, experts_implementation="eager"
    )
    return _stored_in(model, size.dtype)


def load_model(folder: Path) -> DeepseekV2ForCausalLM:
    """The model of a checkpoint folder, float32, for evaluation. Raises UnsupportedModelError."""
    spec = read_moe_spec(folder)
    refuse_quantised(spec, "the zoo's own evaluation")
    model = DeepseekV2ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )
    return _stored_in(model, spec.dtype).eval()


def _stored_in(model: DeepseekV2ForCausalLM, dtype: str) -> DeepseekV2ForCausalLM:
    """transformers has set the config's dtype to that of the weights in memory."""
    model.config.dtype = getattr(torch, dtype)
    return model


@torch.no_grad()
def as_stored(model: DeepseekV2ForCausalLM) -> DeepseekV2ForCausalLM:
    """The same model, its weights rounded as its checkpoint has them."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(model.config.dtype))
    return model


def moe_layers(model: nn.Module) -> dict[int, nn.Module]:
    """The MoE blocks by layer number, in order."""
    layers = model.get_submodule("model.layers").named_children()
    blocks = {int(name): layer.get_submodule("mlp") for name, layer in layers}
    return {layer: block for layer, block in blocks.items() if hasattr(block, "experts")}


def expert_tensors(block: nn.Module, layer: int, expert: int) -> Iterator[tuple[str, Tensor]]:
    """Checkpoint names and weights of one expert: gate and up ``[I, H]``, down ``[H, I]``."""
    prefix = f"model.layers.{layer}.mlp.experts.{expert}"
    gate_up = block.get_parameter("experts.gate_up_proj").detach()[expert]
    gate, up = gate_up.chunk(2)
    yield f"{prefix}.gate_proj.weight", gate
    yield f"{prefix}.up_proj.weight", up
    yield f"{prefix}.down_proj.weight", block.get_parameter("experts.down_proj").detach()[expert]


def save_tensors(tensors: Mapping[str, Tensor], file: Path, dtype: torch.dtype) -> None:
    """Write `tensors` as safetensors of this dtype, each with memory of its own."""
    save_file(
        {name: t.detach().clone().to(dtype).contiguous() for name, t in tensors.items()},
        file,
        metadata={"format": "pt"},
    )


def save_model(model: DeepseekV2ForCausalLM, folder: Path) -> None:
    """Write config, tokenizer and weights with one name per expert into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    tokenizer.save(folder)
    tensors = {name: t for name, t in model.state_dict().items() if ".mlp.experts." not in name}
    for layer, block in moe_layers(model).items():
        for expert in range(model.config.n_routed_experts):
            tensors.update(expert_tensors(block, layer, expert))
    save_tensors(tensors, folder / "model.safetensors", model.config.dtype)


@torch.no_grad()
def greedy_answers(
    model: DeepseekV2ForCausalLM, prompts: list[str], max_new_tokens: int = 48
) -> list[str]:
    """The model's greedy answer to each prompt, up to its newline.

    Prompts of one length share a batch, so no padding and no mask are needed.
    """
    answers: dict[int, str] = {}
    for length in sorted({len(prompt) for prompt in prompts}):
        rows = [row for row, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([tokenizer.encode(prompts[row]) for row in rows])
        answers.update(zip(rows, _continue(model, ids, max_new_tokens), strict=True))
    return [answers[row] for row in range(len(prompts))]


def _continue(model: DeepseekV2ForCausalLM, ids: Tensor, max_new_tokens: int) -> list[str]:
    """Greedy continuations of ``ids [rows, length]``."""
    cache, step, emitted = None, ids, []
    done = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(max_new_tokens):
        output = model(step, past_key_values=cache, use_cache=True)
        cache, step = output.past_key_values, output.logits[:, -1:].argmax(-1)
        emitted.append(step)
        done |= step[:, 0] == tokenizer.END_ID
        if bool(done.all()):
            break
    return [tokenizer.decode(row) for row in torch.cat(emitted, 1).tolist()]


def exact_match(model: DeepseekV2ForCausalLM, examples: list[Example]) -> float:
    """The share of `examples` answered exactly, greedily."""
    # One token more than the longest answer: what has not ended by then is wrong anyway.
    limit = max(len(example.answer) for example in examples) + 1
    answers = greedy_answers(model, [example.prompt for example in examples], limit)
    right = [answer == example.answer for answer, example in zip(answers, examples, strict=True)]
    return sum(right) / len(right)
