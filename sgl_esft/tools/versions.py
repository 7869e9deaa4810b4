"""What `--version` says: this project, SGLang, torch, and the device that a server would run on.

GET /version says the same, but for the device.
Read from what is installed. torch is imported only where its build could have an accelerator.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final

from sgl_esft import __version__, env

_MISSING: Final = "not installed"


def versions() -> dict[str, str]:
    """Of this project, of SGLang and of torch, as they are installed."""
    return {
        "version": __version__,
        "sglang": _installed("sglang"),
        "torch": _installed("torch"),
    }


def describe_versions() -> str:
    """One line: `sgl-esft 0.1.0, SGLang 0.5.23, torch 2.13.0+cpu, device cpu`."""
    ours, sglang, torch = versions().values()
    return f"sgl-esft {ours}, SGLang {sglang}, torch {torch}, device {_device(torch)}"


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return _MISSING


def _device(torch_version: str) -> str:
    if torch_version == _MISSING:
        return "unknown"
    is_cpu_build = torch_version.endswith("+cpu") and find_spec("torch_npu") is None
    if is_cpu_build or env.platform() == "cpu":
        return "cpu"
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else str(accelerator.type)
