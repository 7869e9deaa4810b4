"""Triton's kernels on CPU tensors: what is launched inside `interpreter()` is interpreted.

    with interpreter(): launch_reroute(cpu tensors) -> kernel[grid](...) -> numpy, one at a time

Triton chooses between its compiler and its interpreter when a function is decorated, for a whole
process, by TRITON_INTERPRET. Here the choice is made at the launch, so that one process can both
compile a kernel and interpret it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from triton.runtime.interpreter import InterpretedFunction, _patch_lang, interpreter_builder
from triton.runtime.jit import JITFunction


@contextmanager
def interpreter() -> Iterator[None]:
    """Interpret every kernel launched inside, and every jitted function that it calls."""
    with patch.object(JITFunction, "run", _launch), patch.object(JITFunction, "__call__", _call):
        yield


def _launch(kernel: JITFunction, *args: Any, debug: bool = False, **kwargs: Any) -> None:
    options = dataclasses.replace(interpreter_builder.options, debug=debug)
    with patch.object(interpreter_builder, "options", options):  # or there are no device_asserts
        InterpretedFunction(kernel.fn).run(*args, **kwargs)


def _call(function: JITFunction, *args: Any, **kwargs: Any) -> Any:
    # InterpretedFunction's own call leaves triton.language patched, and the next compilation fails.
    scope = _patch_lang(function.fn)
    try:
        return InterpretedFunction(function.fn).rewrite()(*args, **kwargs)
    finally:
        scope.restore()


def changed_module(subject: ModuleType, change: tuple[str, ...], folder: Path) -> Any:
    """A copy of a module made wrong: each right string of `change`, once there, by the next."""
    source = Path(str(subject.__file__)).read_text()
    for right, wrong in zip(change[::2], change[1::2], strict=True):
        assert source.count(right) == 1
        source = source.replace(right, wrong)
    path = folder / "wrong.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("wrong", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
