"""The code blocks of the documents, and what each says about being run.

    *.md --[read_blocks]--> Block (language, text, mark) --[fault]--> None, or what is wrong with it

A block of commands (`bash`, `console`) is marked in the line above it:

    <!-- run: shell -->             without a server, in a folder that looks like the checkout
    <!-- run: server -->            with the server of `make serve`, or the one started on the page
    <!-- run: own server -->        it starts that server
    <!-- run: elastic server -->    with the elastic server of tests/server/test_elastic.py
    <!-- not run: REASON -->        its launcher and tool commands are still parsed

A mark at the top of a document, `<!-- blocks run: server -->`, holds for all its unmarked ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.servers import ROOT

KINDS = ("shell", "server", "own server", "elastic server")
COMMAND_LANGUAGES = ("bash", "console")
OTHER_LANGUAGES = ("ini", "json", "mermaid", "mlir", "python", "text", "yaml")

README = ROOT / "README.md"
DOCUMENTS = (
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "requirements" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
)
# The README has no room for marks. The first words of a block say which it is.
README_MARKS = {
    "$ ask() {": "run: server",
    "$ mine() {": "run: server",
    "make serve ": "not run: installs; what it starts then is what every test of a server starts",
    ".venv/bin/python -m sgl_esft.launch_server": "not run: BASE and DIR are the reader's",
    "make serve-elastic": "not run: docs/elastic.md has the same, run",
}

_FENCE = re.compile(
    r"^(?:<!-- ((?:not )?run: [^\n]*?) -->\n+)?^(```+)([\w-]*)[^\n]*\n(.*?)^\2$",
    re.MULTILINE | re.DOTALL,
)
_OF_PAGE = re.compile(r"^<!-- blocks (run: [^\n]*?) -->$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block. `mark` is `run: KIND`, `not run: REASON` or None."""

    page: str
    line: int
    language: str
    text: str
    mark: str | None

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def kind(self) -> str | None:
        """What it is run with; None if it is not run."""
        is_run = self.mark is not None and self.mark.startswith("run: ")
        return self.mark.removeprefix("run: ") if is_run and self.mark else None


def read_blocks(page: Path) -> list[Block]:
    """All blocks of a document, in order."""
    name = page.relative_to(ROOT).as_posix()
    return list(parse_blocks(name, page.read_text(encoding="utf-8")))


def parse_blocks(name: str, text: str) -> Iterator[Block]:
    of_page = _OF_PAGE.search(text)
    for found in _FENCE.finditer(text):
        mark, _, language, body = found.groups()
        line = text.count("\n", 0, found.start(2)) + 1
        if mark is None and name == "README.md":
            mark = next((m for start, m in README_MARKS.items() if body.startswith(start)), None)
        if mark is None and of_page and language in COMMAND_LANGUAGES:
            mark = of_page[1]
        yield Block(name, line, language, body, mark)


def fault(block: Block) -> str | None:
    """What is wrong with a block, if anything is."""
    is_readme = block.page == "README.md"
    if block.language not in (*COMMAND_LANGUAGES, *OTHER_LANGUAGES) and not is_readme:
        known = ", ".join((*COMMAND_LANGUAGES, *OTHER_LANGUAGES))
        return f"{block.where}: the language {block.language!r} is none of {known}"
    if block.language in OTHER_LANGUAGES:
        return f"{block.where}: {block.language} is not run" if block.mark else None
    if block.mark is None:
        return f"{block.where}: no mark above it: <!-- run: server -->, or <!-- not run: why -->"
    if block.kind is not None and block.kind not in KINDS:
        return f"{block.where}: {block.kind!r} is none of {', '.join(KINDS)}"
    if block.kind is None and len(block.mark.removeprefix("not run: ").split()) < 3:
        return f"{block.where}: `{block.mark}` gives no reason"
    return None


BLOCKS = [block for page in DOCUMENTS for block in read_blocks(page)]


def run_blocks(page: str) -> list[Block]:
    """The blocks of a document that are run."""
    return [block for block in BLOCKS if block.page == page and block.kind]


def pages_run_with(*kinds: str) -> list[str]:
    """The documents with a block of one of these kinds."""
    pages = {block.page: None for block in BLOCKS if block.kind in kinds}
    return list(pages)
