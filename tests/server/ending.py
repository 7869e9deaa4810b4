"""Servers that tests end in many ways: their processes, their streams, and how they ended."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import requests

from sgl_esft.health.faults import ProcessState
from sgl_esft.health.processes import descendants, state_of
from tests.support.processes import command_line, family
from tests.support.servers import Server, ServerSpec
from tests.support.waiting import wait_until

ELASTIC = ("--elastic", "--max-devices", "1", "--standby-ranks", "0", "--device-memory", "64MiB")


class Stream:
    """A request whose answer arrives event by event, in a thread."""

    def __init__(self, url: str, num_tokens: int, key: str = "") -> None:
        self.num_events = 0
        self.last: dict[str, Any] = {}
        self.is_done = False  # the stream said so itself
        self.broken = ""
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._body = {
            "text": "one two three",
            "stream": True,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": num_tokens,
                "ignore_eos": True,
            },
        }
        self._thread = threading.Thread(target=self._read, args=(url,), daemon=True)
        self._thread.start()

    def _read(self, url: str) -> None:
        try:
            with requests.post(
                f"{url}/generate",
                json=self._body,
                headers=self._headers,
                stream=True,
                timeout=90,
            ) as answer:
                for line in answer.iter_lines():
                    self._note(line.removeprefix(b"data: "))
        except requests.RequestException as error:
            self.broken = repr(error)

    def _note(self, event: bytes) -> None:
        if event == b"[DONE]":
            self.is_done = True
        elif event:
            self.last = json.loads(event)
            self.num_events += 1

    @property
    def error(self) -> str:
        """The class of the error that it ended with, "" if it ended well."""
        return str(self.last.get("error", {}).get("type", ""))

    def wait_for_tokens(self) -> None:
        wait_until(lambda: self.num_events > 2, 30.0)

    def end(self, timeout_s: float = 30.0) -> None:
        """Wait for its end, which must not be a broken connection."""
        self.join(timeout_s)
        assert not self.broken

    def join(self, timeout_s: float = 30.0) -> None:
        """Wait for its end, whatever it is."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the stream hangs"


class Mortal:
    """A server of its own that a test will end."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.pid = server.process.pid
        self.shared: set[Path] = set()

    def note_shared(self) -> None:
        """Remember what its processes have in shared memory now: of others it is not to be told."""
        self.shared |= {path for pid in family(self.pid) for path in shared_by(pid)}

    def get(self, route: str) -> requests.Response:
        return requests.get(f"{self.server.url}{route}", timeout=5)

    def is_ready(self) -> bool:
        return self.get("/readyz").status_code == 200

    def wait_until_ready(self, timeout_s: float = 15.0) -> None:
        wait_until(self.is_ready, timeout_s)

    def named(self, *words: str) -> list[int]:
        """Processes below the front with one of these words in their titles."""
        titles = {pid: " ".join(command_line(pid)) for pid in descendants(self.pid)}
        return [pid for pid, title in titles.items() if any(word in title for word in words)]

    def ends_with(self, timeout_s: float) -> int:
        """The exit status; nothing that the server started or shared is left then."""
        self.note_shared()
        below = descendants(self.pid)
        status = self.server.process.wait(timeout_s)
        wait_until(lambda: all(state_of(pid) is ProcessState.ENDED for pid in below), 3.0)
        wait_until(lambda: not any(path.exists() for path in self.shared), 3.0)
        return status


def shared_by(pid: int) -> set[Path]:
    """Files in shared memory that a process has mapped; none when it is gone."""
    try:
        maps = psutil.Process(pid).memory_maps(grouped=False)
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return set()
    return {Path(each.path) for each in maps if each.path.startswith("/dev/shm/")}


@contextmanager
def mortal(folder: Path, *args: str) -> Iterator[Mortal]:
    """A ready server; killed at the end if it still runs."""
    server = Server(ServerSpec(args=args), folder / f"log-{time.monotonic_ns()}")
    found = Mortal(server)
    try:
        server.wait_until_ready()
        found.wait_until_ready()
        found.note_shared()
        yield found
    except BaseException as error:
        error.add_note(server.log())
        raise
    finally:
        below = descendants(found.pid)
        server.stop()
        wait_until(lambda: all(state_of(pid) is ProcessState.ENDED for pid in below), 10.0)
