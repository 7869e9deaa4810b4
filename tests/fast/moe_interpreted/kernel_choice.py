"""Which tuned configuration SGLang looked up, and with which blocks its kernels were launched.

with watched() as seen: layer(...)  ->  seen.lookups, seen.launches
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from sglang.kernels.ops.moe import fused_moe_triton_kernels
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe, fused_moe_triton_config

# No default has these blocks.
TUNED_BLOCKS = {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 16, "GROUP_SIZE_M": 2}


@dataclass
class Seen:
    lookups: list[int] = field(default_factory=list)  # the number of experts in each
    file_names: list[str] = field(default_factory=list)  # of tuned configurations, as looked up
    launches: list[dict[str, Any]] = field(default_factory=list)  # the blocks of each GEMM


@contextmanager
def watched() -> Iterator[Seen]:
    """What happens inside."""
    seen = Seen()
    file_name = fused_moe_triton_config.get_config_file_name
    invoke = fused_moe_triton_kernels.invoke_fused_moe_kernel

    def get_config_file_name(num_experts: int, *args: Any, **kwargs: Any) -> str:
        seen.lookups.append(num_experts)
        seen.file_names.append(file_name(num_experts, *args, **kwargs))
        return seen.file_names[-1]

    def invoke_fused_moe_kernel(*args: Any, **kwargs: Any) -> None:
        seen.launches.append(next(dict(a) for a in args if isinstance(a, dict)))
        invoke(*args, **kwargs)

    fused_moe_triton_config.get_moe_configs.cache_clear()
    with (
        patch.object(fused_moe_triton_config, "get_config_file_name", get_config_file_name),
        patch.object(fused_moe, "invoke_fused_moe_kernel", invoke_fused_moe_kernel),
    ):
        yield seen
    fused_moe_triton_config.get_moe_configs.cache_clear()


def write_tuned(folder: Path, num_experts: int, width: int, dtype: str | None) -> None:
    """A tuned configuration where SGLANG_MOE_CONFIG_DIR is `folder`, for that many experts."""
    name = fused_moe_triton_config.get_config_file_name(num_experts, width, dtype, [0, 0])
    write_file(folder, name, TUNED_BLOCKS)


def write_file(folder: Path, name: str, blocks: dict[str, Any]) -> None:
    """A tuned configuration of that file name there; SGLang takes it for the second product too."""
    version = f"triton_{triton.__version__.replace('.', '_')}"
    path = folder / "configs" / version / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"4": blocks}))
