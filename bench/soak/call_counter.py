"""How many functions a scheduler calls in a decode step: what it does, where times are noise.

    [preloaded]: a folder with this file as sitecustomize.py, first of a server's modules
    SIGUSR2 to the scheduler -> counting begins; again -> it ends, and $BENCH_CALLS.<pid> has
    {outer function: {"times": n, "calls": {name: n}}}, of complete calls of the outer ones

Python's functions and those of compiled modules count, torch's operators among them, as far as they
are called below an outer one. The file imports nothing of this project: another checkout's server
has it too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

FOLDER_VARIABLE = "BENCH_CALLS"
OUTER = ("run_batch", "process_batch_result")  # of SGLang's scheduler: a step, and what it answers
_FILE = "scheduler.py"


class CallCounter:
    """Of one thread, while it is on."""

    def __init__(self, outer: Sequence[str] = OUTER, file: str = _FILE) -> None:
        self._outer, self._file = outer, file
        self._name, self._depth = "", 0  # of the outer call that this thread is in
        self._open: Counter[str] = Counter()
        self.times = dict.fromkeys(outer, 0)
        self.calls: dict[str, Counter[str]] = {name: Counter() for name in outer}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """As sys.setprofile wants it."""
        if self._depth == 0:
            self._maybe_enter(frame, event)
        elif event == "call":
            self._depth += 1
            self._open[_name_of(frame)] += 1
        elif event == "return":
            self._depth -= 1
            if self._depth == 0:
                self.times[self._name] += 1
                self.calls[self._name].update(self._open)
        elif event == "c_call":
            self._open[getattr(arg, "__qualname__", repr(arg))] += 1

    def _maybe_enter(self, frame: FrameType, event: str) -> None:
        code = frame.f_code
        if (
            event == "call"
            and code.co_name in self._outer
            and code.co_filename.endswith(self._file)
        ):
            self._name, self._depth = code.co_name, 1
            self._open.clear()

    def figures(self) -> dict[str, Any]:
        """By outer function."""
        return {n: {"times": times, "calls": self.calls[n]} for n, times in self.times.items()}


def _name_of(frame: FrameType) -> str:
    """Such as `managers/scheduler.py:run_batch`."""
    code = frame.f_code
    return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_name}"


def listen(file: str) -> None:
    """Count between two SIGUSR2 of this process."""
    on: list[CallCounter] = []

    def toggle(_number: int, _frame: FrameType | None) -> None:
        if not on:
            on.append(CallCounter())
            sys.setprofile(on[0])
            return
        sys.setprofile(None)
        partial = Path(f"{file}.{os.getpid()}.partial")
        partial.write_text(json.dumps(on.pop().figures()))
        partial.rename(f"{file}.{os.getpid()}")

    signal.signal(signal.SIGUSR2, toggle)


if __name__ == "sitecustomize" and FOLDER_VARIABLE in os.environ:
    listen(os.environ[FOLDER_VARIABLE])
