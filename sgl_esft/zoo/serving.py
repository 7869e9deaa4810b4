"""Real servers for `evaluate`: start one as a subprocess, ask it, end all of its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sgl_esft.ports import pick_free_port

START_SECONDS = 300.0
ANSWER_SECONDS = 900.0
MAX_NEW_TOKENS = 48

# float32 so that rounding near ties decides nothing; without a bound on the KV cache every
# server takes most of the machine's memory.
_COMMON = ("--dtype", "float32", "--max-total-tokens", "32768", "--log-level", "warning")


class ServerError(Exception):
    """A server did not come up, or answered in a way it should not."""


def woven_arguments(base: Path, adapters: Mapping[str, Path]) -> list[str]:
    """Launcher arguments for `base` with all `adapters` woven in."""
    named = [f"{name}={folder}" for name, folder in adapters.items()]
    return ["--model-path", str(base), *_COMMON, "--esft-adapters", *named]


def merged_arguments(merged: Path) -> list[str]:
    """Launcher arguments for a plain model: the same launcher, without weaving."""
    return ["--model-path", str(merged), *_COMMON, "--no-esft"]


@contextmanager
def server(
    arguments: Sequence[str],
    start_seconds: float = START_SECONDS,
    checkout: Path | None = None,
) -> Iterator[str]:
    """The URL of a healthy server, alive for as long as the context is open.

    `checkout`: another one of this repository, set up, whose server it is.

    Raises ServerError, with the end of the server's output, where it does not come up. If it ends
    while the context is open, an error of the context has that output as a note.
    """
    port = pick_free_port()
    python = sys.executable if checkout is None else str(checkout / ".venv/bin/python")
    command = [python, "-m", "sgl_esft.launch_server", *arguments, "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True, cwd=checkout
        )
        try:
            url = f"http://127.0.0.1:{port}"
            if not _wait_healthy(url, process, start_seconds):
                raise ServerError(f"no server after `{' '.join(command)}`:\n{_tail(log.fileno())}")
            yield url
        except Exception as error:
            if process.poll() is not None:
                error.add_note(
                    f"the server ended with {process.returncode}:\n{_tail(log.fileno())}"
                )
            raise
        finally:
            _end_group(process)


def generate(
    url: str, prompts: Sequence[str], adapters: Sequence[str | None], batch: int = 256
) -> list[str]:
    """Greedy answers to `prompts`, each by its adapter, or by the base where that is None."""
    answers: list[str] = []
    # A server without adapters refuses even a list of Nones.
    named = any(adapter is not None for adapter in adapters)
    for start in range(0, len(prompts), batch):
        reply = post(
            f"{url}/generate",
            {
                "text": list(prompts[start : start + batch]),
                "lora_path": list(adapters[start : start + batch]) if named else None,
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": MAX_NEW_TOKENS,
                    "stop": ["\n"],
                },
            },
        )
        if not isinstance(reply, list):
            raise ServerError(f"{url} answered a list of prompts with {str(reply)[:200]}")
        answers += [str(item["text"]) for item in reply]
    return answers


def post(url: str, body: Mapping[str, object]) -> Any:
    """The answer to a request. Raises ServerError for a status that is no success."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        detail = error.read().decode(errors="replace")[:500]
        raise ServerError(f"{url} answered {error.code}: {detail}") from error


def _wait_healthy(url: str, process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether the server answers 200 at /health before it dies or `seconds` pass."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
                if response.status == 200:
                    return True
        except OSError:
            pass  # not listening yet, or still loading
        time.sleep(0.5)
    return False


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the server and every process it started; its session is its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _tail(log: int, size: int = 4000) -> str:
    """The last `size` bytes of the file behind descriptor `log`."""
    end = os.lseek(log, 0, os.SEEK_END)
    return os.pread(log, size, max(0, end - size)).decode(errors="replace")
