"""Whether this machine can run the rest, in a minute: the first part of bench/gpu/run.py.

    versions -> SGLang's launch path is imported -> the plugin's hooks are put in place -> one tiny
    MoE layer on virtual memory, by SGLang's kernel, beside a loop over experts

Each stage that fails says which it is and what to look at; the stages before it are in the message.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.nn import functional as F

from bench.common.layers import ExpertShape, Subject, make_layer, random_experts
from bench.gpu.moe import experts_here
from sgl_esft.weave.slot_layout import SlotLayout

# What a server with `--attention-backend triton --sampling-backend pytorch` imports.
LAUNCH_PATH = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.layers.attention.triton_backend",
    "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe",
    "sglang.srt.models.deepseek_v2",
    "sgl_esft_launch.server",
)
PACKAGES = ("sglang", "sglang-kernel", "torch", "triton", "transformers", "numpy")
ROUNDING = 0.02  # |difference| / |expected| in bfloat16; another expert would give about 1

Figures = dict[str, Any]


class CheckError(Exception):
    """A stage failed; the message names it, what was seen and what to look at."""


def check(subject: Subject, shape: ExpertShape) -> Figures:
    """All stages. Raises CheckError at the first that fails."""
    found: Figures = {"versions": {name: _version(name) for name in PACKAGES}}
    stages: dict[str, Callable[[], object]] = {
        "imports": import_launch_path,
        "hooks": put_hooks_in_place,
        "layer": lambda: tiny_layer(subject, replace(shape, hidden=256, width=128)),
    }
    for name, stage in stages.items():
        try:
            found[name] = stage()
        except (Exception, SystemExit) as error:  # an unknown SGLang fails in any way
            raise CheckError(
                f"{name}: {type(error).__name__}: {error}; with {found['versions']}; "
                f"in order before it: {[each for each in found if each != 'versions']}"
            ) from error
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def import_launch_path() -> int:
    """How many modules a server is made of."""
    for name in LAUNCH_PATH:
        importlib.import_module(name)
    return len(LAUNCH_PATH)


def put_hooks_in_place() -> int:
    """The weaving hooks of this SGLang: version, signatures, and that each is reached."""
    import sglang

    from sgl_esft import hook_ledger
    from sgl_esft.plugin import hook_table

    hook_ledger.check_version(hook_table.WEAVE_HOOKS, str(sglang.__version__))
    hook_ledger.require(hook_table.WEAVE_HOOKS)
    hook_ledger.verify_required()
    return len(hook_table.WEAVE_HOOKS)


def tiny_layer(subject: Subject, shape: ExpertShape) -> Figures:
    """A layer with holes on virtual memory: its experts' kernel beside the definition.

    Raises RuntimeError where they differ, or where a GPU's kernel is not SGLang's.
    """
    layout = SlotLayout(4, 4, 2, 3)
    layer = make_layer(subject, layout, shape, subject.open_arena())
    base = range(layout.num_base)
    layer.memory.map(base)
    for slot, weights in zip(base, random_experts(len(base), shape, 1).values(), strict=True):
        layer.w13[slot].copy_(weights.w13)
        layer.w2[slot].copy_(weights.w2)
    layer.place(1, dict(zip((0, 2), random_experts(2, shape, 2).values(), strict=True)))
    experts = experts_here()
    if subject.device == "cuda" and not experts.name.startswith("sglang"):
        raise RuntimeError(f"SGLang's kernel does not run here: {experts.name}")
    slot_ids = layer.expert_map.table[[-1, 1, 1]][:, [0, 2]].contiguous()
    hidden = torch.randn(3, shape.hidden, generator=torch.Generator().manual_seed(3))
    hidden = hidden.to(slot_ids.device, torch.bfloat16)
    weights = torch.tensor([[0.75, 0.25]], device=hidden.device).repeat(3, 1)
    got = experts.compute(hidden, weights, slot_ids, layer.w13, layer.w2)
    expected = by_definition(hidden, weights, slot_ids, layer.w13, layer.w2)
    off = float((got.float() - expected).norm() / expected.norm())
    if not off < ROUNDING:
        raise RuntimeError(f"{experts.name}: a woven layer is off by {off:.3g} of its norm")
    return {"experts": experts.name, "off": off}


def by_definition(
    hidden: torch.Tensor,
    topk_weights: torch.Tensor,
    slot_ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
) -> torch.Tensor:
    """[num_tokens, H] float32: token by token and slot by slot."""
    out = torch.zeros(hidden.shape, device=hidden.device)
    for token, slots in enumerate(slot_ids.tolist()):
        for place, slot in enumerate(slots):
            gate, up = (w13[slot].float() @ hidden[token].float()).chunk(2)
            out[token] += topk_weights[token, place] * (w2[slot].float() @ (F.silu(gate) * up))
    return out
