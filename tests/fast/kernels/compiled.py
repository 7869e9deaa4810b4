"""Triton's kernels for a GPU that is not there: what is launched inside is compiled, and not run.

    with compiler() as kernels: launch_reroute(cpu tensors) -> kernel[grid](...) -> PTX, cubin

The specialisation comes from the launch's own arguments, as on a GPU.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

HOPPER = GPUTarget("cuda", 90, 32)


@contextmanager
def compiler(target: GPUTarget = HOPPER) -> Iterator[list[CompiledKernel]]:
    """Compile every kernel launched inside for `target`; yields the list they are added to."""
    kernels: list[CompiledKernel] = []

    def launch(kernel: JITFunction, *args: Any, **kwargs: Any) -> None:
        kernels.append(compile_launch(kernel, target, *args, **kwargs))

    with patch.object(JITFunction, "run", launch):
        yield kernels


def compile_launch(
    kernel: JITFunction, target: GPUTarget, *args: Any, grid: object, warmup: bool, **kwargs: Any
) -> CompiledKernel:
    """What a launch with these arguments would compile on `target`."""
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*args, **kwargs)
    options, signature, constants, attributes = kernel._pack_args(
        backend, kwargs, bound, specialization, options
    )
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=options.__dict__)


def resources(kernel: CompiledKernel) -> dict[str, int]:
    """What one thread of it takes, by ptxas: REG, STACK, SHARED, LOCAL, ..."""
    text = _cuobjdump(kernel, "--dump-resource-usage")
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}


def num_instructions(kernel: CompiledKernel) -> int:
    """Machine instructions, without the padding at the end."""
    names = re.findall(
        r"/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\w+ +)?([A-Z][A-Z0-9_.]*)", _cuobjdump(kernel, "--dump-sass")
    )
    return sum(name != "NOP" for name in names)


def _cuobjdump(kernel: CompiledKernel, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
