"""Each folder of code says in a few lines what lives there, what may not, and where to start."""

from __future__ import annotations

import re

import pytest

from tests.repo.tree import ROOT, project_files

MAX_LINES = 15
CODE = (".py", ".cpp", ".h", ".sh")
# None needed: the first mirror the rooms of the code, the README above tells of the rest.
COVERED = ("tests/fast/", "tests/repo/docs", "launch/recipes/")
PARTS = ("\n**Not here:** ", "\n**Start with** ")
FILE = re.compile(r"`([\w./-]+\.(?:py|cpp|h|sh|md|js))`")

FOLDERS = sorted(
    {
        path.rpartition("/")[0]
        for path in project_files()
        if path.endswith(CODE) and "/" in path and not path.startswith(COVERED)
    }
    | {"tests", "tests/fast", "launch/recipes"}
)


def faults(folder: str, text: str) -> list[str]:
    """What a folder's README lacks."""
    found = [f"no {part.strip()}" for part in PARTS if part not in text]
    if text.count("\n") > MAX_LINES:
        found.append(f"{text.count(chr(10))} lines, {MAX_LINES} are enough")
    if not text.startswith(f"# {folder}\n"):
        found.append("its first line is not the folder's path")
    if not FILE.search(text.rpartition(PARTS[1])[2]):
        found.append("it names no file to start with")
    named = FILE.findall(text)
    roots = (ROOT / folder, ROOT)
    return found + [f"no file {n}" for n in named if not any((r / n).is_file() for r in roots)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_has_a_short_readme(folder: str) -> None:
    readme = ROOT / folder / "README.md"
    assert readme.is_file(), (
        f"{folder}/README.md: say what lives here, what may not, where to start"
    )
    assert faults(folder, readme.read_text()) == []


GOOD = "# kernels\n\nRerouting.\n\n**Not here:** SGLang.\n\n**Start with** `op.py`.\n"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("# kernels", "# kernel", "the folder's path"),
        ("Rerouting.", "Rerouting.\n" * 15, "22 lines"),
        ("**Not here:**", "Not:", "no **Not here:**"),
        ("**Start with**", "Start", "no **Start with**"),
        ("`op.py`", "`gone.py`", "no file gone.py"),
        ("`op.py`", "somewhere", "no file to start with"),
    ],
)
def test_checker_finds_bad_readmes(old: str, new: str, words: str) -> None:
    assert faults("kernels", GOOD) == []
    assert words in "; ".join(faults("kernels", GOOD.replace(old, new)))
