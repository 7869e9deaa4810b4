"""The Python module: its stub says what it has, and errors carry what the vendor said."""

from __future__ import annotations

import ast
import re
import socket
from collections.abc import Iterator

import pytest
import sgl_vmm

from tests.fast.csrc.csrc_build import CSRC

PAGE = 4096
STUB = ast.parse((CSRC / "sgl_vmm.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
FUNCTIONS = {node.name: node for node in STUB.body if isinstance(node, ast.FunctionDef)}


def public(names: object) -> set[str]:
    return {name for name in dir(names) if not name.startswith("_")}


def functions_of(stub: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    return (node for node in stub.body if isinstance(node, ast.FunctionDef))


def arguments(stub: ast.FunctionDef) -> list[str]:
    named = [*stub.args.posonlyargs, *stub.args.args, *stub.args.kwonlyargs]
    return [argument.arg for argument in named if argument.arg != "self"]


def bound_arguments(function: object) -> list[str]:
    """As the binding's own docstring shows them."""
    (line, *_) = str(function.__doc__).splitlines()
    shown = line.partition("(")[2].rpartition(") ->")[0]
    return [name for name in re.findall(r"(\w+): ", shown) if name != "self"]


def test_the_stub_has_the_modules_names() -> None:
    assert public(sgl_vmm) == {*CLASSES, *FUNCTIONS}


@pytest.mark.parametrize("name", [n for n in CLASSES if not n.endswith("Error")])
def test_the_stub_has_the_classs_methods_and_their_arguments(name: str) -> None:
    bound = getattr(sgl_vmm, name)
    assert public(bound) == {f.name for f in functions_of(CLASSES[name]) if f.name != "__init__"}
    for stub in functions_of(CLASSES[name]):
        is_property = any(getattr(d, "id", "") == "property" for d in stub.decorator_list)
        if not is_property:
            assert arguments(stub) == bound_arguments(getattr(bound, stub.name)), stub.name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_stub_has_the_functions_arguments(name: str) -> None:
    assert arguments(FUNCTIONS[name]) == bound_arguments(getattr(sgl_vmm, name))


def test_errors_carry_the_vendors_call() -> None:
    backend = sgl_vmm.open_backend("host", page_bytes=PAGE, capacity_bytes=PAGE)
    with pytest.raises(sgl_vmm.InvalidArgumentError) as refused:
        backend.import_handle(sgl_vmm.Exported(fd=-1, key=0, num_bytes=PAGE))
    error = refused.value
    assert isinstance(error, sgl_vmm.VmmError)
    assert (error.backend, error.call, error.code_name) == ("host", "fstat", "EBADF")
    assert error.code > 0
    assert re.search(r"host: fstat -> EBADF \(\d+\) \[host\.cpp:\d+\]", str(error))


def test_a_dtype_that_torch_would_not_know() -> None:
    pool = sgl_vmm.PagePool(sgl_vmm.open_backend("host", page_bytes=PAGE, capacity_bytes=PAGE))
    tensor = sgl_vmm.VirtualTensor(pool, num_slots=2, slot_bytes=8)
    for shape, dtype in (
        ([2, 1], "complex64"),
        ([2, 2], "int8"),
        ([2, 3], "float32"),
        ([1, 4], "float32"),
        ([], "float32"),
    ):
        with pytest.raises(sgl_vmm.InvalidArgumentError):
            tensor.to_dlpack(shape, dtype)


def test_a_peer_that_is_gone_is_an_error_of_its_own() -> None:
    """That pages reach one that is there: test_address_range.py."""
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(sgl_vmm.PeerGoneError):
        sgl_vmm.receive_page(ours.fileno())
