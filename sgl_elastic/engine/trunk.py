"""The trunk of a model: every tensor that is no routed expert, packed into one slot.

    loaded skeleton --> [TrunkLayout] --bind--> the same tensors as views of HMM memory

Parameters, persistent buffers, and what SGLang derives from weights after loading (such as MLA's
w_kc and w_vc) are found by walking the modules, so that no model needs code of its own here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import xxhash

from sgl_elastic.errors import ElasticInternalError

_ALIGNMENT = 256  # bytes; what every kernel may assume


@dataclass(frozen=True)
class TrunkTensor:
    """Where one tensor lies in the trunk."""

    name: str  # dotted path of the module, then the attribute
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements; dense, in any order of dimensions
    dtype: str  # torch's name
    offset: int  # bytes


@dataclass(frozen=True)
class TrunkLayout:
    """All tensors of the trunk, in order."""

    tensors: tuple[TrunkTensor, ...]
    num_bytes: int

    @property
    def digest(self) -> str:
        """The same for two engines exactly if their trunks look alike."""
        return xxhash.xxh64(repr(self.tensors).encode()).hexdigest()


def plan_trunk(tensors: Mapping[str, torch.Tensor]) -> TrunkLayout:
    """Pack tensors one after the other. Raises ElasticInternalError for one that is not dense."""
    offset = 0
    planned = []
    for name, tensor in tensors.items():
        if not _is_dense(tensor):
            raise ElasticInternalError(f"{name}: stride {tensor.stride()} leaves gaps")
        dtype = str(tensor.dtype).removeprefix("torch.")
        planned.append(
            TrunkTensor(name, tuple(tensor.shape), tuple(tensor.stride()), dtype, offset)
        )
        offset += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return TrunkLayout(tuple(planned), max(offset, _ALIGNMENT))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a run of memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def weights_of(model: torch.nn.Module, is_expert: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name; those of routed experts are left out."""
    state = model.state_dict(keep_vars=True)
    seen: set[int] = set()
    found = {}
    for name, tensor in state.items():
        if is_expert(name) or id(tensor) in seen or tensor.numel() == 0:
            continue
        seen.add(id(tensor))
        found[name] = tensor
    return found


def derived_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
    """(name, module, attribute, tensor) of plain tensors that hang on modules."""
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.numel() > 0:
                yield f"{path}.{attribute}", module, attribute, value


def view(memory: torch.Tensor, tensor: TrunkTensor) -> torch.Tensor:
    """The tensor as a view of the trunk's bytes (uint8, flat)."""
    dtype = getattr(torch, tensor.dtype)
    num_elements = 1
    for size in tensor.shape:
        num_elements *= size
    num_bytes = num_elements * dtype.itemsize
    flat = memory[tensor.offset : tensor.offset + num_bytes].view(dtype)
    return flat.as_strided(tensor.shape, tensor.stride)
