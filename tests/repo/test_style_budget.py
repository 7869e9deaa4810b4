"""Functions and files stay short enough to read: budgets over all library code."""

from __future__ import annotations

import ast
import statistics

import pytest

from tests.repo.tree import PACKAGES, ROOT, python_files

MEDIAN_FUNCTION = 12
P90_FUNCTION = 40
LONGEST_FUNCTION = 80
LONGEST_FILE = 400

# path, or path:function -> why it may be longer. An entry that is no longer needed fails.
ALLOWED: dict[str, str] = {}

LIBRARY = python_files(*PACKAGES, "scripts")


def function_lengths(source: str) -> dict[str, int]:
    """Lines of each function, decorators and docstring included, by dotted name."""
    lengths: dict[str, int] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                if not isinstance(child, ast.ClassDef):
                    first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                    lengths[name] = (child.end_lineno or first) - first + 1
                visit(child, f"{name}.")
            else:
                visit(child, prefix)

    visit(ast.parse(source), "")
    return lengths


def over_budget(path: str, source: str) -> list[str]:
    """`path` or `path:function` of everything in one file that is too long."""
    found = [path] if source.count("\n") > LONGEST_FILE else []
    lengths = function_lengths(source)
    return found + [f"{path}:{name}" for name, n in lengths.items() if n > LONGEST_FUNCTION]


def distribution_problems(lengths: list[int]) -> list[str]:
    """What is wrong with the lengths of all functions together."""
    median = statistics.median(lengths)
    p90 = statistics.quantiles(lengths, n=10, method="inclusive")[-1]
    found = []
    if median > MEDIAN_FUNCTION:
        found.append(f"the median function has {median} lines, the budget is {MEDIAN_FUNCTION}")
    if p90 > P90_FUNCTION:
        found.append(f"nine of ten functions should have {P90_FUNCTION} lines; p90 is {p90}")
    return found


def read(path: str) -> str:
    return (ROOT / path).read_text()


def test_there_is_library_code() -> None:
    assert len(LIBRARY) > 10


def test_no_function_or_file_is_too_long() -> None:
    found = [entry for path in LIBRARY for entry in over_budget(path, read(path))]
    assert sorted(set(found) - set(ALLOWED)) == []


def test_allow_list_is_needed_and_reasoned() -> None:
    found = [entry for path in LIBRARY for entry in over_budget(path, read(path))]
    assert sorted(set(ALLOWED) - set(found)) == []
    assert all(reason.strip() for reason in ALLOWED.values())


def test_most_functions_are_short() -> None:
    lengths = [n for path in LIBRARY for n in function_lengths(read(path)).values()]
    assert distribution_problems(lengths) == []


def test_checker_sees_nested_functions_methods_and_decorators() -> None:
    source = (
        "class A:\n    @d\n    def f(self):\n        def g():\n            pass\n        return g\n"
    )
    assert function_lengths(source) == {"A.f": 5, "A.f.g": 2}


def test_checker_finds_a_long_function_and_a_long_file() -> None:
    long_function = "def f():\n" + "    pass\n" * LONGEST_FUNCTION
    assert over_budget("a.py", long_function) == ["a.py:f"]
    assert over_budget("a.py", "x = 1\n" * (LONGEST_FILE + 1)) == ["a.py"]
    assert over_budget("a.py", "x = 1\n" * LONGEST_FILE) == []


@pytest.mark.parametrize(
    ("lengths", "number_of_problems"),
    [([5] * 20, 0), ([20] * 20, 1), ([5] * 15 + [60] * 5, 1), ([60] * 20, 2)],
)
def test_checker_judges_the_distribution(lengths: list[int], number_of_problems: int) -> None:
    assert len(distribution_problems(lengths)) == number_of_problems
