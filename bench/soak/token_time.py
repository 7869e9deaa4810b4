"""Time for an output token (TPOT), base and one adapter: this checkout and another, side by side.

    python -m bench.soak.token_time --other CHECKOUT --pairs 24

    both demo servers --one streamed /generate at a time--> (last event - first event) / tokens
    in turns (pairing.py) -> medians, quartiles, ratios of each pair -> token_time.json

Each server runs from its own checkout with its own .venv, as in first_token.py, so that a change of
what a decode step does is measured as a client sees it, on a machine that both share.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import requests

from bench.common.load import end_on_sigterm
from bench.common.pairing import Taken, interleave, ratios
from bench.common.record import RESULTS, spread, write_result
from bench.soak.first_token import ADAPTER, ANSWER_SECONDS, HERE, KEY, WARM_UP, ServedError, served

KEYS = {"keys": [{"name": "bench", "key": KEY, "adapters": [ADAPTER], "base_model": True}]}
NUM_TOKENS = 96
GOAL = 1.01  # a change may cost a token at most 1%


def token_time(
    url: str, session: requests.Session, adapter: str | None, numbers: count[int]
) -> Taken:
    """Seconds between two tokens of an answer, and of the client's processor between them."""
    body: dict[str, Any] = {
        "text": f"word{next(numbers)} -> ",
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True},
    } | ({} if adapter is None else {"adapter": adapter})
    headers = {"Authorization": f"Bearer {KEY}"}
    with session.post(
        f"{url}/generate", json=body, headers=headers, stream=True, timeout=ANSWER_SECONDS
    ) as answer:
        answer.raise_for_status()
        events = (line for line in answer.iter_lines(chunk_size=1) if line.startswith(b"data: {"))
        first = json.loads(next(events)[len("data: ") :])
        wall, cpu = time.perf_counter(), time.process_time()
        last = first
        for event in events:
            last = json.loads(event[len("data: ") :])
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    num_tokens = _num_tokens(last) - _num_tokens(first)
    if num_tokens < NUM_TOKENS // 2:
        raise ServedError(f"{url}: {last!r:.200}")
    return Taken(wall / num_tokens, cpu / num_tokens)


def _num_tokens(event: dict[str, Any]) -> int:
    return int(event.get("meta_info", {}).get("completion_tokens", 0))


def main() -> None:
    """Measure, print and record."""
    end_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--other", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the result file")
    options = parser.parse_args()
    figures: dict[str, Any] = {"num_pairs": options.pairs, "goal": GOAL}
    with ExitStack() as until:
        keys_file = Path(until.enter_context(tempfile.TemporaryDirectory())) / "keys.json"
        keys_file.write_text(json.dumps(KEYS))
        keys_file.chmod(0o600)
        checkouts = {"this": HERE, "other": options.other.resolve()}
        urls = {
            name: until.enter_context(served(each, keys_file)) for name, each in checkouts.items()
        }
        for subject, adapter in (("base", None), ("adapter", ADAPTER)):
            runs = {}
            for name, url in urls.items():
                session = until.enter_context(requests.Session())
                runs[name] = functools.partial(token_time, url, session, adapter, count())
            taken = interleave(runs, options.pairs, warm_up=WARM_UP)
            ratio = ratios(taken["this"], taken["other"])["wall"]
            seconds = {name: spread([t.wall for t in found]) for name, found in taken.items()}
            figures[subject] = {"token_s": seconds, "ratio": ratio}
            print(subject, *(f"{key} {value:.4f}" for key, value in ratio.items()))
    print(write_result("token_time", figures, folder=options.out))


if __name__ == "__main__":
    main()
