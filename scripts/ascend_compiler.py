"""Lower kernels with Ascend's Triton compiler; runs inside the environment of ascend_env.py.

stdin: [{source, kernel, signature, constants}] -> make_ir -> TTIR -> Linalg -> stdout: [text]
The steps of the compiler up to where it would call CANN; needs no NPU. Imports nothing of ours.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from triton._C.libtriton import ir
from triton.backends.ascend.compiler import AscendBackend, make_ttir, ttir_to_linalg
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource

TARGET = GPUTarget("npu", "Ascend910B3", 0)


def lower(source: str, kernel: str, signature: dict[str, str], constants: dict[str, Any]) -> str:
    """The kernel of this file as Linalg text, for these types and compile-time arguments."""
    backend = AscendBackend(TARGET)
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    tree = ASTSource(load_kernel(source, kernel), signature=signature, constants=constants)
    module = tree.make_ir(
        options, backend.get_codegen_implementation(), backend.get_module_map(), context
    )
    metadata = asdict(options)
    return str(ttir_to_linalg(make_ttir(module, metadata, options), metadata, options))


def load_kernel(source: str, kernel: str) -> Any:
    """From the file alone: the package that it belongs to imports torch."""
    spec = importlib.util.spec_from_file_location("lowered", source)
    if spec is None or spec.loader is None:
        raise ImportError(f"{source} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, kernel)


def main() -> int:
    """Lower every request, or say which one did not and why."""
    texts = []
    for request in json.load(sys.stdin):
        try:
            texts.append(lower(**request))
        except subprocess.CalledProcessError as error:
            print(f"{request['kernel']}: {error}\n{error.stderr.decode()}", file=sys.stderr)
            return 1
    json.dump(texts, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
