"""What another SGLang would break: `python -m scripts.port_report VERSION`.

    the hook ledgers, our imports of SGLang --> [names_used] --\\
    the installed SGLang's source, another's -------------------+--> [compare] --> report, status 1

VERSION is a version that pip downloads without installing it, a wheel, or a folder that holds
`sglang/`. Only source is read: the other SGLang need not be importable here. Status 1: something
is gone, or is called in another way. What changed inside is listed, for whoever ports to read.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path

from scripts.sglang_source import Definition, SourceTree

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("sgl_esft", "sgl_elastic", "launch", "kernels", "bench", "tests")
_DOTTED = re.compile(r"sglang(\.\w+)+")
_IMPORTS = re.compile(r"^\s*(from|import) sglang\b", re.MULTILINE)


class Status(Enum):
    """What became of a name, worst first."""

    GONE = "gone"
    APPEARED = "defined now, though a hook adds it"
    UNREADABLE = "not found by reading the installed SGLang"
    SIGNATURE = "called in another way"
    BODY = "changed inside"
    SAME = "unchanged"


BREAKING = (Status.GONE, Status.APPEARED, Status.UNREADABLE, Status.SIGNATURE)


@dataclass(frozen=True)
class Name:
    """One name of SGLang's and who needs it."""

    target: str
    users: tuple[str, ...]  # hooks and files
    is_added: bool = False  # by a hook: SGLang must not define it


@dataclass(frozen=True)
class Finding:
    """What became of it."""

    name: Name
    status: Status
    old: Definition | None = None
    new: Definition | None = None


def compare(names: Iterable[Name], old: SourceTree, new: SourceTree) -> list[Finding]:
    """Every name in both trees."""
    return [_compare(name, old.find(name.target), new.find(name.target)) for name in names]


def _compare(name: Name, old: Definition | None, new: Definition | None) -> Finding:
    if name.is_added:
        return Finding(name, Status.APPEARED if new else Status.SAME, old, new)
    if old is None:
        return Finding(name, Status.UNREADABLE, old, new)
    if new is None:
        return Finding(name, Status.GONE, old, new)
    status = Status.SAME if old.body == new.body else Status.BODY
    return Finding(name, status if old.signature == new.signature else Status.SIGNATURE, old, new)


def names_used() -> list[Name]:
    """Every hook's target and every name of SGLang's in our code, in order."""
    from scripts.hooks_page import ALL_HOOKS, ALL_OVERRIDES
    from sgl_esft.hook_ledger import HookKind

    added = {hook.target for hook in ALL_HOOKS if hook.kind is HookKind.ADD}
    users: dict[str, set[str]] = {hook.target: {"hook"} for hook in ALL_HOOKS + ALL_OVERRIDES}
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for target in imported(path.read_text()):
            users.setdefault(target, set()).add(str(path.relative_to(ROOT)))
    return [Name(name, tuple(sorted(users[name])), name in added) for name in sorted(users)]


def imported(source: str) -> set[str]:
    """The dotted names of SGLang's that a module imports, late imports included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)) if _IMPORTS.search(source) else ():
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if _DOTTED.fullmatch(name)}


def installed() -> SourceTree:
    """The SGLang of this environment. Raises FileNotFoundError."""
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("sglang is not installed here")
    return SourceTree(Path(spec.origin).parent.parent)


def open_tree(version: str, scratch: Path) -> SourceTree:
    """The source that `version` names. Raises FileNotFoundError, CalledProcessError of pip."""
    path = Path(version)
    if path.is_dir():
        return SourceTree(path)
    if path.suffix != ".whl":
        path = _downloaded(version, scratch)
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(scratch, [name for name in wheel.namelist() if name.endswith(".py")])
    return SourceTree(scratch)


def _downloaded(version: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*command, "--dest", str(folder), f"sglang=={version}"], check=True)
    return next(folder.glob("*.whl"))


def report(findings: Iterable[Finding], *, with_diff: bool) -> Iterator[str]:
    """Lines of text: a part for each status that was seen, worst first."""
    grouped: Mapping[Status, list[Finding]] = {status: [] for status in Status}
    for finding in findings:
        grouped[finding.status].append(finding)
    for status, found in grouped.items():
        yield f"{status.value}: {len(found)}"
        for finding in found if status is not Status.SAME else ():
            yield f"  {finding.name.target}  ({', '.join(finding.name.users)})"
            yield from _details(finding, with_diff=with_diff)


def _details(finding: Finding, *, with_diff: bool) -> Iterator[str]:
    if finding.old is None or finding.new is None or not with_diff:
        return
    sides = (finding.old.text().splitlines(), finding.new.text().splitlines())
    for line in difflib.unified_diff(*sides, "installed", "other", lineterm=""):
        yield f"    {line}"


def main(argv: list[str] | None = None) -> int:
    """Print the report. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.port_report")
    parser.add_argument("version", help="a version, a wheel, or a folder that holds sglang/")
    parser.add_argument("--diff", action="store_true", help="show what changed")
    parser.add_argument("--old", type=Path, help="compare with this folder, not the installed one")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        old = installed() if options.old is None else SourceTree(options.old)
        findings = compare(names_used(), old, open_tree(options.version, Path(scratch)))
    print(*report(findings, with_diff=options.diff), sep="\n")
    return int(any(finding.status in BREAKING for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
