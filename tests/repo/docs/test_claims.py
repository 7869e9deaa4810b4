"""What the operator's pages say is so: files parse, routes and flags exist, errors are told."""

from __future__ import annotations

import configparser
import json
import re
import shlex

import pytest
import yaml

from sgl_esft import errors
from sgl_esft.http.classes import RouteClass, RouteTable
from sgl_esft_launch import flags
from tests.repo.docs.blocks import BLOCKS, DOCUMENTS

OF_DEFECTS = {"EsftError", "UserError", "RetryLaterError", "InternalError", "AccessError"}
WORDS = {path.name: path.read_text(encoding="utf-8") for path in DOCUMENTS}


def texts(language: str) -> list[str]:
    return [block.text for block in BLOCKS if block.language == language]


def test_probes_ask_for_public_routes() -> None:
    paths = re.findall(r"path: (/\w+)", "".join(texts("yaml")))
    assert {"/healthz", "/readyz"} <= set(paths)
    assert {RouteTable().find("GET", path) for path in paths} == {RouteClass.PUBLIC}
    for text in texts("yaml"):
        assert yaml.safe_load(text)


def test_the_unit_starts_the_launcher() -> None:
    text = next(iter(texts("ini"))).replace("\\\n", " ")
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(text)
    command = shlex.split(unit["Service"]["ExecStart"])
    assert command[1:3] == ["-m", "sgl_esft.launch_server"]
    parsed, rest = flags.parse(command[3:])
    assert rest == ["--enable-metrics"]
    drain_s = flags.build_parser().get_default("drain_timeout")
    assert float(unit["Service"]["TimeoutStopSec"]) > drain_s
    assert parsed.adapter_root == "/srv/adapters"


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
