"""KV pools and allocator of the CPU platform: SGLang's own, as its platform interface asks."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from sgl_esft.errors import ConfigError, UnsupportedModelError

__all__ = ["CpuMLATokenToKVPool", "MHATokenToKVPool", "make_kv_allocator"]


class CpuMLATokenToKVPool(MLATokenToKVPool):
    """SGLang's MLA pool; takes and drops an argument only sparse attention uses."""

    def __init__(self, *args: Any, index_head_dim: int | None = None, **kwargs: Any) -> None:
        if index_head_dim is not None:
            raise UnsupportedModelError("sparse attention has no KV pool on the CPU platform")
        super().__init__(*args, **kwargs)


def make_kv_allocator(size: int, *, page_size: int, **kwargs: Any) -> Any:
    """SGLang's token allocator. Raises ConfigError for pages, which Triton kernels hand out."""
    if page_size != 1:
        raise ConfigError(f"--page-size {page_size}: the CPU platform has pages of one token only")
    return TokenToKVPoolAllocator(size, **kwargs)
