"""Real servers for tests: started as a user starts them, shared between tests, always stopped.

spec (what to serve) -> ServerPool.get -> Server (HTTP calls) ... pool keeps a few alive
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from sgl_esft.ports import pick_free_port

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 240.0
WEIGHTS_ROUTE = "/update_weights_from_disk"  # off unless it is named
FLUSH_TIMEOUT_S = 60.0
MAX_ALIVE = 3  # a server takes about 2 GB

TP2_EP2 = ("--tp-size", "2", "--ep-size", "2")
DP2_EP2 = (*TP2_EP2, "--attn-dp-size", "2")


@dataclass(frozen=True)
class ServerSpec:
    """A command line of the launcher, less the port."""

    model_path: Path | None = None  # None = the demo zoo
    adapters: tuple[tuple[str, Path], ...] = ()
    args: tuple[str, ...] = ()
    weave: bool = True
    program: tuple[str, ...] = (sys.executable, "-m", "sgl_esft.launch_server")
    cwd: Path = ROOT

    def argv(self, port: int) -> list[str]:
        argv = [*self.program, "--port", str(port)]
        if self.model_path is not None:
            argv += ["--model-path", str(self.model_path)]
        if not self.weave:
            argv += ["--no-esft", "--enable-route", WEIGHTS_ROUTE]
        if self.adapters:
            argv += ["--esft-adapters", *(f"{name}={path}" for name, path in self.adapters)]
        argv += ["--log-level", "warning", "--skip-server-warmup"]
        if "--device-memory" not in self.args:
            argv += ["--max-total-tokens", "32768"]
        return [*argv, *self.args]


class Server:
    """A running server and the calls tests make."""

    def __init__(self, spec: ServerSpec, log_path: Path) -> None:
        self.spec = spec
        self.port = pick_free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(
                spec.argv(self.port), cwd=spec.cwd, stdout=log, stderr=log, start_new_session=True
            )

    def wait_until_ready(self) -> None:
        """Raises RuntimeError, with the end of the log, if the server does not come up."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"server ended with {self.process.returncode}:\n{self.log()}")
            try:
                if requests.get(f"{self.url}/health", timeout=30).status_code == 200:
                    return
            except requests.ConnectionError:
                pass
            time.sleep(0.2)
        raise RuntimeError(f"server not ready after {START_TIMEOUT_S:.0f} s:\n{self.log()}")

    def log(self, num_chars: int = 4000) -> str:
        return self.log_path.read_text(errors="replace")[-num_chars:]

    def stop(self) -> None:
        """End the server and everything it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def post(self, route: str, body: Mapping[str, Any]) -> requests.Response:
        return requests.post(f"{self.url}{route}", json=body, timeout=300)

    def generate(
        self,
        prompts: Sequence[str],
        adapters: Sequence[str | None],
        max_new_tokens: int = 16,
        *,
        body: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> list[dict[str, Any]]:
        """Greedy answers in the prompts' order, all in one call and so batched together."""
        response = self.post(
            "/generate",
            {
                "text": list(prompts),
                "lora_path": list(adapters) if any(adapters) else None,
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": max_new_tokens,
                    "ignore_eos": True,
                    **sampling,
                },
                **(body or {}),
            },
        )
        assert response.status_code == 200, response.text
        answers: list[dict[str, Any]] = response.json()
        return answers

    def token_ids(
        self, prompts: Sequence[str], adapters: Sequence[str | None], max_new_tokens: int = 16
    ) -> list[tuple[int, ...]]:
        answers = self.generate(prompts, adapters, max_new_tokens)
        return [tuple(answer["output_ids"]) for answer in answers]

    def load(self, name: str, path: Path, **fields: Any) -> requests.Response:
        body = {"lora_name": name, "lora_path": str(path), **fields}
        return self.post("/load_lora_adapter", body)

    def unload(self, name: str) -> requests.Response:
        return self.post("/unload_lora_adapter", {"lora_name": name})

    def adapter_names(self) -> list[str]:
        """Loaded adapters as clients see them."""
        models = requests.get(f"{self.url}/v1/models", timeout=30).json()["data"]
        return sorted(model["id"] for model in models if model["parent"])

    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        info = requests.get(f"{self.url}/server_info", timeout=30).json()
        return int(info["max_total_num_tokens"])

    def use_weights(self, model_path: Path) -> None:
        """Replace all weights by another checkpoint's of the same shape (plain SGLang's route).

        The cache is flushed by a call of its own, which waits: an answer reaches its client before
        the scheduler has seen the step after it to an end, and the update's own flush would fail.
        """
        body = {"model_path": str(model_path), "flush_cache": False}
        response = self.post(WEIGHTS_ROUTE, body)
        assert response.status_code == 200, response.text
        assert response.json()["success"], response.text
        flushed = self.post(f"/flush_cache?timeout={FLUSH_TIMEOUT_S}", {})
        assert flushed.status_code == 200, flushed.text


class ServerPool:
    """Servers by spec; starting one too many stops the one used longest ago."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._alive: OrderedDict[ServerSpec, Server] = OrderedDict()
        self._num_started = 0

    def get(self, spec: ServerSpec) -> Server:
        """A ready server for the spec, the same one for the same spec while it lives."""
        server = self._alive.get(spec)
        if server is None or server.process.poll() is not None:
            while len(self._alive) >= MAX_ALIVE:
                self._alive.popitem(last=False)[1].stop()
            server = self._start(spec)
        self._alive[spec] = server
        self._alive.move_to_end(spec)
        return server

    def _start(self, spec: ServerSpec) -> Server:
        self._num_started += 1
        server = Server(spec, self._log_dir / f"server-{self._num_started}.log")
        try:
            server.wait_until_ready()
        except BaseException:
            server.stop()
            raise
        return server

    def stop_all(self) -> None:
        while self._alive:
            self._alive.popitem()[1].stop()


@pytest.fixture(scope="session")
def server_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    pool = ServerPool(tmp_path_factory.mktemp("servers"))
    try:
        yield pool
    finally:
        pool.stop_all()
