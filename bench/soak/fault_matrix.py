"""The matrix of faults on a live server, in parts, with a record of how each cell ended.

    python -m bench.soak.fault_matrix --part 1/6

    the cells of tests/server/test_fault_matrix.py --[part_of]--> pytest --[Recorder]--> a row each
    -> [merged] with what earlier runs found -> fault_matrix.json; ends with 1 where a cell failed

The cells are the tests' own: here some are chosen, and what became of each is written at once. A
cell that is run again gets a new row. One whose server did not start, or that was cut short, gets
none: it was not run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import sys
import traceback
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from bench.common.record import RESULTS, commit, machine, write_result
from bench.report.age import measured_paths
from bench.report.fault_tables import COMMAND, standing

NAME = "fault_matrix"
TESTS = Path(__file__).resolve().parents[2] / "tests" / "server" / "test_fault_matrix.py"
FIELDS = ("target", "process", "signal", "phase", "moment")  # of a cell: another moment is another
MOST_CHARS = 240  # of what a failure says
PASSED = "passed"

Row = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Choice:
    """Which cells: the part `number` of `count`; `is_left`: of those, what did not pass yet."""

    number: int = 1
    count: int = 1
    is_left: bool = False


def part_of(cells: Sequence[T], choice: Choice) -> Sequence[T]:
    """Neighbours; all parts together are all cells, each once, and of the same size but for one."""
    begin, end = (at * len(cells) // choice.count for at in (choice.number - 1, choice.number))
    return cells[begin:end]


def chosen(rows: Sequence[Row], choice: Choice) -> list[Row]:
    """What is run, of a row for each cell: parts are of all cells, whatever is left of them."""
    part = part_of(rows, choice)
    return [row for row in part if not (choice.is_left and standing(row) == PASSED)]


def merged(cells: Sequence[Row], *records: Sequence[Row]) -> list[Row]:
    """A row for each cell, from the last record that has one; without any, the cell alone."""
    found = {_key(row): row for record in records for row in record}
    return [found.get(_key(cell), cell) for cell in cells]


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[field] for field in FIELDS)


def reason(error: BaseException) -> str:
    """Of what failed first: what it says, in a line, and the two lines of code it came from."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = str(error).partition("\n")[0][:MOST_CHARS]
    lines = [str(frame.line) for frame in traceback.extract_tb(error.__traceback__)[-2:]]
    return f"{type(error).__name__}: {said} at: {' / '.join(lines)}"


class Recorder:
    """A plugin of pytest: it leaves the chosen cells, and writes how each of them ended."""

    def __init__(self, choice: Choice, folder: Path) -> None:
        self._choice, self._folder = choice, folder
        self._cells: list[Row] = []  # all of them, chosen or not
        code = [f":/{path}" for path in measured_paths(COMMAND)]
        self._commit = commit(*code, ":(top,exclude)*.md")

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        self._cells = [_cell_of(item) for item in items]
        rows = chosen(merged(self._cells, self._recorded()), self._choice)
        keys = {_key(row) for row in rows}
        left_out = [item for item in items if _key(_cell_of(item)) not in keys]
        items[:] = [item for item in items if _key(_cell_of(item)) in keys]
        config.hook.pytest_deselected(items=left_out)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "call":
            self._write(self._row(item, call))
        return report

    def _row(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Row:
        failed = call.excinfo is not None
        now = datetime.datetime.now(datetime.UTC)
        return {
            **_cell_of(item),
            "outcome": "failed" if failed else PASSED,
            **({"reason": reason(call.excinfo.value)} if call.excinfo else {}),
            **dict(item.user_properties),
            "seconds": round(call.duration, 1),
            "commit": self._commit,
            "machine": machine(),  # parts may be run on several
            "time": now.isoformat(timespec="seconds"),
        }

    def _write(self, row: Row) -> None:
        figures = {
            "command": COMMAND,  # the rows are of several runs
            "what": "How each cell of the matrix of faults ended, when it was last run",
            "rows": merged(self._cells, self._recorded(), [row]),
        }
        write_result(NAME, figures, folder=self._folder)

    def _recorded(self) -> list[Row]:
        path = self._folder / f"{NAME}.json"
        return list(json.loads(path.read_text())["rows"]) if path.exists() else []


def _cell_of(item: pytest.Item) -> Row:
    return asdict(item.callspec.params["cell"])  # type: ignore[attr-defined]


def run(choice: Choice, folder: Path = RESULTS, tests: Path = TESTS) -> int:
    """The chosen cells, one after the other. Returns pytest's status, 0 where nothing is left."""
    arguments = [str(tests), "-m", "soak", "-v", "-p", "no:cacheprovider"]
    status = int(pytest.main(arguments, plugins=[Recorder(choice, folder)]))
    is_nothing_left = choice.is_left and status == pytest.ExitCode.NO_TESTS_COLLECTED
    return 0 if is_nothing_left else status


def _part(words: str) -> tuple[int, int]:
    number, _, count = words.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{words!r}: such as 1/6, the first of six parts")
    return int(number), int(count)


def main() -> None:
    """Run a part and write its record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", type=_part, default=(1, 1), help="such as 1/6; all without it")
    parser.add_argument(
        "--left", action="store_true", help="without the cells that passed on this code already"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # pytest ends what it has started
    sys.exit(run(Choice(*options.part, options.left), options.out))


if __name__ == "__main__":
    main()
