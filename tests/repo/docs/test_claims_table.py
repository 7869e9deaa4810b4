"""docs/testing.md's table of claims: each page has one, each test is there, in the tier it says."""

from __future__ import annotations

import ast
from dataclasses import dataclass

import pytest

from tests.repo.docs.blocks import DOCUMENTS
from tests.repo.tree import ROOT

TESTS = ROOT / "tests"
# What claims nothing that a program could show.
WITHOUT_CLAIMS = {"decisions.md", "testing.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"}


@dataclass(frozen=True)
class Claim:
    """A row: what a page says, the test that shows it, the make target that runs the test."""

    page: str
    test: str
    tier: str


def claims() -> list[Claim]:
    text = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    rows = text.partition("\n## What shows what")[2].partition("\n## ")[0].splitlines()
    cells = [[cell.strip(" `") for cell in row.strip("| ").split(" | ")] for row in rows]
    return [Claim(c[0], c[2], c[3]) for c in cells if len(c) == 4 and "test_" in c[2]]


def tiers_of(test: str) -> set[str]:
    """The make targets that run it. Raises KeyError if there is no such test."""
    file, _, name = test.partition("::")
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    if file.startswith("full/"):
        return {"test-full"}
    marks = _marks_of(tree, name) if name else ""
    of_module = _marks_of_module(tree)
    if "pytest.mark.soak" in marks + of_module:
        return {"test-soak"}
    if "pytest.mark.full" in of_module:
        return {"test-full"}
    if "pytest.mark.full" not in marks:
        return {"test"}
    return {"test-full"} if "@pytest.mark.full" in marks else {"test", "test-full"}


def _marks_of(tree: ast.Module, name: str) -> str:
    found = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
    return "\n".join(f"@{ast.unparse(mark)}" for mark in found[name].decorator_list)


def _marks_of_module(tree: ast.Module) -> str:
    assigned = [each for each in tree.body if isinstance(each, ast.Assign)]
    found = [each.value for each in assigned if ast.unparse(each.targets[0]) == "pytestmark"]
    return "\n".join(ast.unparse(value) for value in found)


@pytest.mark.parametrize("claim", claims(), ids=lambda claim: claim.test)
def test_the_test_is_there_and_runs_in_that_tier(claim: Claim) -> None:
    assert (TESTS / claim.test.partition("::")[0]).is_file()
    assert set(claim.tier.split(", ")) == tiers_of(claim.test)


def test_every_page_has_a_row() -> None:
    pages = {path.name for path in DOCUMENTS if path.parent in (ROOT, ROOT / "docs")}
    assert pages - WITHOUT_CLAIMS == {claim.page for claim in claims()}


def test_checker_knows_tiers_and_misses_tests() -> None:
    assert tiers_of("full/test_dashboard.py") == {"test-full"}
    assert tiers_of("server/test_elastic_faults.py::test_a_supervisor_is_killed") == {"test-full"}
    assert tiers_of("server/test_elastic_lost.py::test_twenty_devices_are_lost") == {"test-soak"}
    assert tiers_of("server/test_equality.py::test_woven_equals_merged") == {"test", "test-full"}
    with pytest.raises(KeyError):
        tiers_of("server/test_equality.py::test_of_old")
