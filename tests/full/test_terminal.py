"""What a person sees of `make serve` on a terminal, from its start to Ctrl-C."""

from __future__ import annotations

import os
import re

import pytest

from sgl_esft.ports import pick_free_port
from tests.support.servers import START_TIMEOUT_S
from tests.support.terminal import MOST_LINES, OF_SETUP, terminal

pytestmark = pytest.mark.full

END_TIMEOUT_S = 60.0
_REDRAWN = re.compile(rb"[^\n]*\r\x1b\[2K")  # a line in place of which another was drawn


def lines_of(shown: bytes) -> list[str]:
    """What is left on the screen; the echo of Ctrl-C is the person's own."""
    left = _REDRAWN.sub(b"", shown.replace(b"\r\n", b"\n")).replace(b"^C", b"")
    return [line for line in left.decode().splitlines() if line.strip()]


def test_a_start_is_a_dozen_lines_and_ctrl_c_one() -> None:
    with terminal("make", "serve", f"PORT={pick_free_port()}") as person:
        start = lines_of(person.read_until(rb"curl http.*\n\Z", START_TIMEOUT_S))
        assert len(start) <= MOST_LINES - OF_SETUP, start  # tests/repo/test_packaging.py: setup's
        assert [line for line in start if "ready after" in line], start
        os.write(person.descriptor, b"\x03")
        end = lines_of(person.read_until(b"", END_TIMEOUT_S))
        assert len(end) <= 1, end


def test_a_line_that_was_drawn_over_is_none() -> None:
    shown = b"one\r\n\r\x1b[2Kloading (1 s)\r\x1b[2Kloading (2 s)\r\x1b[2Ktwo\r\n^C"
    assert lines_of(shown) == ["one", "two"]
