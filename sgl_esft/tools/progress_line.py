"""How far a long command is, on stderr: one line on a terminal, a line now and then in a log.

pack_cli.py, quantise_cli.py -> [ProgressLine] -> stderr
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TextIO

_STEP_PERCENT: Final = 10  # between two lines of a log

Words = Callable[[int, int], str]  # (done, all) -> what is said of them, behind the percentage


class ProgressLine:
    """One line that is rewritten on a terminal; else a line every `_STEP_PERCENT`."""

    def __init__(self, stream: TextIO, verb: str, words: Words) -> None:
        """verb: what is done, in front of the percentage, such as `packed`."""
        self._stream = stream
        self._verb = verb
        self._words = words
        self._is_terminal = stream.isatty()
        self._step = 1 if self._is_terminal else _STEP_PERCENT
        self._next_percent = self._step
        self._is_line_open = False

    def show(self, num_done: int, num_all: int) -> None:
        """Called after each piece of work; most calls print nothing."""
        percent = 100 * num_done // num_all
        if percent < self._next_percent:
            return
        self._next_percent = percent - percent % self._step + self._step
        text = f"{self._verb} {percent:3} %: {self._words(num_done, num_all)}"
        self._stream.write(f"\r{text}" if self._is_terminal else f"{text}\n")
        self._stream.flush()
        self._is_line_open = self._is_terminal

    def end(self) -> None:
        """What is printed next, an error perhaps, begins a line of its own."""
        if self._is_line_open:
            self._stream.write("\n")
            self._stream.flush()
            self._is_line_open = False
