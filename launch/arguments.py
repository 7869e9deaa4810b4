"""SGLang's part of the command line, read without SGLang: which flags there are, what they say.

argv -> [check_known] -> a misspelled flag is refused in a second, not by SGLang in fifteen
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from sgl_esft.errors import ConfigError

_LIKE = 0.75  # how like a flag another must be to be named
_MOST = 3


def last_value(argv: Sequence[str], flag: str) -> str | None:
    """What the last `flag VALUE` or `flag=VALUE` says."""
    values = [
        arg.partition("=")[2] or following
        for arg, following in zip(argv, [*argv[1:], ""], strict=False)
        if arg.split("=")[0] == flag
    ]
    return values[-1] if values else None


def check_known(sglang_argv: Sequence[str], own: argparse.ArgumentParser) -> None:
    """Every flag is SGLang's; SGLang takes unambiguous beginnings too. Raises ConfigError."""
    known = sglang_flags()
    for arg in sglang_argv:
        name = arg.split("=")[0]
        if name.startswith("--") and name != "--" and not _is_known(name, known):
            raise ConfigError(_unknown(name, known, own))


def _is_known(name: str, known: Iterable[str]) -> bool:
    return any(flag.startswith(name) for flag in known)


def _unknown(name: str, known: Iterable[str], own: argparse.ArgumentParser) -> str:
    ours = {option for action in own._actions for option in action.option_strings}
    if name in ours:
        return f"{name} is for the elastic server only: add --elastic, or leave it out"
    found = nearest(name, [*sorted(ours), *sorted(known)])
    meant = f"did you mean {' or '.join(found)}?" if found else "--help shows them"
    return f"{name}: neither sgl-esft nor SGLang has such a flag; {meant}"


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The names most like this one, the nearest first: as a whole, or in one of their words."""
    scores = {each: _likeness(name, each) for each in dict.fromkeys(known)}
    found = sorted((each for each in scores if scores[each] >= _LIKE), key=lambda e: -scores[e])
    return found[:_MOST]


def _likeness(name: str, other: str) -> float:
    name, other = name.lstrip("-"), other.lstrip("-")
    whole = SequenceMatcher(None, name, other).ratio()
    words = (SequenceMatcher(None, name, word).ratio() for word in other.split("-"))
    return max(whole, *(ratio * 0.99 for ratio in words))


@cache
def sglang_flags() -> frozenset[str]:
    """All of SGLang's flags, from its source: importing it takes a dozen seconds."""
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("SGLang is not installed: make setup, or docs/quickstart.md")
    srt = Path(spec.submodule_search_locations[0]) / "srt"
    found = {"--help", *_strings(srt / "server_args.py")}
    for path in (srt / "arg_groups" / "fields").glob("*.py"):
        found.update(_fields(path))
    return frozenset(found)


def _strings(path: Path) -> Iterator[str]:
    """First arguments of `add_argument`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            yield from (str(a.value) for a in node.args if isinstance(a, ast.Constant))


def _fields(path: Path) -> Iterator[str]:
    """Flags of annotated fields: `name: A[type, "help"]` or `A[type, Arg(...)]`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        annotation = node.annotation
        if isinstance(annotation, ast.Subscript) and getattr(annotation.value, "id", "") == "A":
            yield from _options(node.target.id, annotation)


def _options(field: str, annotation: ast.Subscript) -> Iterator[str]:
    given = {
        keyword.arg: keyword.value
        for node in ast.walk(annotation)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Arg"
        for keyword in node.keywords
    }
    if "no_cli" in given:
        return
    name, aliases = given.get("cli_name"), given.get("aliases")
    flags = [str(name.value) if isinstance(name, ast.Constant) else "--" + field.replace("_", "-")]
    if isinstance(aliases, ast.List):
        flags += [str(each.value) for each in aliases.elts if isinstance(each, ast.Constant)]
    yield from flags
    if "action" in given and "BooleanOptionalAction" in ast.dump(given["action"]):
        yield from (flag.replace("--", "--no-", 1) for flag in flags)
