"""Logs as JSON, a line each, for --log-format json.

    SGLang's, uvicorn's and our loggers -> [JsonFormatter] -> standard error
    middleware.py, a request has ended  -> [AccessLog] ----->

In text, the default, SGLang's and uvicorn's own lines stand. No line has a prompt, an answer or a
key in it, unless SGLang's --log-requests asks for them.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from sgl_esft.http import record

ACCESS_LOGGER: Final = "sgl_esft.access"
_FIELDS: Final = "esft_fields"  # attribute of a log record: more keys of its line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, process, and what belongs to them."""

    def __init__(self, prefix: str = "", **_: Any) -> None:
        """prefix: SGLang's name of a rank, such as ` TP0`; other formatters' options: ignored."""
        super().__init__()
        self._rank = prefix.strip()

    def format(self, record_: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record_.created, UTC).isoformat(timespec="milliseconds"),
            "level": record_.levelname,
            "logger": record_.name,
            "message": record_.getMessage(),
            "process": record_.process,
        }
        if self._rank:
            line["rank"] = self._rank
        request = record.current()
        if request is not None:
            line["request_id"] = request.request_id
        line |= getattr(record_, _FIELDS, {})
        if record_.exc_info:
            line["exception"] = self.formatException(record_.exc_info)
        return json.dumps(line, default=str)


class AccessLog:
    """A line for each request, on a logger of its own."""

    def __init__(self, level: int) -> None:
        """level: the HTTP server's; lines are written at INFO."""
        self._logger = logging.getLogger(ACCESS_LOGGER)
        self._logger.setLevel(level)
        self._logger.propagate = False
        if not self._logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(JsonFormatter())
            self._logger.addHandler(handler)

    def write(self, method: str, path: str, status: int | None, **fields: Any) -> None:
        """`status` None: nothing was answered."""
        fields = {"method": method, "path": path, "status": status, **fields}
        self._logger.info("%s %s %s", method, path, status, extra={_FIELDS: fields})


# ---- every process, with --log-format json ----


def begin() -> None:
    """Before SGLang is imported: what is said until it sets up logging, and what ends a thread."""
    if not logging.getLogger().handlers:
        logging.getLogger().addHandler(logging.StreamHandler())
    format_as_json()
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda args: _log_uncaught(
        args.exc_type, args.exc_value, args.exc_traceback
    )


def format_as_json(prefix: str = "") -> None:
    """The lines that this process's handlers write from now on, warnings among them."""
    logging.captureWarnings(True)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter(prefix))


def line_of(message: str, level: int = logging.INFO) -> str:
    """A line that no logger writes: the launcher's progress, and what it refuses."""
    fields = {"name": "sgl_esft", "levelname": logging.getLevelName(level), "msg": message}
    return JsonFormatter().format(logging.makeLogRecord({**fields, "process": os.getpid()}))


def _log_uncaught(kind: type[BaseException], error: Any, traceback: Any) -> None:
    logging.getLogger("sgl_esft").critical("uncaught", exc_info=(kind, error, traceback))


# ---- hooks of SGLang's, with --log-format json ----


def use_json(result: None, server_args: Any, prefix: str = "") -> None:
    """After SGLang has set up a process's logging: the same lines, as JSON."""
    format_as_json(prefix)


def use_json_while_resolving(result: Any, argv: Any) -> None:
    """After SGLang has parsed a command line, for which it sets up logging too."""
    format_as_json()


def start_loop_for_nobody(original: Callable[[Any], None], manager: Any) -> None:
    """Around SGLang's start of the loop that reads the engine's outputs, by the first request."""
    record.run_for_nobody(lambda: original(manager))


def use_json_in_uvicorn(result: None, server_args: Any = None) -> None:
    """After SGLang has set up uvicorn's logging. Our access lines take the place of uvicorn's."""
    from uvicorn.config import LOGGING_CONFIG

    formatter = {"()": f"{__name__}.JsonFormatter"}
    LOGGING_CONFIG["formatters"].update(default=formatter, access=formatter)
    LOGGING_CONFIG["loggers"]["uvicorn.access"] = {"handlers": [], "propagate": False}
