"""SGLang's bench client, with a line for each of its requests: who asked what, when, what came.

    python -m bench.common.recorded_client --record FILE --seconds S [--fold NAME.. --fold-s S]
                                    [the options of sglang.bench_serving]
      SGLang's own loop: data set, rate, concurrency, which adapter comes next
        -> [recorded] -> its async_request_sglang_generate -> server
               +-> FILE, a JSON object a line -> [read_requests] -> Request

The client does not say which adapter a request named or when it began, which the checks need. After
S seconds it sends nothing more, so that a run has a length and not a number of requests. With
--fold, every second span of a run asks for these adapters in turn, whatever the client chose.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any, TextIO

import sgl_esft  # noqa: F401  # comes before SGLang: it prepares for its imports

ANSWER_TIMEOUT_S = 120.0
NOT_SENT = "not sent: the run's time was over"


@dataclass(frozen=True)
class Request:
    """One request and its answer. Times in seconds of the monotonic clock."""

    adapter: str | None
    prompt: str
    began_s: float
    ended_s: float
    token_s: tuple[float, ...]  # when each token came; empty where it failed
    text: str
    error: str  # empty = answered

    @property
    def wait_s(self) -> float:
        """Until the first token."""
        return self.token_s[0] - self.began_s


def read_requests(path: Path) -> list[Request]:
    """In the order of their ends. Raises ValueError for a line that is no record."""
    with path.open() as lines:
        return [_from_json(json.loads(line)) for line in lines]


def _from_json(found: Mapping[str, Any]) -> Request:
    try:
        return Request(**{**found, "token_s": tuple(found["token_s"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a record of a request: {found}") from error


def record_of(asked: Any, answer: Any, began_s: float, ended_s: float) -> Request:
    """From SGLang's RequestFuncInput and RequestFuncOutput."""
    gaps = (answer.ttft, *answer.itl) if answer.ttft else ()
    error = str(answer.error)[-800:]  # also of a stream that ended with one, a success to SGLang
    if not error and not (answer.success and gaps):
        error = "an answer without text" if answer.success else "no reason given"
    return Request(
        adapter=asked.lora_name or None,
        prompt=asked.prompt,
        began_s=began_s,
        ended_s=ended_s,
        token_s=tuple(began_s + seconds for seconds in accumulate(gaps)),
        text=answer.generated_text,
        error=error,
    )


Send = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class Fold:
    """Adapters that every second span asks for instead; spans are counted from `start_s`."""

    start_s: float
    span_s: float
    names: Sequence[str] = ()

    def is_folded(self, at_s: float) -> bool:
        return bool(self.names) and int((at_s - self.start_s) / self.span_s) % 2 == 1


def recorded(
    send: Send, failed: Callable[[Any, str], Any], file: TextIO, until_s: float, fold: Fold
) -> Send:
    """`send`, with a record of each request, and nothing sent from `until_s` on.

    failed: what SGLang takes for the answer of a request that failed.
    """
    instead = cycle(fold.names)

    async def one(request_func_input: Any, pbar: Any = None) -> Any:
        began_s = time.monotonic()
        if began_s >= until_s:
            return failed(request_func_input, NOT_SENT)
        if fold.is_folded(began_s):
            request_func_input.lora_name = next(instead)
        try:
            sent = send(request_func_input=request_func_input, pbar=pbar)
            answer = await asyncio.wait_for(sent, ANSWER_TIMEOUT_S)
        except TimeoutError:
            answer = failed(request_func_input, f"no answer in {ANSWER_TIMEOUT_S:.0f} s")
        record = record_of(request_func_input, answer, began_s, time.monotonic())
        file.write(json.dumps(vars(record)) + "\n")
        return answer

    return one


def noting_errors(note: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """SGLang's note of each event of a stream, and of the error that an event tells.

    Once a stream has begun there is no status left to tell it by; the client drops it.
    """

    def both(data: Any, output: Any) -> None:
        note(data, output)
        if data.get("error"):
            output.error = json.dumps(data["error"])

    return both


def _failed(asked: Any, reason: str) -> Any:
    from sglang.benchmark.serving import RequestFuncOutput

    answer = RequestFuncOutput.init_new(asked)
    answer.success, answer.error = False, reason
    return answer


def main(arguments: Sequence[str] | None = None) -> None:
    """Run SGLang's command with what is not ours of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="since the first request")
    parser.add_argument("--fold", nargs="*", default=(), metavar="NAME")
    parser.add_argument("--fold-s", type=float, default=8.0, help="length of a span")
    options, theirs = parser.parse_known_args(arguments)
    from sglang.benchmark import serving

    serving._record_server_prompt_len = noting_errors(serving._record_server_prompt_len)
    send = serving.ASYNC_REQUEST_FUNCS["sglang"]
    with options.record.open("w", buffering=1) as file:
        serving.ASYNC_REQUEST_FUNCS["sglang"] = _Sender(send, file, options)
        sys.argv = ["sglang.bench_serving", *theirs]
        serving.cli_main()


class _Sender:
    """`recorded` whose time begins with its first request: SGLang prepares for a while before."""

    def __init__(self, send: Send, file: TextIO, options: argparse.Namespace) -> None:
        self._send, self._file, self._options = send, file, options
        self._recorded: Send | None = None

    async def __call__(self, request_func_input: Any, pbar: Any = None) -> Any:
        if self._recorded is None:
            now_s = time.monotonic()
            fold = Fold(now_s, self._options.fold_s, self._options.fold)
            until_s = now_s + self._options.seconds
            self._recorded = recorded(self._send, _failed, self._file, until_s, fold)
        return await self._recorded(request_func_input=request_func_input, pbar=pbar)


if __name__ == "__main__":
    main()
