"""Several servers at once on one GPU, for the steps of bench/gpu that compare them.

name -> arguments --[held]--> all start together, all end together
                              -> URL of each that came up, and of each other one why it did not
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from sgl_esft.zoo import serving

SPARE_SECONDS = 45.0  # of a step, to ask the servers, end them and write
_SAID = 3000  # characters of what a server said that did not come up


@dataclass(frozen=True)
class Held:
    """By name: URLs of those that are up; of the others the end of what they said."""

    urls: Mapping[str, str]
    failed: Mapping[str, str]


@contextmanager
def held(commands: Mapping[str, Sequence[str]], wait_seconds: float) -> Iterator[Held]:
    """The launcher's arguments by name. An error of the context has, of each server that had ended
    by then, what it said.
    """
    ended: Future[None] = Future()
    opened: dict[str, Future[str]] = {name: Future() for name in commands}
    with ThreadPoolExecutor(max(1, len(commands))) as pool:
        for name, arguments in commands.items():
            pool.submit(_hold, arguments, wait_seconds, opened[name], ended)
        try:
            errors = {name: each.exception() for name, each in opened.items()}
            failed = {n: str(error)[-_SAID:] for n, error in errors.items() if error is not None}
            urls = {n: each.result() for n, each in opened.items() if n not in failed}
            yield Held(urls, failed)
        except BaseException as error:
            ended.set_exception(error)
            raise
        ended.set_result(None)


def _hold(
    arguments: Sequence[str], seconds: float, opened: Future[str], ended: Future[None]
) -> None:
    try:
        with serving.server(arguments, seconds) as url:
            opened.set_result(url)
            ended.result()  # an error of the caller's goes through here: serving.server adds to it
    except Exception as error:  # whatever it is, `held` waits to be told
        if opened.done():
            raise
        opened.set_exception(error)


def wait_seconds(most: float) -> float:
    """For servers to come up: so that a step ends before it is ended, its servers with it."""
    return max(1.0, min(most, float(os.environ.get("BENCH_STEP_SECONDS", "600")) - SPARE_SECONDS))
