"""Where the suite's time goes, from its junit files, as tables for docs/testing.md.

    pytest --junitxml=FILE ... -> [suite_table FILE...] -> minutes by folder, the slowest tests

Minutes are added up over both processes, so two side by side are half of it on a clock.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

NUM_SLOWEST = 40


@dataclass(frozen=True)
class Case:
    """One test of a junit file."""

    folder: str
    name: str
    seconds: float


def cases_of(files: Iterable[Path]) -> Iterator[Case]:
    """Every test of the files, its set-up and clean-up included in its time."""
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            parts = str(case.get("classname")).split(".")
            name = f"{'/'.join(parts[1:])}.py::{case.get('name')}"
            yield Case("/".join(parts[:2]), name, float(str(case.get("time"))))


def folders_table(cases: list[Case]) -> str:
    """Minutes and numbers of tests by folder, the slowest first."""
    seconds: Counter[str] = Counter()
    for case in cases:
        seconds[case.folder] += case.seconds
    counts = Counter(case.folder for case in cases)
    rows = [f"| {name} | {counts[name]} | {s / 60:.1f} |" for name, s in seconds.most_common()]
    total = f"| all | {len(cases)} | {sum(seconds.values()) / 60:.1f} |"
    return "\n".join(["| folder | tests | minutes |", "|---|---|---|", *rows, total])


def slowest_table(cases: list[Case]) -> str:
    """The slowest tests, with the seconds of what they set up."""
    slowest = sorted(cases, key=lambda case: -case.seconds)[:NUM_SLOWEST]
    rows = [f"| `{case.name}` | {case.seconds:.0f} |" for case in slowest]
    return "\n".join(["| test | seconds |", "|---|---|", *rows])


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="junit files of one run")
    cases = list(cases_of(parser.parse_args().files))
    print(folders_table(cases), slowest_table(cases), sep="\n\n")


if __name__ == "__main__":
    main()
