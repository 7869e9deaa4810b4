"""Reading and writing memory that the extension mapped, by its address.

host, or a contract simulator: the address is this process's own
cuda: the driver copies
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import sgl_vmm

from bench.common.record import NO_DEVICE


class NativeMemory(Protocol):
    """Bytes behind addresses of one backend."""

    def write(self, address: int, data: bytes) -> None:
        """Put `data` there; it has arrived when this returns."""

    def read(self, address: int, num_bytes: int) -> bytes:
        """What is there."""


class HostMemory:
    """Addresses that this process can use itself."""

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, num_bytes: int) -> bytes:
        return ctypes.string_at(address, num_bytes)


class CudaMemory:
    """Device addresses; torch makes the context in which the driver copies."""

    def __init__(self, device_id: int) -> None:
        import torch

        torch.zeros(1, device=f"cuda:{device_id}")
        self._driver = ctypes.CDLL("libcuda.so.1")

    def write(self, address: int, data: bytes) -> None:
        size = ctypes.c_size_t(len(data))
        self._check(self._driver.cuMemcpyHtoD_v2(ctypes.c_uint64(address), data, size))

    def read(self, address: int, num_bytes: int) -> bytes:
        data = ctypes.create_string_buffer(num_bytes)
        size = ctypes.c_size_t(num_bytes)
        self._check(self._driver.cuMemcpyDtoH_v2(data, ctypes.c_uint64(address), size))
        return data.raw

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"copying by the driver failed with CUresult {code}")


def memory_of(backend: sgl_vmm.Backend, library: str) -> NativeMemory:
    """How to reach the backend's memory; `library` is what it was opened with."""
    if is_host_memory(backend.name, library):
        return HostMemory()
    if backend.name == "cuda":
        return CudaMemory(backend.device_id)
    raise RuntimeError(f"this bench cannot copy to and from {backend.name} yet")


def is_host_memory(backend_name: str, library: str) -> bool:
    """Whether this process can use the addresses; only simulators are opened by their path."""
    return backend_name == "host" or bool(library)


def describe_device(backend_name: str, library: str) -> str:
    """What a result file says it was measured on."""
    if backend_name == "host":
        return NO_DEVICE
    if library:
        return f"none (contract simulator of {backend_name})"
    if backend_name == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return backend_name
