"""CpuReferencePlatform: which SGLang classes and defaults the CPU platform uses.

SGLang imports this module while it is itself half imported, so everything but
the platform base class is imported when it is asked for.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum


class CpuReferencePlatform(CpuSRTPlatform):
    """SGLang's own CPU platform made a first-class out-of-tree one.

    Being out of tree keeps SGLang away from its compiled CPU kernels, which no
    package registry carries.
    """

    _enum = PlatformEnum.OOT

    def init_backend(self) -> None:
        """SGLang calls it once in each process that runs a model."""
        from sgl_esft.platform import operators

        operators.register()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_device_total_memory(self, device_id: int = 0) -> int:
        from sgl_esft.platform import device_memory

        budget = device_memory.budget_bytes()
        return int(super().get_device_total_memory(device_id)) if budget is None else budget

    def get_current_memory_usage(self, device: Any = None) -> float:
        from sgl_esft.platform import device_memory

        available = device_memory.available_bytes()
        if available is None:
            return float(super().get_current_memory_usage(device))
        return float(self.get_device_total_memory() - available)

    def get_mha_kv_pool_cls(self) -> type:
        from sgl_esft.platform.kv_pools import MHATokenToKVPool

        return MHATokenToKVPool  # type: ignore[no-any-return]

    def get_mla_kv_pool_cls(self) -> type:
        from sgl_esft.platform.kv_pools import CpuMLATokenToKVPool

        return CpuMLATokenToKVPool

    def get_paged_allocator_cls(self) -> Any:
        from sgl_esft.platform.kv_pools import make_kv_allocator

        return make_kv_allocator
