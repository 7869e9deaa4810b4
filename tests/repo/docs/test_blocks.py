"""Every block of the documents says how it is run, and the tools that see to it do see."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.repo.docs import session
from tests.repo.docs.blocks import BLOCKS, KINDS, Block, fault, pages_run_with, parse_blocks
from tests.repo.docs.session import FAILED, Step


def block(language: str = "bash", text: str = "true\n", mark: str | None = "run: shell") -> Block:
    return Block("docs/x.md", 3, language, text, mark)


def test_every_block_says_how_it_is_run() -> None:
    assert len(BLOCKS) > 20
    assert [found for found in map(fault, BLOCKS) if found] == []


def test_each_kind_is_used() -> None:
    assert [kind for kind in KINDS if not pages_run_with(kind)] == []


def test_blocks_are_found_with_marks_and_lines() -> None:
    text = (
        "# T\n\n<!-- run: shell -->\n```bash\na\n```\n\n```text\nb\n```\n"
        "<!-- not run: needs a GPU -->\n\n```console\n$ c\n```\n"
    )
    found = list(parse_blocks("docs/x.md", text))
    assert [(b.language, b.mark, b.line) for b in found] == [
        ("bash", "run: shell", 4),
        ("text", None, 8),
        ("console", "not run: needs a GPU", 13),
    ]
    assert [b.kind for b in found] == ["shell", None, None]


def test_a_mark_for_the_page_holds_for_unmarked_blocks() -> None:
    text = "<!-- blocks run: server -->\n```bash\na\n```\n```json\n{}\n```\n"
    assert [b.mark for b in parse_blocks("docs/x.md", text)] == ["run: server", None]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (block(mark=None), "no mark"),
        (block(language=""), "language"),
        (block(language="sh"), "language"),
        (block(mark="run: moon"), "none of"),
        (block(mark="not run: no"), "no reason"),
        (block(language="json", mark="run: shell"), "not run"),
    ],
)
def test_checker_finds_bad_blocks(bad: Block, words: str) -> None:
    assert words in str(fault(bad))
    assert fault(block()) is fault(block(mark="not run: needs a GPU")) is None


def test_console_blocks_become_steps() -> None:
    text = "$ one\n1\n2\n$ two \\\n  more\n$ three\n"
    steps = session.steps_of([block("console", text)])
    assert [step.command for step in steps] == ["one\n", "two \\\n  more\n", "three\n"]
    assert [step.shown for step in steps] == ["1\n2\n", None, None]


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a\n", "a\n", True),
        ("a\n", "b\n", False),
        ("a\n", "a\nb\n", False),
        ("a ... c\n", "a b c\n", True),
        ("a ... c\n", "a b\nc\n", False),
        ("a\n...\nc\n", "a\nb\nb\nc\n", True),
        ("a\n...\nc\n", "a\nc\n", True),
        ("a\n...\n", "a\nb\n", True),
        ("...\n", "", True),
        ("[a]\n", "a\n", False),
    ],
)
def test_shown_outputs_are_compared(shown: str, printed: str, same: bool) -> None:
    assert (Step("x", "y", shown).fault(printed) is None) == same


def test_a_shell_runs_the_steps_in_order(tmp_path: Path) -> None:
    steps = [
        Step("1", "word=hello\n", None),
        Step("2", "echo $word\n", "hello\n"),
        Step("3", "ls README.md .venv/bin/python\n", ".venv/bin/python\nREADME.md\n"),
        Step("4", "echo text > new; cat missing\n", "cat: missing: ...\n"),
    ]
    assert session.run(steps, tmp_path) == []
    assert (tmp_path / "new").read_text() == "text\n"


@pytest.mark.parametrize(
    ("command", "shown", "words"),
    [
        ("false\n", None, f"{FAILED} false"),
        ("false\ntrue\n", None, f"{FAILED} false"),
        ("echo a\n", "b\n", "printed:\na"),
        ("exit 3\n", None, "ended after 0 of 1"),
    ],
)
def test_a_shell_tells_what_differs(
    command: str, shown: str | None, words: str, tmp_path: Path
) -> None:
    faults = session.run([Step("x", command, shown)], tmp_path)
    assert len(faults) == 1
    assert words in faults[0]


def test_the_server_of_the_documents_becomes_the_given_one() -> None:
    source = session.script([Step("x", "curl 127.0.0.1:30000/health\n", None)], "127.0.0.1:9")
    assert "curl 127.0.0.1:9/health\n" in source
    own = Step("x", "python -m sgl_esft.launch_server --elastic\n", None, starts_server=True)
    assert "sgl_esft.launch_server --port 9 --elastic" in session.script([own], "127.0.0.1:9")
