"""What SGLang finds where an NPU would be: `torch.npu`, `torch_npu`, its packages, the operators.

    install() -> torch.ops.npu.*, sys.modules -> SGLang's imports take their NPU branches

Call it before SGLang is imported, which asks once whether there is an NPU. Tensors stay on the CPU.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.support.npu_simulator import matmul, routing
from tests.support.npu_simulator.contract import ContractError
from tests.support.npu_simulator.schemas import SCHEMAS

# Packages that SGLang's MoE imports on an NPU beside torch_npu, and what it needs of them here.
PACKAGES = ("torch_npu", "torchair", "sgl_kernel_npu", "custom_ops", "acl")
OPERATORS = {
    "npu_moe_init_routing_v2": routing.init_routing_v2,
    "npu_grouped_matmul": matmul.grouped_matmul,
    "npu_swiglu": matmul.swiglu,
    "npu_moe_finalize_routing": routing.finalize_routing,
    "npu_moe_token_unpermute": routing.token_unpermute,
    "npu_moe_gating_top_k_softmax": routing.gating_top_k_softmax,
    "npu_moe_gating_top_k": routing.gating_top_k,
    "npu_format_cast": matmul.format_cast,
}
DEVICE_BYTES = 64 << 30

_kept: list[torch.library.Library] = []  # its operators go when a library does


def install() -> None:
    """Once a process, before SGLang."""
    loaded = [name for name in sys.modules if name.partition(".")[0] == "sglang"]
    if loaded:
        raise ContractError(f"{loaded[0]} is imported: SGLang has asked for an NPU already")
    library = torch.library.Library("npu", "DEF")  # where an NPU is, torch_npu has this name
    for name, function in OPERATORS.items():
        library.define(SCHEMAS[name])
        library.impl(name, function, "CPU")
    _kept.append(library)
    torch.npu = _KNOWN["torch_npu"]["npu"] = _device_module()
    sys.meta_path.insert(0, _Finder())


def treat_cpu_as_npu() -> None:
    """SGLang casts no weights that lie on a CPU; here those are the NPU's."""
    from sglang.srt.hardware_backend.npu import utils

    class Torch:
        device = staticmethod(lambda _: object())  # equal to no tensor's device

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    utils.torch = Torch()


def _device_module() -> ModuleType:
    module = _NotSimulated("torch.npu")
    device = SimpleNamespace(name="simulated", total_memory=DEVICE_BYTES)
    vars(module).update(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_device_name=lambda _=0: device.name,
        get_device_properties=lambda _=0: device,
        mem_get_info=lambda _=0: (DEVICE_BYTES, DEVICE_BYTES),
        set_compile_mode=lambda **_: None,
        config=SimpleNamespace(),
    )
    return module


class _NotSimulated(ModuleType):
    """A package, or a name of one: importing it works, calling it does not."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _NotSimulated(f"{self.__name__}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ContractError(f"{self.__name__} is not simulated")


def _l1_norm(x: torch.Tensor) -> torch.Tensor:
    return x / x.sum(dim=-1, keepdim=True)


_KNOWN: dict[str, dict[str, Any]] = {
    "sgl_kernel_npu.norm.l1_norm": {"l1_norm": _l1_norm},
    "torchair.configs.compiler_config": {"CompilerConfig": SimpleNamespace},
    "torch_npu": {"_apply_patches": lambda _: None},
    "torchair": {"get_npu_backend": lambda **_: "eager"},
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _NotSimulated(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_KNOWN.get(module.__name__, {}))
