"""SECURITY.md: each thing that it says holds names the tests that show it, and those are there."""

from __future__ import annotations

import re

import pytest

from tests.repo.tree import ROOT

_PAGE = (ROOT / "SECURITY.md").read_text()
_HOLDS = _PAGE.split("## What holds\n")[1].split("\n## ")[0]
PROMISES = re.findall(r"(?ms)^- \*\*(.+?)\*\*(.*?)(?=^- |\Z)", _HOLDS)


def test_there_are_promises() -> None:
    assert len(PROMISES) > 12


@pytest.mark.parametrize(("title", "text"), PROMISES, ids=[title for title, _ in PROMISES])
def test_a_promise_names_a_test_that_is_there(title: str, text: str) -> None:
    shown_by = text.partition("Shown by ")[2]
    references = re.findall(r"`([\w/.]+)(?:::(\w+))?`", shown_by)
    assert references, title
    for path, name in references:
        content = (ROOT / path).read_text()
        assert not name or re.search(rf"(?m)^(async )?def {name}\(", content), (path, name)
