"""What documents show is what its generator makes of code and results today, byte for byte.

    bench/results, the ledger, the routes -> [a generator each] == README.md, docs/*.md, pictures

To make them anew: `python -m` bench.report.readme_tables, bench.report.plots,
bench.report.draw_memory, scripts.hooks_page, scripts.api_docs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from bench.common.record import RESULTS
from bench.report import (
    draw_memory,
    fault_tables,
    finemoe_tables,
    plots,
    quantised_tables,
    readme_tables,
)
from scripts import api_docs, hooks_page
from tests.repo.tree import ROOT

# Tables whose result is still to come; a result takes its name off again.
TO_BE_MEASURED: frozenset[str] = frozenset(
    {*finemoe_tables.TABLES, *quantised_tables.TABLES, "gpu_answers"}
) - {
    "finemoe_figure3",
    "finemoe_figure4",
    "finemoe_figure8",
    "finemoe_figure9",
    "finemoe_figure10",
    "finemoe_figure11",
    "finemoe_figure12",
    "finemoe_figure14a",
    "finemoe_figure14b",
    "finemoe_figure15",
    "finemoe_figure16a",
    "finemoe_figure16b",
    "finemoe_figure17",
    "finemoe_figure18",
    "finemoe_large",
    "finemoe_regimes",
    "finemoe_regimes_decoding",
    "finemoe_shared",
    "finemoe_shift",
    "finemoe_speed",
    "finemoe_timeline",
    "quantised_large",
    "quantised_zoo",
    "quantised_decode",
}
MEASURED = [name for name in plots.DRAWERS if (RESULTS / f"{name}.json").exists()]


def tables_of(document: Path) -> str:
    return readme_tables.filled(document.read_text())


def reference() -> str:
    """In a process of its own: it assembles what a launch installs."""
    code = "from scripts import api_docs; print(api_docs.page())"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.rstrip() + "\n"


def picture(name: str) -> str:
    return plots.svg(name, json.loads((RESULTS / f"{name}.json").read_text()))


GENERATED: dict[Path, Callable[[], str]] = {
    **{path: partial(tables_of, path) for path in readme_tables.DOCUMENTS},
    **{plots.PICTURES / f"{name}.svg": partial(picture, name) for name in MEASURED},
    draw_memory.PICTURE: draw_memory.memory_picture,
    hooks_page.PAGE: hooks_page.page,
    api_docs.PAGE: reference,
}


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.name)
def test_document_is_that_of_its_generator(path: Path) -> None:
    assert path.read_text() == GENERATED[path]()


def test_every_table_and_picture_is_shown() -> None:
    text = "".join(document.read_text() for document in readme_tables.DOCUMENTS)
    assert sorted(re.findall(r"<!-- table: (\w+) -->", text)) == sorted(readme_tables.TABLES)
    assert sorted(re.findall(r"\]\(pictures/(\w+)\.svg\)", text)) == sorted(MEASURED)
    found = {path.stem for path in RESULTS.glob("*.json")}
    assert found | fault_tables.TABLES.keys() == readme_tables.TABLES.keys() - TO_BE_MEASURED


def test_without_a_result_a_table_says_so_and_has_no_picture(tmp_path: Path) -> None:
    for document in readme_tables.DOCUMENTS:
        text = readme_tables.filled(document.read_text(), tmp_path)
        assert text.count("Not yet measured.") == text.count("<!-- table: ") > 0
        assert "](pictures/" not in text.partition("<!-- table: ")[2]
    assert plots.draw(tmp_path, tmp_path) == list(plots.DRAWERS)
    assert list(tmp_path.iterdir()) == []
