"""What torch knows of this machine's accelerators, asked before anything is started."""

from __future__ import annotations


def backend() -> str:
    """sgl_vmm's backend for them: acl where there is an Ascend device, else cuda."""
    import torch

    npu = getattr(torch, "npu", None)
    return "acl" if npu is not None and npu.is_available() else "cuda"


def num_cuda_devices() -> int:
    """CUDA devices that this process sees; none of them is opened."""
    import torch

    return torch.cuda.device_count()
