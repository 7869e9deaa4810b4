"""What the operator's pages say is so: flags exist, errors are told."""

from __future__ import annotations

import json
import re

import pytest

from sgl_esft import errors
from sgl_esft_launch import flags
from tests.repo.docs.blocks import BLOCKS, DOCUMENTS

OF_DEFECTS = {"EsftError", "UserError", "RetryLaterError", "InternalError", "AccessError"}
WORDS = {path.name: path.read_text(encoding="utf-8") for path in DOCUMENTS}


def texts(language: str) -> list[str]:
    return [block.text for block in BLOCKS if block.language == language]


@pytest.mark.parametrize("page", ["operations.md", "quickstart.md", "guide_adapters.md"])
def test_flags_exist(page: str) -> None:
    known = set(re.findall(r"--[a-z][a-z-]+", flags.build_parser().format_help()))
    known |= set(re.findall(r"--[a-z][a-z-]+", WORDS["api.md"]))
    prose = re.sub(r"^```.*?^```$", "", WORDS[page], flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", prose))
    assert named - known - {"--enable-metrics"} == set()  # SGLang's own


def test_every_error_is_explained_by_a_person() -> None:
    """In a table of some page, with what to do; the reference alone does not count."""
    pages = {name: text for name, text in WORDS.items() if name != "api.md"}
    rows = [line for text in pages.values() for line in text.splitlines() if line.startswith("| ")]
    names = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.EsftError)
    }
    explained = {name for name in names for row in rows if f"`{name}`" in row}
    assert sorted(names - explained - OF_DEFECTS) == []


def test_examples_in_json_parse() -> None:
    """But for those that are shortened by `...`."""
    whole = [text for text in texts("json") if "..." not in text]
    assert len(whole) > 3
    for text in whole:
        assert json.loads(text) is not None
