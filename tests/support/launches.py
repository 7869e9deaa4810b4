"""Launches that are refused, each in a process of its own that finds SGLang imported already.

    argv -> [refusal_of] -> child of a fork server -> sgl_esft_launch.server.main -> status, stderr
    argvs -> [verdicts_on] -> one such child -> what each is refused with, as far as resolving

A dozen seconds of imports are paid once for all of them. A launch that is not refused would serve:
the time limit ends it, and the test is red.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

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
    status = _in_child(_launch, tuple(argv), dict(env), log_path)
    with log_path.open() as log:
        return Refusal(status, log.read())


def verdicts_on(
    argvs: Sequence[Sequence[str]], facts: Mapping[str, bool] | None = None
) -> list[str]:
    """Of each command line "Error: message", or "" if it would start; nothing is started.

    They are planned, parsed by SGLang and resolved by it, one after the other. `facts` are what
    SGLang is to believe of the machine's GPU, such as is_sm100.
    """
    found: list[str] = _in_child(_judge_all, [tuple(argv) for argv in argvs], dict(facts or {}))
    return found


def _in_child(run: Callable[..., Any], *arguments: Any) -> Any:
    reader, writer = _server.Pipe(duplex=False)
    child = _server.Process(target=_run, args=(writer, run, arguments))
    child.start()
    writer.close()
    try:
        if not reader.poll(TIMEOUT_S):
            raise TimeoutError(f"{arguments} still runs after {TIMEOUT_S:g} s")
        return reader.recv()
    finally:
        child.kill()
        child.join()


def _run(writer: Connection, run: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    writer.send(run(*arguments))


def _launch(argv: Sequence[str], env: Mapping[str, str], log_path: Path) -> int:
    from sgl_esft_launch import server

    os.environ.update(env)
    with log_path.open("w") as log, contextlib.redirect_stderr(log):
        try:
            return server.main(argv)
        except SystemExit as end:  # argparse's
            return int(end.code or 0)


def _judge_all(argvs: Sequence[Sequence[str]], facts: Mapping[str, bool]) -> list[str]:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import override_platform

    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
        load_plugins()
        with override_platform(**facts):
            return [_judge(argv) for argv in argvs]


def _judge(argv: Sequence[str]) -> str:
    from sgl_esft_launch import elastic, flags, plan, resolved, serve

    try:
        if "--elastic" in argv:
            launch, also = elastic.plan_elastic(argv).launch, resolved.ELASTIC
        else:
            launch, also = plan.plan_launch(*flags.parse(argv)), ()
        os.environ.update(launch.environment)
        serve.resolve(launch, also)
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- SGLang's own is a verdict too
        return f"{type(error).__name__}: {error}"
    return ""
