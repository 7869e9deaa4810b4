"""Launches that are refused, each in a process of its own that finds SGLang imported already.

    argv -> [refusal_of] -> child of a fork server -> sgl_esft_launch.server.main -> status, stderr

A dozen seconds of imports are paid once for all of them. A launch that is not refused would serve:
the time limit ends it, and the test is red.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

TIMEOUT_S = 120.0

_server = multiprocessing.get_context("forkserver")
_IMPORTED = (__name__, "sgl_esft.plugin.register", "sgl_esft_launch.serve")
_SGLANGS = ("sglang.srt.managers.scheduler", "sglang.srt.entrypoints.http_server")
_server.set_forkserver_preload([*_IMPORTED, *_SGLANGS])


class Refusal(NamedTuple):
    """How a launch has ended."""

    status: int
    stderr: str


def refusal_of(argv: Sequence[str], env: Mapping[str, str], log_path: Path) -> Refusal:
    """Launch, and wait for the end. Raises TimeoutError if it goes on instead."""
    reader, writer = _server.Pipe(duplex=False)
    child = _server.Process(target=_launch, args=(tuple(argv), dict(env), log_path, writer))
    child.start()
    writer.close()
    try:
        if not reader.poll(TIMEOUT_S):
            raise TimeoutError(f"{argv} still runs after {TIMEOUT_S:g} s")
        status = reader.recv()
    finally:
        child.kill()
        child.join()
    with log_path.open() as log:
        return Refusal(status, log.read())


def _launch(
    argv: Sequence[str], env: Mapping[str, str], log_path: Path, writer: Connection
) -> None:
    from sgl_esft_launch import server

    os.environ.update(env)
    with log_path.open("w") as log, contextlib.redirect_stderr(log):
        try:
            status = server.main(argv)
        except SystemExit as end:  # argparse's
            status = int(end.code or 0)
    writer.send(status)
