"""What is left out by name is what SGLang says, and nothing else."""

from __future__ import annotations

import logging
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

from sgl_esft.observe import console


@pytest.mark.parametrize(("name", "start"), console.LOG_LINES.items())
def test_every_line_that_is_left_out_is_in_its_module(name: str, start: str) -> None:
    srt = find_spec("sglang")
    assert srt is not None
    assert srt.submodule_search_locations is not None
    path = Path(srt.submodule_search_locations[0]).parent / Path(*name.split("."))
    assert start in path.with_suffix(".py").read_text().replace('"\n            "', "")


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
