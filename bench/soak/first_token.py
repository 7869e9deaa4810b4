"""Time to the first token, with keys on: this checkout and another one, side by side.

    python -m bench.soak.first_token --other CHECKOUT --starts 6 --pairs 60

    both demo servers --short streamed /generate, a named adapter, a restricted key--> first event
    in turns (pairing.py) -> medians, quartiles, ratios of each pair -> first_token.json

Each server runs from its own checkout with its own .venv, so that a change to what stands before
SGLang is measured as a client sees it, on a machine that both share. One prompt of each pair goes
to both; no two pairs have the same. Which server is started first is worth some percent, so both
are started again and again, in turns: a checkout over itself is 1.00 then, and over all of one
start's pairs it was not.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import requests

from bench.common.load import NO_PREFIX_CACHE, START_SECONDS, end_on_sigterm
from bench.common.pairing import Taken, interleave, ratios
from bench.common.record import RESULTS, spread, write_result
from sgl_esft.ports import pick_free_port

HERE = Path(__file__).resolve().parents[2]
ADAPTER = "reverse"
KEY = "first-token-key-0123456789"
KEYS = {"keys": [{"name": "bench", "key": KEY, "adapters": [ADAPTER], "base_model": False}]}
WARM_UP = 4  # pairs that do not count
ANSWER_SECONDS = 60.0


class ServedError(Exception):
    """A server did not come up."""


@contextmanager
def served(checkout: Path, keys_file: Path) -> Iterator[str]:
    """The URL of a demo server of a checkout, for as long as the context is open."""
    port = pick_free_port()
    command = [
        *(str(checkout / ".venv/bin/python"), "-m", "sgl_esft.launch_server"),
        *("--port", str(port), "--api-keys-file", str(keys_file), "--log-level", "warning"),
        *NO_PREFIX_CACHE,
    ]
    process = subprocess.Popen(
        command, cwd=checkout, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(url, process)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if requests.get(f"{url}/readyz", timeout=5).ok:
                return
        except requests.ConnectionError:
            pass
        time.sleep(0.2)
    raise ServedError(f"no server at {url}")


def first_token(url: str, session: requests.Session, numbers: Iterator[int]) -> Taken:
    """Seconds from a request to the first event of its answer; of the client's processor too."""
    body: dict[str, Any] = {
        "text": f"word{next(numbers)} -> ",
        "adapter": ADAPTER,
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 4},
    }
    headers = {"Authorization": f"Bearer {KEY}"}
    wall, cpu = time.perf_counter(), time.process_time()
    with session.post(
        f"{url}/generate", json=body, headers=headers, stream=True, timeout=ANSWER_SECONDS
    ) as answer:
        answer.raise_for_status()
        lines = answer.iter_lines(chunk_size=1)
        event = next(lines)
        taken = Taken(time.perf_counter() - wall, time.process_time() - cpu)
        if not event.startswith(b"data: ") or b'"error"' in event:
            raise ServedError(f"{url}: {event[:200]!r}")
        for _ in lines:  # to its end, so that the next request meets an idle server
            pass
    return taken


def main() -> None:
    """Measure, print and record."""
    end_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--other", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--pairs", type=int, default=60, help="of each start")
    parser.add_argument("--starts", type=int, default=6, help="of both servers, an even number")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the result file")
    options = parser.parse_args()
    checkouts = {"this": HERE, "other": options.other.resolve()}
    taken: dict[str, list[Taken]] = {name: [] for name in checkouts}
    for start in range(options.starts):
        order = list(checkouts) if start % 2 == 0 else list(reversed(checkouts))
        found = pairs_of_one_start({name: checkouts[name] for name in order}, options.pairs)
        for name in checkouts:
            taken[name] += found[name]
    seconds = {name: spread([each.wall for each in found]) for name, found in taken.items()}
    ratio = ratios(taken["this"], taken["other"])["wall"]
    for name, found in (*seconds.items(), ("this / other", ratio)):
        print(name, " ".join(f"{key} {value:.4f}" for key, value in found.items()))
    figures = {
        "num_starts": options.starts,
        "num_pairs": options.pairs,
        "first_token_s": seconds,
        "ratio": ratio,
    }
    print(write_result("first_token", figures, folder=options.out))


def pairs_of_one_start(checkouts: Mapping[str, Path], num_pairs: int) -> dict[str, list[Taken]]:
    """Both servers started in this order; the time of each one's answers, pair by pair."""
    with ExitStack() as until:
        keys_file = Path(until.enter_context(tempfile.TemporaryDirectory())) / "keys.json"
        keys_file.write_text(json.dumps(KEYS))
        keys_file.chmod(0o600)
        runs = {}
        for name, checkout in checkouts.items():
            url = until.enter_context(served(checkout, keys_file))
            session = until.enter_context(requests.Session())
            runs[name] = functools.partial(first_token, url, session, count())
        return interleave(runs, num_pairs, warm_up=WARM_UP)


if __name__ == "__main__":
    main()
