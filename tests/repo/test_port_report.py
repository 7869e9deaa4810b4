"""The report that a port starts from: of two small trees, and of what is installed."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Final

import pytest

from scripts import port_report
from scripts.port_report import Name, Status, compare, installed, names_used
from scripts.sglang_source import SourceTree

OLD: Final = {
    "__init__.py": "",
    "srt/__init__.py": "from .tools import *\nfrom sglang.srt.tools import kept as renamed\n",
    "srt/tools.py": '''
        import os

        LIMIT = 3

        def kept(a: int, *, b=1) -> int:
            """What it does."""
            return a + b

        def inside(a):
            return a

        def by_default(a, b=1):
            return a

        def one_more(a):
            return a

        def gone():
            pass

        if os.name == "nt":
            def chosen():
                return 1
        else:
            def chosen():
                return 2

        class Base:
            def inherited(self, a):
                return a

        class Runner(Base):
            size: int = 1

            def own(self):
                return self.size
    ''',
}
CHANGES: Final = (
    ('"""What it does."""', '"""What it does, said otherwise."""  # and why'),
    ("def kept(a: int, *, b=1) -> int:", "def kept(a: float, *, b=1) -> float:"),
    ("def inside(a):\n            return a", "def inside(a):\n            return 2 * a"),
    ("def by_default(a, b=1):", "def by_default(a, b=2):"),
    ("def one_more(a):", "def one_more(a, c):"),
    ("def gone():", "def went():"),
    ("return 2\n", "return 3\n"),
    ("def inherited(self, a):", "def inherited(self, b):"),
    ("LIMIT = 3", "LIMIT = 4"),
    ("size: int = 1", "size: int"),
    ("return self.size", "return self.size\n\n            def added(self): ..."),
)
EXPECTED: Final = {
    "srt.tools.kept": Status.SAME,
    "srt.kept": Status.SAME,  # by a star import
    "srt.renamed": Status.SAME,
    "srt.tools.inside": Status.BODY,
    "srt.inside": Status.BODY,
    "srt.tools.by_default": Status.SIGNATURE,
    "srt.tools.one_more": Status.SIGNATURE,
    "srt.tools.gone": Status.GONE,
    "srt.tools.chosen": Status.BODY,
    "srt.tools.Runner.inherited": Status.SIGNATURE,
    "srt.tools.Runner.own": Status.SAME,
    "srt.tools.Runner": Status.SIGNATURE,
    "srt.tools.LIMIT": Status.BODY,
    "srt.tools.os": Status.SAME,
    "srt.tools": Status.SAME,
    "srt.nowhere": Status.UNREADABLE,
}


def write(folder: Path, changes: tuple[tuple[str, str], ...] = ()) -> Path:
    for name, text in OLD.items():
        for before, after in changes if name.endswith("tools.py") else ():
            assert before in text
            text = text.replace(before, after)  # noqa: PLW2901
        path = folder / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(line.removeprefix(" " * 8) for line in text.splitlines()))
    return folder


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return write(tmp_path / "old")


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return write(tmp_path / "new", CHANGES)


@pytest.mark.parametrize(("target", "status"), EXPECTED.items())
def test_what_became_of_a_name(old: Path, new: Path, target: str, status: Status) -> None:
    names = [Name(f"sglang.{target}", ("hook",))]
    (finding,) = compare(names, SourceTree(old), SourceTree(new))
    assert finding.status is status


def test_what_a_hook_adds_must_stay_missing(old: Path, new: Path) -> None:
    names = [Name("sglang.srt.tools.Runner.added", ("hook",), is_added=True)]
    assert compare(names, SourceTree(old), SourceTree(old))[0].status is Status.SAME
    assert compare(names, SourceTree(old), SourceTree(new))[0].status is Status.APPEARED


@pytest.mark.parametrize(
    ("target", "status", "said"),
    [
        ("kept", 0, "unchanged: 1"),
        ("inside", 0, "changed inside: 1\n  sglang.srt.tools.inside  (hook)\n    --- installed"),
        ("one_more", 1, "+def one_more(a, c):"),
        ("gone", 1, "gone: 1\n  sglang.srt.tools.gone  (hook)"),
    ],
)
def test_the_command(
    old: Path,
    new: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    target: str,
    status: int,
    said: str,
) -> None:
    monkeypatch.setattr(
        port_report, "names_used", lambda: [Name(f"sglang.srt.tools.{target}", ("hook",))]
    )
    wheel = new / "sglang-9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        for path in sorted(new.rglob("*.py")):
            packed.write(path, path.relative_to(new))
    for version in (new, wheel):
        assert port_report.main(["--old", str(old), "--diff", str(version)]) == status
        assert said in capsys.readouterr().out


def test_what_is_no_sglang_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no sglang"):
        port_report.main(["--old", str(tmp_path), str(tmp_path)])


def test_every_name_we_use_is_found_by_reading() -> None:
    names, tree = names_used(), installed()
    assert len(names) > 120
    assert [name.target for name in names if not name.is_added and not tree.find(name.target)] == []
    assert any(len(name.users) > 1 for name in names)
