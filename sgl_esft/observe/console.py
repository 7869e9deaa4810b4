"""What a process of the server prints: third parties' notices of every start are left out by name.

    launcher -> environment -> every process, when it imports sgl_esft: [begin] -> SGLang's imports

Nothing is hidden with --verbose or --log-level info, and what is not in these tables is printed.
Progress bars are drawn on a terminal only; with JSON not there either, since none is an object.
A log on a full disk loses lines; no process ends for it.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from functools import wraps
from typing import Any, Final, TextIO

from sgl_esft import env

# How messages begin that say the same of every server, or of every one without CUDA.
WARNINGS: Final = (
    "Only CUDA, HIP and XPU support AWQ",
    "Only CUDA, MUSA and NPU support GGUF",
    "ORJSONResponse is deprecated",
    "Triton is not supported on current platform",
)
# Logger -> how its lines begin, as its source has them.
LOG_LINES: Final = {
    "sglang.kernels.jit.utils.arch": "Cannot detect CUDA architecture",
    "sglang.srt.arg_groups.attention_hook": "Cuda graph is disabled because of using torch native",
    "sglang.srt.arg_groups.serving_hook": "SGLANG_USE_CUDA_IPC_TRANSPORT is deprecated",
    "sglang.srt.distributed.bootstrap": "init_cpu_threads_env and shared memory based AllReduce",
    "sglang.srt.managers.multimodal_processor": "Ignore import error when loading",
    "sglang.srt.models.registry": "Ignore import error when loading",
    "sglang.srt.platforms.interface": "%s.%s() is deprecated and will be removed",
    "sglang.srt.utils.common": "Fail to set RLIMIT_NOFILE",
}
# The same for lines whose tracebacks say what is wrong with a client's body, at any length.
CLIENTS_FAULTS: Final = {
    "sglang.srt.entrypoints.openai.serving_responses": "Error in preprocessing prompt inputs",
}


def begin() -> None:
    """In every process, before SGLang is imported. Does nothing where no launcher has been."""
    shorten()
    if env.LOG_FORMAT in os.environ:
        outlast_full_disks()
    is_json = os.environ.get(env.LOG_FORMAT) == "json"
    if env.is_quiet():
        silence()
    if is_json or (env.is_quiet() and not sys.stderr.isatty()):
        stop_bars()
    if is_json:
        from sgl_esft.observe import json_logs

        json_logs.begin()


def outlast_full_disks() -> None:
    """From now on no line is worth a process: what cannot be written is lost, and nothing else."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Outlasting):
            setattr(sys, name, _Outlasting(stream))


def silence() -> None:
    """Leave out what the tables name."""
    for start in WARNINGS:
        warnings.filterwarnings("ignore", message=start)
    for name, start in LOG_LINES.items():
        logger = logging.getLogger(name)
        if not any(isinstance(each, _NotBeginning) for each in logger.filters):
            logger.addFilter(_NotBeginning(start))


def stop_bars() -> None:
    """No progress bar from now on, whatever its caller asks: SGLang's ask to be drawn anywhere.

    In tqdm itself: SGLang, transformers and huggingface_hub each draw theirs by a name, or a
    subclass, of their own.
    """
    from tqdm.std import tqdm

    original = tqdm.__init__
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def disabled(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **{**options, "disable": True})

    tqdm.__init__ = disabled


def refusal(program: str, error: Exception, logger: logging.Logger) -> SystemExit:
    """What a process is to end with that must not serve; the log has the reason.

    Python prints a SystemExit's text, for where the log is not seen; a log of JSON stays that.
    """
    reason = f"{program} refuses to serve: {type(error).__name__}: {error}"
    logger.critical(reason)
    return SystemExit(1 if os.environ.get(env.LOG_FORMAT) == "json" else reason)


def shorten() -> None:
    """A client's fault is one line, so that no client fills the disk, nor the log with its text."""
    for name, start in CLIENTS_FAULTS.items():
        logger = logging.getLogger(name)
        if not any(isinstance(each, _WithoutTraceback) for each in logger.filters):
            logger.addFilter(_WithoutTraceback(start))


class _Outlasting:
    """A text stream of which a full disk, or a reader that has gone, is no error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _WithoutTraceback(logging.Filter):
    """The class of the error stays."""

    def __init__(self, start: str) -> None:
        super().__init__()
        self._start = start

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and str(record.msg).startswith(self._start):
            kind = record.exc_info[0]
            record.msg = f"{record.msg}: {kind.__name__ if kind else 'unknown'}"
            record.exc_info = record.exc_text = None
        return True


class _NotBeginning(logging.Filter):
    """Stays on its logger whatever handlers SGLang sets up later."""

    def __init__(self, start: str) -> None:
        super().__init__()
        self._start = start

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self._start)
