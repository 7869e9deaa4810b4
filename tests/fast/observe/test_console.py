"""What is left out by name is what SGLang says, and nothing else."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

from sgl_esft import env
from sgl_esft.observe import console

# Drawn as SGLang and huggingface_hub draw theirs, by classes that were imported before and after.
_BARS = """
from tqdm import tqdm as early
import sgl_esft
from tqdm.auto import tqdm
class Sub(tqdm): pass
for kind in (early, tqdm, Sub):
    with kind(total=2, desc="Multi-thread loading shards", disable=False, position=0) as bar:
        bar.update(2)
        bar.set_postfix(a=1)
    assert list(kind([1, 2], disable=None)) == [1, 2]
"""


@pytest.mark.parametrize(("name", "start"), console.LOG_LINES.items())
def test_every_line_that_is_left_out_is_in_its_module(name: str, start: str) -> None:
    assert start in source_of(name)


def source_of(name: str) -> str:
    """A module's source, with each of its messages in one piece."""
    srt = find_spec("sglang")
    assert srt is not None
    assert srt.submodule_search_locations is not None
    path = Path(srt.submodule_search_locations[0]).parent / Path(*name.split("."))
    return path.with_suffix(".py").read_text().replace('"\n            "', "")


def test_only_what_is_named_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    name, start = next(iter(console.LOG_LINES.items()))
    logger = logging.getLogger(name)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        console.silence()
        warnings.warn(f"{console.WARNINGS[0]} currently.", stacklevel=1)
        warnings.warn("another", stacklevel=1)
        logger.warning("%s.", start)
        logger.warning(start)
        logger.warning("another")
    logger.filters.clear()
    assert [str(each.message) for each in warned] == ["another"]
    assert [record.msg for record in caplog.records] == ["%s.", "another"]


@pytest.mark.parametrize(("name", "start"), console.CLIENTS_FAULTS.items())
def test_a_clients_fault_is_one_line(
    name: str, start: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of any length otherwise, with the client's text: 80 MB in 17 minutes of a fuzzer's."""
    assert start in source_of(name)
    logger = logging.getLogger(name)
    before = list(logger.filters)
    try:
        console.shorten()
        console.shorten()
        for text in (start, "another fault"):
            try:
                raise ValueError("what the client sent " * 1000)
            except ValueError:
                logger.exception(text)
    finally:
        logger.filters = before
    assert [record.getMessage() for record in caplog.records] == [
        f"{start}: ValueError",
        "another fault",
    ]
    assert [record.exc_info is None for record in caplog.records] == [True, False]


@pytest.mark.parametrize(
    ("environment", "drawn"),
    [({env.QUIET: "1"}, False), ({env.QUIET: "0"}, True), ({env.LOG_FORMAT: "json"}, False)],
    ids=["quiet", "verbose", "json"],
)
def test_bars_where_there_is_no_terminal(environment: dict[str, str], drawn: bool) -> None:
    process = subprocess.run(
        [sys.executable, "-c", _BARS],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("loading shards: 100%" in process.stderr) == drawn
    assert drawn or process.stderr + process.stdout == ""


@pytest.mark.parametrize(("launched", "status"), [(True, 0), (False, 1)])
def test_what_a_full_disk_does_not_take_is_lost(launched: bool, status: int) -> None:
    """A program that imports us keeps its own ways: a line that cannot be written ends it."""
    code = (
        "import sys, logging, sgl_esft\n"
        "print('one')\n"
        "sys.stderr.write('two')\n"
        "logging.warning('three')\n"
        "assert not sys.stdout.isatty() and sys.stdout.fileno() == 1\n"
    )
    environment = {name: each for name, each in os.environ.items() if name != env.LOG_FORMAT}
    environment |= {env.LOG_FORMAT: "text"} if launched else {}
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, stdout=full, stderr=full, env=environment, check=False)
    assert done.returncode == status
