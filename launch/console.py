"""What the launcher prints: progress while it loads, what it serves, one line for what it refuses.

command line -> [begin] -> environment of all processes
server.py, serve.py -> [Progress], [warn], [refuse] -> text, or lines of JSON
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence

from sgl_esft import env
from sgl_esft.observe import console
from sgl_esft_launch.arguments import last_value

_TICK_S = 1.0
_CLEAR = "\r\x1b[2K"
_LOUD = frozenset({"info", "debug"})


def begin(argv: Sequence[str]) -> None:
    """From the raw command line: how this process and all that it starts print. First of all."""
    is_json = last_value(argv, "--log-format") == "json"
    os.environ[env.LOG_FORMAT] = "json" if is_json else "text"
    os.environ[env.QUIET] = "0" if is_verbose(argv) else "1"
    console.begin()


def is_verbose(argv: Sequence[str]) -> bool:
    """Whether all is to be shown that SGLang and its libraries say. A --config file may ask too."""
    level = last_value(argv, "--log-level")
    if level is None and last_value(argv, "--config") is not None:
        return True
    return "--verbose" in argv or (level or "").lower() in _LOUD


def level_argv(argv: Sequence[str]) -> tuple[str, ...]:
    """SGLang logs warnings unless told otherwise; the line of each request stays with JSON."""
    if last_value(argv, "--log-level") is not None or last_value(argv, "--config") is not None:
        return ()  # SGLang's own, which a command line would overrule
    if is_verbose(argv):
        return ("--log-level", "info")
    wants_requests = _is_json() and last_value(argv, "--log-level-http") is None
    return ("--log-level", "warning", *(("--log-level-http", "info") if wants_requests else ()))


def refuse(error: Exception, program: str = "sgl_esft") -> int:
    """Say why nothing is served. Returns the exit status."""
    _print(f"{program}: {type(error).__name__}: {error}", logging.ERROR)
    return 2


def warn(line: str) -> None:
    """A mistake that does not keep the server from serving."""
    _print(line if _is_json() else f"[sgl-esft] warning: {line}", logging.WARNING)


class Progress:
    """Where a launch is. On a terminal one line that counts seconds, elsewhere a line a stage."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._stage = ""
        self._ended = threading.Event()
        self._live = sys.stdout.isatty() and not _is_json()
        if self._live:
            threading.Thread(target=self._tick, name="progress", daemon=True).start()

    def stage(self, text: str) -> None:
        """It has come so far."""
        self._stage = text
        if self._live:
            self._draw()
        else:
            say(text)

    def ready(self, lines: Iterable[str]) -> None:
        """The server serves; `lines` say what."""
        self.end()
        say(f"3/3 ready after {time.monotonic() - self._started:.0f} s")
        for line in lines:
            _print(f"  {line}", to=sys.stdout)

    def end(self) -> None:
        """No line is updated any more."""
        if self._live and not self._ended.is_set():
            self._ended.set()
            sys.stdout.write(_CLEAR)
            sys.stdout.flush()

    def _tick(self) -> None:
        while not self._ended.wait(_TICK_S):
            self._draw()

    def _draw(self) -> None:
        seconds = time.monotonic() - self._started
        line = f"[sgl-esft] {self._stage} ({seconds:.0f} s)"
        sys.stdout.write(_CLEAR + line[: _columns() - 1])
        sys.stdout.flush()


def say(line: str) -> None:
    """A line of progress."""
    _print(line if _is_json() else f"[sgl-esft] {line}", to=sys.stdout)


def _print(line: str, level: int = logging.INFO, to: object = None) -> None:
    if _is_json():
        from sgl_esft.observe.json_logs import line_of

        line = line_of(line.strip(), level)
    print(line, file=to or sys.stderr, flush=True)  # type: ignore[arg-type]


def _is_json() -> bool:
    return os.environ.get(env.LOG_FORMAT) == "json"


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except OSError:
        return 80
