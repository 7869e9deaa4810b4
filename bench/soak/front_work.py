"""Work on a client's text in the process that serves HTTP: seconds, and growth with the text.

    python -m bench.soak.front_work --unit 100

    each piece of work at sizes n, 2n, 4n -> seconds, exponent (1: linear) -> front_work.json

Without its time limits (sgl_esft/http/time_limit.py), which are there for what is above 1 here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.common.record import RESULTS, write_result
from sgl_esft import zoo

SCALES = (1, 2, 4)
BEAT_S = 0.005
PARSED = {  # a parser of tool calls: what is repeated to it
    "hunyuan": "<tool_calls><tool_call>",
    "qwen25": "<tool_call>\n",
    "qwen3_coder": "<tool_call>",
    "glm45": "<tool_call>",
    "lfm2": "<|tool_call_start|>",
    "poolside_v1": "<tool_call>",
}


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def exponent(seconds: list[float]) -> float:
    """Of the size, from n to 4n."""
    return math.log2(seconds[-1] / seconds[0]) / 2


def parse(parser: str, size: int) -> float:
    """A whole answer."""
    made, text = _parser(parser), PARSED[parser] * size
    return _seconds(lambda: _tried(made.parse_non_stream, text))


def parse_stream(parser: str, size: int) -> float:
    """An answer that comes in pieces."""
    made = _parser(parser)
    return _seconds(lambda: [_tried(made.parse_stream_chunk, PARSED[parser]) for _ in range(size)])


def _parser(parser: str) -> Any:
    from sglang.srt.entrypoints.openai.protocol import Function, Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    return FunctionCallParser([Tool(function=Function(name="f", parameters={}))], parser)


def _tried(function: Callable[[str], object], text: str) -> None:
    try:
        function(text)
    except Exception as error:  # noqa: BLE001
        print(f"  raised {type(error).__name__}")


def reason(size: int) -> float:
    """A whole answer, of a reasoning parser."""
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    return _seconds(lambda: ReasoningParser("qwen3").parse_non_stream("<think></think>" * size))


def check_schema(size: int) -> float:
    """The properties of one tool."""
    from jsonschema import Draft202012Validator

    schema = {"properties": {f"p{number}": {"type": "string"} for number in range(size)}}
    return _seconds(lambda: Draft202012Validator.check_schema(schema))


def render(size: int) -> float:
    """The demo's chat template, of `size` messages."""
    messages = [{"role": "user", "content": "coffee"}] * size
    return _seconds(lambda: _tokenizer().apply_chat_template(messages, tokenize=False))


def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(zoo.base_path()))


def stall(size: int, *, in_thread: bool) -> float:
    """How long the event loop stands still while `size` characters are tokenized."""
    tokenizer, text = _tokenizer(), "coffee " * (size // 7)
    return asyncio.run(_stall(lambda: tokenizer([text]), in_thread))


async def _stall(work: Callable[[], object], in_thread: bool) -> float:
    worst, over = 0.0, asyncio.Event()

    async def beat() -> None:
        nonlocal worst
        while not over.is_set():
            started = time.perf_counter()
            await asyncio.sleep(BEAT_S)
            worst = max(worst, time.perf_counter() - started - BEAT_S)

    beating = asyncio.create_task(beat())
    await asyncio.sleep(BEAT_S)
    if in_thread:
        await asyncio.to_thread(work)
    else:
        work()
    await asyncio.sleep(BEAT_S)
    over.set()
    await beating
    return worst


def pieces(unit: int) -> Mapping[str, tuple[int, Callable[[int], float]]]:
    """What is measured: its smallest size and its seconds by size."""
    found: dict[str, tuple[int, Callable[[int], float]]] = {
        "tokenize: stall on the event loop": (5000 * unit, lambda n: stall(n, in_thread=False)),
        "tokenize: stall with a thread": (5000 * unit, lambda n: stall(n, in_thread=True)),
        "check a tool's schema": (5 * unit, check_schema),
        "render a chat template": (100 * unit, render),
        "parse reasoning qwen3": (100 * unit, reason),
    }
    for name in PARSED:
        found[f"parse tool calls {name}"] = (10 * unit, lambda n, name=name: parse(name, n))
        found[f"parse stream {name}"] = (5 * unit, lambda n, name=name: parse_stream(name, n))
    return found


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--unit", type=int, default=100, help="all sizes are multiples of it")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the result file")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    for name, (size, measure) in pieces(options.unit).items():
        measure(size)  # imports, first uses
        seconds = [measure(scale * size) for scale in SCALES]
        result[name] = {"size": size, "seconds": seconds, "exponent": exponent(seconds)}
        print(name, json.dumps(result[name]), flush=True)
    print(write_result("front_work", {"work": result}, folder=options.out))


if __name__ == "__main__":
    main()
