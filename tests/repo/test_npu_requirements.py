"""Every module that SGLang imports on an NPU is pinned, named as fetched by hand, or left out."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
import warnings
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from packaging.utils import canonicalize_name

from scripts.requirements_files import FOLDER, read_pins

SRT = Path(str(next(iter(find_spec("sglang").submodule_search_locations)))) / "srt"  # type: ignore[union-attr,arg-type]
OWN_FILES = (
    "layers/moe/moe_runner/ascend.py",
    "layers/moe/token_dispatcher/ascend_tp.py",
    "distributed/device_communicators/npu_communicator.py",
)
BRANCH = re.compile(r"""\bif [^\n]*(\bis_npu|\b_is_npu|["']npu["'])""")
OURS = {"triton"}  # our reroute kernel's; and that of sgl_kernel_npu
TABLES = tomllib.loads((FOLDER / "npu.toml").read_text())


def npu_imports(source: str, *, whole: bool) -> Iterator[str]:
    """Modules that a file imports on an NPU: all of them, or those below an `if` about NPUs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's strings with stray backslashes
        tree = ast.parse(source)
    branches = [tree] if whole else _npu_branches(tree)
    for node in (node for branch in branches for node in ast.walk(branch)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def _npu_branches(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.If):
            continue
        names = {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}
        words = {n.value for n in ast.walk(node.test) if isinstance(n, ast.Constant)}
        if (names & {"_is_npu", "is_npu"} or "npu" in words) and "not " not in ast.unparse(
            node.test
        ):
            yield from node.body


def foreign(modules: Iterable[str]) -> set[str]:
    """Of these, what is neither Python's, SGLang's nor installed for a CPU."""
    tops = {module.split(".")[0] for module in modules} - set(sys.stdlib_module_names)
    return {top for top in tops - {"sglang"} if find_spec(top) is None}


def imported_on_npus() -> set[str]:
    own = {*(SRT / "hardware_backend" / "npu").rglob("*.py"), *(SRT / name for name in OWN_FILES)}
    found: set[str] = set()
    for path in SRT.rglob("*.py"):
        text = path.read_text()
        if path in own or ("npu" in text and BRANCH.search(text)):
            found |= {module.split(".")[0] for module in npu_imports(text, whole=path in own)}
    return foreign(found)


def test_every_import_has_its_place() -> None:
    named = [name for table in TABLES.values() for name in table]
    assert len(named) == len(set(named))
    assert imported_on_npus() | OURS == set(named)


def test_what_is_installed_is_pinned() -> None:
    pins = read_pins("npu.txt")
    assert {canonicalize_name(name) for name in TABLES["installed"].values()} <= set(pins)
    same = read_pins("torch-cpu.txt", "cpu.txt")
    differ = {
        n for n, v in pins.items() if n != "triton-ascend" and same.get(n, v).split("+")[0] != v
    }
    assert differ == set()


def test_what_is_not_has_a_reason() -> None:
    reasons = {**TABLES["by_hand"], **TABLES["left_out"]}
    assert [name for name, reason in reasons.items() if len(reason.split()) < 4] == []


def test_an_import_below_an_npu_branch_is_seen() -> None:
    source = "import os\nif _is_npu:\n    import new_package.part\nelif x:\n    import other\n"
    assert foreign(npu_imports(source, whole=False)) == {"new_package"}
    assert foreign(npu_imports(source, whole=True)) == {"new_package", "other"}
