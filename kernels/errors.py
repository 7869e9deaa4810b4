"""Errors of the kernels, each with its policy: the caller's tensors, or the installation."""

from __future__ import annotations


class KernelError(Exception):
    """A kernel cannot do what it was asked for."""


class KernelInputError(KernelError, ValueError):
    """A tensor of the wrong shape, dtype, device, layout or contents: a defect of the caller."""


class KernelUnavailableError(KernelError):
    """What was asked for cannot run here: install what it names, or choose another."""
