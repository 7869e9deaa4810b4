"""Routers of real models and odd ones, and inputs for them, for the tests of the fused router.

ROUTERS -> Router -> make(dtype) -> arguments of route_and_reroute
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sgl_esft_kernels.route_spec import RouterSpec

Arguments = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, RouterSpec, torch.Tensor | None, torch.Tensor | None
]


@dataclass(frozen=True)
class Router:
    """A spec with its number of routed experts, and one batch for it.

    num_live: tokens that are not padding; None = there is no count.
    """

    name: str
    num_experts: int
    spec: RouterSpec
    num_tokens: int = 9
    num_adapters: int = 3
    num_live: int | None = None
    is_expert_parallel: bool = False

    def __str__(self) -> str:
        return self.name

    def with_tokens(self, num_tokens: int) -> Router:
        return replace(self, num_tokens=num_tokens)

    def make(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Arguments:
        """Logits without ties in a token. A map's values name their cell."""
        generator = torch.Generator().manual_seed(len(self.name) + self.num_tokens)
        logits = self._logits(generator).to(dtype)
        tags = torch.randint(
            -1, self.num_adapters, (self.num_tokens,), generator=generator, dtype=torch.int32
        )
        bias = (
            torch.randn(self.num_experts, generator=generator) / 8 if self.spec.has_bias else None
        )
        live = None if self.num_live is None else torch.tensor([self.num_live], dtype=torch.int32)
        return (
            logits.to(device),
            tags.to(device),
            self._map(generator).to(device),
            self.spec,
            bias.to(device) if self.spec.has_bias else None,
            None if live is None else live.to(device),
        )

    def _logits(self, generator: torch.Generator) -> torch.Tensor:
        """[num_tokens, num_experts] from -4 to 4, at least 1/32 apart: exact in every dtype."""
        steps = torch.linspace(-128, 127, self.num_experts).round() / 32
        rows = [
            torch.randperm(self.num_experts, generator=generator) for _ in range(self.num_tokens)
        ]
        return torch.stack([steps[row] for row in rows]) if rows else steps.expand(0, -1).clone()

    def _map(self, generator: torch.Generator) -> torch.Tensor:
        shape = (self.num_adapters + 1, self.num_experts + self.spec.num_fused_shared_experts)
        cells = torch.arange(shape[0] * shape[1], dtype=torch.int32).view(shape)
        if not self.is_expert_parallel:
            return cells
        return cells.masked_fill(torch.rand(shape[1], generator=generator) < 0.5, -1)


DEEPSEEK_V3 = RouterSpec(8, "sigmoid", True, 8, 4, routed_scaling_factor=2.5)

ROUTERS = (
    Router("mixtral", 8, RouterSpec(2)),
    Router("qwen2-moe", 60, RouterSpec(4, renormalize=False)),
    Router("qwen3-moe", 128, RouterSpec(8), num_live=5),
    Router("deepseek-v2-lite", 64, RouterSpec(6, num_expert_groups=1, renormalize=False)),
    Router("deepseek-v2", 160, RouterSpec(6, "softmax", False, 8, 3, False, 16.0)),
    Router("deepseek-v3", 256, DEEPSEEK_V3, is_expert_parallel=True),
    Router(
        "deepseek-v3, shared expert fused",
        256,
        replace(DEEPSEEK_V3, top_k=9, num_fused_shared_experts=1),
        num_live=6,
    ),
    Router(
        "scaled in the router, shared expert over 2 ranks",
        256,
        replace(
            DEEPSEEK_V3,
            top_k=9,
            num_fused_shared_experts=1,
            scale_output=True,
            shared_experts_scaling_factor=0.5,
        ),
    ),
    Router("kimi", 48, RouterSpec(8, "sigmoid", True, routed_scaling_factor=2.8)),
    Router("sigmoid", 64, RouterSpec(1, "sigmoid", renormalize=False)),
    Router(
        "sigmoid, biased, two shared", 8, RouterSpec(7, "sigmoid", True, 1, 1, True, 2.0, True, 2)
    ),
    Router("sigmoid groups", 20, RouterSpec(3, "sigmoid", False, 5, 2)),
    Router("groups of three, all kept", 12, RouterSpec(5, "softmax", False, 4, 4)),
    Router(
        "groups of three, biased", 12, RouterSpec(4, "sigmoid", True, 4, 2, True, 1.0, False, 1)
    ),
    Router("every expert", 5, RouterSpec(5), num_adapters=0),
    Router("one expert", 1, RouterSpec(1), num_live=0),
)
