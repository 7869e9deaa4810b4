"""Whose memory a backend maps: the host's, a contract simulator's, or a device's."""

from __future__ import annotations

from bench.common.record import NO_DEVICE


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
