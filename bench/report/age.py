"""Which results are older than the code that they are about.

    a result's command --[measured_paths]--> paths --[changed_since its commits]--> those changed

By content: a file that is as it was when the result was made is no change, whatever lies between.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]

_KERNELS: Final = ("kernels", "csrc")
_SERVER: Final = (*_KERNELS, "sgl_esft", "launch")
# By how a bench's module begins, the longest first; a test compares them with what it imports.
MEASURED_PATHS: Final[Mapping[str, Sequence[str]]] = {
    "bench.kernels.": (*_KERNELS, "sgl_esft/platform", "sgl_esft/weave"),
    "bench.expertweave.": _SERVER,
    "bench.soak.fault_matrix": (*_SERVER, "sgl_elastic"),
    "bench.soak.turns": (*_SERVER, "sgl_elastic"),
    "bench.soak.": _SERVER,
    "bench.elasticmoe.tunnels": (
        "sgl_elastic/nodes",
        "sgl_elastic/wire.py",
        "sgl_elastic/errors.py",
    ),
    "bench.elasticmoe.": (*_SERVER, "sgl_elastic"),
    "bench.finemoe.prediction": ("sgl_esft/offload",),  # on traces
    "bench.finemoe.caching": ("sgl_esft/offload",),
    "bench.finemoe.": _SERVER,
    "bench.quantised.": _SERVER,
    "bench.gpu.": (*_SERVER, "sgl_elastic"),
}
_CODE: Final = ":!*.md"
_ELASTIC_FLAG: Final = "--elastic"
_BUILD: Final = "build"  # a step that measures nothing


def measured_paths(command: str) -> tuple[str, ...]:
    """What `python -m MODULE ...` measures. Raises KeyError for a module of another room."""
    module, *arguments = command.removeprefix("python -m ").split()
    paths = next((found for room, found in MEASURED_PATHS.items() if module.startswith(room)), None)
    if paths is None:
        raise KeyError(f"{module}: name what it measures in bench/report/age.py")
    more = ("sgl_elastic",) if _ELASTIC_FLAG in arguments else ()
    return tuple(dict.fromkeys((*paths, *more)))


def commits_of(result: Mapping[str, Any]) -> tuple[str, ...]:
    """Those of its figures: a result of bench/gpu has one for each step that it kept or made."""
    steps = result.get("steps")
    if not isinstance(steps, Mapping):  # of other benches it is a number
        steps = {}
    made = [each for name, each in steps.items() if name != _BUILD]
    commits = [each["commit"] for each in made if each.get("ok") and "commit" in each]
    return tuple(dict.fromkeys(str(commit) for commit in commits or [result["commit"]]))


def changed_since(result: Mapping[str, Any], root: Path = ROOT) -> tuple[str, ...] | None:
    """Of what a result is about, the parts that differ now; None for a commit that is not here."""
    commits = [commit.removesuffix("+changes") for commit in commits_of(result)]
    if any(_git(root, "cat-file", "-e", f"{commit}^{{commit}}") for commit in commits):
        return None
    return tuple(
        path
        for path in measured_paths(result["command"])
        if any(_git(root, "diff", "--quiet", commit, "--", path, _CODE) for commit in commits)
    )


def age(result: Mapping[str, Any]) -> str:
    """The sentence under the table of a result that is older than its code; "" of another."""
    changed = changed_since(result)
    if changed is None:
        return " Its commit is not in this history: how old it is cannot be told."
    return f" Older than the code: {', '.join(changed)} changed since." if changed else ""


@cache
def _git(root: Path, *arguments: str) -> int:
    return subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, check=False
    ).returncode
