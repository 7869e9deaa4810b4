"""What must not be in the tree: unsafe calls, paths of some machine, dead pointers in documents."""

from __future__ import annotations

import posixpath
import re

import pytest

from tests.repo.tree import ROOT, project_files

LIBRARY = ("sgl_esft/", "sgl_elastic/", "kernels/", "bench/", "scripts/", "launch/")
THIS_FILE = "tests/repo/test_hygiene.py"  # its bad samples are what it forbids

# In library code: what can run code from data, or hand a string to a shell.
UNSAFE = {
    "pickle": re.compile(r"^\s*(import|from)\s+(pickle|cPickle|dill|cloudpickle)\b", re.MULTILINE),
    "torch.load": re.compile(r"\btorch\.load\("),
    "a shell": re.compile(r"\bshell\s*=\s*True|\bos\.(system|popen)\("),
    "eval": re.compile(r"(?<![\w.])(eval|exec)\("),
}

# In every text: what only makes sense on one machine, or was left for later without an issue.
STRAY = {
    "an absolute path": re.compile(r"(?<![\w.:-])/(home|root|work|Users)/\w"),
    "a reminder": re.compile(r"\b(TODO|FIXME|XXX|HACK)\b"),
    "a conflict marker": re.compile(r"^(<<<<<<<|>>>>>>>) ", re.MULTILINE),
}

MARKDOWN_LINK = re.compile(r"\]\(([^)\s]+)\)")
BACKTICKED = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w.-]+(/[\w.-]+)+/?")
MAKE_TARGET = re.compile(r"(?:^|[`$]\s?|&& |\| )make ([a-z][a-z-]*)", re.MULTILINE)
PYTHON_MODULE = re.compile(r"python3? -m ((?:sgl_esft|sgl_elastic|bench|scripts)[\w.]*)")


def matches(rules: dict[str, re.Pattern[str]], text: str) -> list[str]:
    """`line N: what` for each rule the text breaks."""
    return [
        f"line {text.count(chr(10), 0, found.start()) + 1}: {what}"
        for what, pattern in rules.items()
        for found in pattern.finditer(text)
    ]


def text_of(path: str) -> str | None:
    """The file's text, or None for checkpoints and pictures."""
    try:
        return (ROOT / path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def dead_paths(text: str, folder: str, existing: set[str]) -> list[str]:
    """Relative links, and backticked paths below a folder of ours, that lead nowhere."""
    tops = {path.split("/")[0] for path in existing if "/" in path}
    links = [link.split("#")[0] for link in MARKDOWN_LINK.findall(text) if "://" not in link]
    wanted = [posixpath.normpath(posixpath.join(folder, link)) for link in links if link]
    quoted = [token for token in BACKTICKED.findall(text) if PATH.fullmatch(token)]
    wanted += [token.rstrip("/") for token in quoted if token.split("/")[0] in tops]
    return [path for path in wanted if path not in existing]


def unknown_targets(text: str, makefile: str) -> list[str]:
    """`make x` in a document where the Makefile has no x."""
    known = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    return [name for name in MAKE_TARGET.findall(text) if name not in known]


def unknown_modules(text: str, existing: set[str]) -> list[str]:
    """`python -m x.y` in a document where neither x/y.py nor x/y/__main__.py is there."""
    names = [name.rstrip(".") for name in PYTHON_MODULE.findall(text)]
    paths = {name: name.replace(".", "/") for name in names}
    return [
        name
        for name, path in paths.items()
        if f"{path}.py" not in existing and f"{path}/__main__.py" not in existing
    ]


def with_folders(paths: tuple[str, ...]) -> set[str]:
    """These paths and every folder above them."""
    parts = [path.split("/") for path in paths]
    return {"/".join(each[:n]) for each in parts for n in range(1, len(each) + 1)}


EXISTING = with_folders(project_files())
TEXTS = {path: text for path in project_files() if (text := text_of(path)) is not None}
DOCUMENTS = sorted(path for path in TEXTS if path.endswith(".md"))


def test_library_code_neither_unpickles_nor_calls_a_shell() -> None:
    library = {path: text for path, text in TEXTS.items() if path.startswith(LIBRARY)}
    assert {path: found for path, text in library.items() if (found := matches(UNSAFE, text))} == {}


def test_no_text_holds_what_belongs_to_one_machine_or_to_later() -> None:
    texts = {path: text for path, text in TEXTS.items() if path != THIS_FILE}
    assert {path: found for path, text in texts.items() if (found := matches(STRAY, text))} == {}


@pytest.mark.parametrize("path", DOCUMENTS)
def test_documents_point_at_what_exists(path: str) -> None:
    folder = path.rpartition("/")[0]
    assert dead_paths(TEXTS[path], folder, EXISTING) == []
    assert unknown_targets(TEXTS[path], TEXTS["Makefile"]) == []
    assert unknown_modules(TEXTS[path], EXISTING) == []


def test_ci_calls_targets_that_exist() -> None:
    for path in (".ci/run", ".github/workflows/ci.yml", ".pre-commit-config.yaml"):
        used = re.findall(r"\bmake ([a-z-]+)$", TEXTS[path], re.MULTILINE)
        assert used, path
        assert unknown_targets("".join(f"`make {name}`" for name in used), TEXTS["Makefile"]) == []


def test_no_large_file_is_tracked() -> None:
    sizes = {path: (ROOT / path).stat().st_size for path in project_files()}
    assert sum(sizes.values()) < 40e6
    assert sum(n for path, n in sizes.items() if path.startswith("sgl_esft/zoo/")) < 25e6


@pytest.mark.parametrize(
    ("rules", "bad", "good"),
    [
        (UNSAFE, "import pickle\n", "import picklers\n"),
        (UNSAFE, "    from pickle import loads\n", "# no pickle is ever read\n"),
        (UNSAFE, "x = torch.load(path)\n", "torch.loads(x)\n"),
        (UNSAFE, "run(command, shell=True)\n", "shell = 1\n"),
        (UNSAFE, "os.system('ls')\n", "os.systems\n"),
        (UNSAFE, "eval(text)\n", "model.eval()\n"),
        (STRAY, "see /home/me/x", "https://a.org/home/x"),
        (STRAY, '"/root/a"', "a/home/b"),
        (STRAY, "# TODO later", ".github/workflows/"),
        (STRAY, "<<<<<<< HEAD", "<<<"),
    ],
)
def test_checker_finds_what_is_bad_and_no_more(
    rules: dict[str, re.Pattern[str]], bad: str, good: str
) -> None:
    [found] = matches(rules, "x = 1\n" + bad)
    assert found.startswith("line 2: " if bad[0] != " " else "line ")
    assert matches(rules, good) == []


def test_checker_finds_dead_paths() -> None:
    existing = {"docs", "docs/a.md", "src", "src/x.py", "top.md"}
    text = "[a](a.md) [b](b.md#part) [up](../top.md) [web](https://a.org/x) `src/x.py` `src/y.py`"
    assert dead_paths(text, "docs", existing) == ["docs/b.md", "src/y.py"]


def test_checker_finds_unknown_targets_and_modules() -> None:
    text = "run `make test`, `make tests` or\nmake serve PORT=1\nlet us make peace"
    assert unknown_targets(text, "test: setup\nserve:\n") == ["tests"]
    text = "`python -m bench.a`, `.venv/bin/python -m bench.b` and python -m sgl_esft.zoo evaluate"
    existing = {"bench/a.py", "sgl_esft/zoo/__main__.py"}
    assert unknown_modules(text, existing) == ["bench.b"]
