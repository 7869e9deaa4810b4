"""A result that is older than the code it is about says so, by content and not by count."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.report import age, markdown
from bench.report.age import MEASURED_PATHS, changed_since, measured_paths
from tests.repo.import_graph import When, imported
from tests.repo.tree import ROOT, python_files

COMMAND = "python -m bench.elasticmoe.gap --rounds 3"
PRODUCT = ("sgl_esft", "sgl_elastic", "sgl_esft_kernels", "sgl_esft_launch")
UNMEASURED = "sgl_esft.byte_size"  # reads a command line
FOLDERS = {"sgl_esft_kernels": "kernels", "sgl_esft_launch": "launch"}


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments]
    return subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in ("sgl_elastic/scale.py", "sgl_esft/layer.py", "bench/gap.py", "sgl_elastic/R.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "measured")
    return tmp_path


def result_of(repository: Path, **more: Any) -> dict[str, Any]:
    return {"command": COMMAND, "commit": git(repository, "rev-parse", "HEAD"), **more}


@pytest.fixture(autouse=True)
def _forget() -> None:
    age._git.cache_clear()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sgl_elastic/scale.py", ("sgl_elastic",)),
        ("sgl_esft/layer.py", ("sgl_esft",)),
        ("bench/gap.py", ()),
        ("sgl_elastic/R.md", ()),
    ],
)
def test_what_has_changed_is_named(repository: Path, name: str, expected: tuple[str, ...]) -> None:
    result = result_of(repository)
    assert changed_since(result, repository) == ()
    (repository / name).write_text("two\n")
    age._git.cache_clear()
    assert changed_since(result, repository) == expected, "not committed yet"
    git(repository, "commit", "--quiet", "-am", "later")
    age._git.cache_clear()
    assert changed_since(result, repository) == expected


def test_what_is_as_it_was_has_not_changed(repository: Path) -> None:
    result = result_of(repository)
    for text in ("two\n", "one\n"):
        (repository / "sgl_elastic" / "scale.py").write_text(text)
        git(repository, "commit", "--quiet", "-am", text)
    assert changed_since(result, repository) == ()


def test_a_commit_that_is_not_here(repository: Path) -> None:
    assert changed_since({"command": COMMAND, "commit": "0" * 40}, repository) is None


def test_a_result_is_as_old_as_its_oldest_figure(repository: Path) -> None:
    """A result that several calls made: each step has its commit; what has no figures no age."""
    old = git(repository, "rev-parse", "HEAD")
    (repository / "sgl_esft" / "layer.py").write_text("two\n")
    git(repository, "commit", "--quiet", "-am", "later")
    result = result_of(repository)
    assert changed_since(result, repository) == ()
    steps = {
        "build": {"ok": True, "commit": "0" * 40},
        "old": {"ok": True, "commit": old},
        "new": {"ok": True, "commit": result["commit"]},
        "failed": {"ok": False, "commit": "1" * 40},
    }
    assert age.commits_of({**result, "steps": steps}) == (old, result["commit"])
    assert changed_since({**result, "steps": steps}, repository) == ("sgl_esft",)
    assert age.commits_of({**result, "steps": {"early": {"ok": True}}}) == (result["commit"],)


def test_a_table_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    result = {
        "command": COMMAND,
        "commit": "0123456789",
        "machine": {"cores": 2, "cpu": "c", "device": "d"},
    }
    for changed, words in ((("sgl_elastic",), "Older than the code: sgl_elastic"), ((), "")):
        monkeypatch.setattr(age, "changed_since", lambda _, found=changed: found)
        assert markdown.where(result).endswith("d." + (f" {words} changed since." if words else ""))
    monkeypatch.setattr(age, "changed_since", lambda _: None)
    assert "not in this history" in markdown.where(result)


BENCH_FILES = {path.removesuffix(".py").replace("/", "."): path for path in python_files("bench")}
BENCHES = [
    name
    for name, path in BENCH_FILES.items()
    if name.startswith(tuple(MEASURED_PATHS)) and "__main__" in (ROOT / path).read_text()
]


def product_of(module: str, seen: set[str]) -> set[str]:
    """Modules of the product that a bench imports at all, directly or through other benches."""
    found: set[str] = set()
    source = (ROOT / BENCH_FILES[module]).read_text()
    for each in imported(source, module, is_package=False, when=When.EVER):
        name = each.module_among(BENCH_FILES)
        if name.split(".")[0] in PRODUCT and each.base != UNMEASURED:
            found.add(f"{each.base}.{each.name}")
        elif name in BENCH_FILES and name not in seen:
            seen.add(name)
            found |= product_of(name, seen)
    return found


@pytest.mark.parametrize("module", BENCHES)
def test_what_a_bench_imports_is_what_it_measures(module: str) -> None:
    paths = [path.removesuffix(".py") for path in measured_paths(f"python -m {module}")]
    for name in product_of(module, {module}):
        package, *rest = name.split(".")
        path = "/".join([FOLDERS.get(package, package), *rest])
        assert path.startswith(tuple(paths)), f"{module} imports {name}, which is not in {paths}"


def test_a_flag_makes_a_bench_one_of_the_elastic_server() -> None:
    assert "sgl_elastic" not in measured_paths("python -m bench.soak.lifecycle_load")
    assert "sgl_elastic" in measured_paths("python -m bench.soak.lifecycle_load --elastic")
    with pytest.raises(KeyError, match="name what it measures"):
        measured_paths("python -m bench.unknown.thing")
