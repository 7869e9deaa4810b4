"""The CPU reference platform: real SGLang on a machine without an accelerator.

SGLang's door `sglang.srt.platforms` calls `activate` in every process.

    activate() -> CpuReferencePlatform  (which classes, which defaults)
                  CPU_HOOKS of sgl_esft/plugin/hook_table.py
                  collectives.py (gloo), moe.py (experts)

One rank, tensor parallelism, expert parallelism and DP attention all run on it.
It is a supported way to develop and to test; it is not fast.
"""

from __future__ import annotations

from sgl_esft import env

PLATFORM_NAME = "sgl_esft_cpu"
_PLATFORM_CLASS = "sgl_esft.platform.cpu.CpuReferencePlatform"


def activate() -> str | None:
    """Dotted name of the platform class, or None to leave the machine to SGLang."""
    return _PLATFORM_CLASS if is_active() else None


def is_active() -> bool:
    """Whether this process runs on the CPU reference platform.

    ESFT_PLATFORM=cpu or =native decides; by default it is active exactly
    where torch sees neither a CUDA nor an Ascend device.
    """
    choice = env.platform()
    if choice != "auto":
        return choice == "cpu"
    import torch

    npu = getattr(torch, "npu", None)
    return not torch.cuda.is_available() and not (npu is not None and npu.is_available())
