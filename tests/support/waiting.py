"""Waiting for what others bring about: processes, threads, servers."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object],
    timeout_s: float = 20.0,
    *,
    every_s: float = 0.01,
    why: Callable[[], str] = str,
) -> float:
    """Seconds until it holds. On a busy machine that may be long after it was brought about.

    why: what may explain that it does not, asked for when the time is over.
    """
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"not in {timeout_s:g} s {why()}"
        time.sleep(every_s)
    return time.monotonic() - began
