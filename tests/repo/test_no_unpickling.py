"""No module of ours turns bytes into code or objects of any class: read off the syntax trees.

test_hygiene.py forbids the plainest forms in every text; here names are followed through imports.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.repo.tree import PACKAGES, ROOT, python_files

# Modules whose readers run what the bytes say, and queues that use them between processes.
FORBIDDEN_MODULES = {
    "_pickle",
    "cPickle",
    "cloudpickle",
    "code",
    "dill",
    "joblib",
    "jsonpickle",
    "marshal",
    "pickle",
    "shelve",
    "yaml",
}
# Functions and methods, by their last names and by whole ones.
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}
FORBIDDEN_FUNCTIONS = {
    "builtins.eval",
    "builtins.exec",
    "multiprocessing.connection.Client",
    "multiprocessing.connection.Listener",
    "multiprocessing.Manager",
    "multiprocessing.Pipe",
    "multiprocessing.Queue",
    "numpy.load",
    "sglang.srt.utils.common.MultiprocessingSerializer",
    "torch.load",
    "torch.jit.load",
}
# Where a file passes on a call of SGLang's: what is unpickled, and where, stays SGLang's choice.
PASSED_ON = {"sgl_esft/health/heartbeat.py": {"self._socket.recv_pyobj"}}
FORBIDDEN_METHODS = {"recv_pyobj", "send_pyobj", "broadcast_object_list", "all_gather_object"}


def offences(tree: ast.Module) -> list[str]:
    """`line N: what` for each use of something forbidden."""
    names = dict(_imported(tree))
    found = [
        f"line {line}: {module}"
        for line, module in _modules(tree)
        if module.split(".")[0] in FORBIDDEN_MODULES
    ]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        whole = _whole_name(node.func, names)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else None
        if whole in FORBIDDEN_CALLS | FORBIDDEN_FUNCTIONS or method in FORBIDDEN_METHODS:
            found.append(f"line {node.lineno}: {whole or method}")
        if any(each.arg == "allow_pickle" for each in node.keywords):
            found.append(f"line {node.lineno}: allow_pickle")
    return found


def _modules(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, each.name) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.Call) and _whole_name(node.func, {}).endswith("import_module"):
            yield from (
                (node.lineno, each.value)
                for each in node.args
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            )


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Name in the module -> what it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((each.asname, each.name) for each in node.names if each.asname)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (
                (each.asname or each.name, f"{node.module}.{each.name}") for each in node.names
            )


def _whole_name(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        inner = _whole_name(node.value, names)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def test_our_packages_unpickle_nothing() -> None:
    paths = python_files(*PACKAGES)
    assert len(paths) > 100
    found = {path: offences(ast.parse((ROOT / path).read_text())) for path in paths}
    found = {path: what for path, what in found.items() if what}
    passed_on = {path: {each.split(": ")[1] for each in found.pop(path, ())} for path in PASSED_ON}
    assert found == {}
    assert passed_on == PASSED_ON


@pytest.mark.parametrize(
    "sample",
    [
        "import pickle as p",
        "from marshal import loads",
        "def f():\n    import cloudpickle.fast",
        "importlib.import_module('dill')",
        "import torch as t\nt.load(path)",
        "from torch import load as read\nread(path)",
        "import numpy as np\nnp.load(path)",
        "read(path, allow_pickle=False)",
        "socket.recv_pyobj()",
        "from os import system\nsystem('x')",
        "eval(text)",
        "from multiprocessing import connection\nconnection.Client(address)",
    ],
)
def test_checker_finds(sample: str) -> None:
    assert len(offences(ast.parse(sample))) >= 1


@pytest.mark.parametrize(
    "sample", ["import json", "model.eval()", "re.compile(x)", "json.load(file)", "torch.loads(x)"]
)
def test_checker_leaves_alone(sample: str) -> None:
    assert offences(ast.parse(sample)) == []
