"""Cases to a live server while another tenant's greedy streams run; what must not be is a finding.

    cases --NUM_SENDERS threads, one key--> server <--greedy streams, another key-- Tenant
    after each case: the process lives and is ready; each stream: its tokens are what they were

A finding names the cases that were sent last: one of them it was, or two of them together.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import psutil
import requests

from tests.support.guarded import CLIENT_KEY, TENANT_KEY, Guarded
from tests.support.request_fuzz.cases import Case

NUM_SENDERS: Final = 3
# A case that asks for many tokens is left after so long, as clients leave.
CASE_TIMEOUT_S: Final = 3.0
STREAM_TIMEOUT_S: Final = 60.0
READY_TIMEOUT_S: Final = 10.0
NUM_LAST: Final = 12
MAX_FINDINGS: Final = 6
# A server may be busy, or take too long; those are said in docs/access.md and docs/http.md.
DOCUMENTED: Final = frozenset({503, 504})
TENANTS_PROMPTS: Final = ("coffee -> ", "engine -> ", "window -> ")
TENANTS_TOKENS: Final = 48


@dataclass(frozen=True)
class Size:
    """What a server and all its processes take."""

    rss_bytes: int
    num_descriptors: int
    num_threads: int

    @staticmethod
    def of(pid: int) -> Size:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
        return Size(
            sum(each.memory_info().rss for each in family),
            sum(each.num_fds() for each in family),
            sum(each.num_threads() for each in family),
        )


@dataclass
class Outcome:
    """What was seen in a run."""

    findings: list[str] = field(default_factory=list)
    statuses: Counter[int | str] = field(default_factory=Counter)
    num_streams: int = 0
    worst_health_s: float = 0.0

    @property
    def num_cases(self) -> int:
        return sum(self.statuses.values())


class Run:
    """One run of cases against one server."""

    def __init__(self, guarded: Guarded, cases: Iterator[Case], seconds: float) -> None:
        self._server = guarded.server
        self._cases = cases
        self._taking = threading.Lock()
        self._deadline = time.monotonic() + seconds
        self._last: deque[str] = deque(maxlen=NUM_LAST)
        self._over = threading.Event()
        self.outcome = Outcome()

    def carry_out(self) -> Outcome:
        """Send until the time or the cases are over, the server is, or enough was found."""
        senders = [threading.Thread(target=self._send_all) for _ in range(NUM_SENDERS)]
        others = [threading.Thread(target=each) for each in (self._stream_all, self._watch_health)]
        for thread in (*others, *senders):
            thread.start()
        for thread in senders:
            thread.join()
        self._over.set()
        for thread in others:
            thread.join()
        return self.outcome

    def _send_all(self) -> None:
        with requests.Session() as session:
            while self._goes_on():
                with self._taking:
                    case = next(self._cases, None)
                if case is None:
                    return
                self._last.append(case.name)
                self.outcome.statuses[self._send(session, case)] += 1
                self._check_ready(case)

    def _goes_on(self) -> bool:
        is_up = self._server.process.poll() is None
        is_enough = len(self.outcome.findings) >= MAX_FINDINGS
        return time.monotonic() < self._deadline and is_up and not is_enough

    def _send(self, session: requests.Session, case: Case) -> int | str:
        """The answer's status, or what became of the request instead."""
        url = self._server.url + case.route.replace("{response_id}", "none")
        headers = {"Authorization": f"Bearer {CLIENT_KEY}", "Content-Type": "application/json"}

        def sent() -> tuple[int, bytes]:
            with session.post(
                url, data=case.body(), headers=headers, timeout=CASE_TIMEOUT_S, stream=True
            ) as answer:
                return answer.status_code, _read(answer)

        try:
            try:
                status, content = sent()
            except requests.ConnectionError:  # a connection that was idle may be closed meanwhile
                session.close()
                status, content = sent()
        except requests.Timeout:
            return "left"
        except requests.RequestException as error:
            self._found(f"{error!r:.200} to {case.name}")
            return "lost"
        if status >= 500 and status not in DOCUMENTED:
            self._found(f"{status} to {case.name}: {content[:300]!r}")
        return status

    def _check_ready(self, case: Case) -> None:
        try:
            ready = requests.get(f"{self._server.url}/readyz", timeout=READY_TIMEOUT_S)
        except requests.RequestException as error:
            self._found(f"not ready after {case.name}: {error!r:.200}")
            return
        if ready.status_code != 200:
            self._found(f"not ready after {case.name}: {ready.text[:300]}")

    def _stream_all(self) -> None:
        expected = [self._streamed(prompt) for prompt in TENANTS_PROMPTS]
        while not self._over.is_set():
            for prompt, wanted in zip(TENANTS_PROMPTS, expected, strict=True):
                try:
                    got = self._streamed(prompt)
                except (requests.RequestException, ValueError) as error:
                    self._found(f"a stream ended with {error!r:.200}")
                    return
                self.outcome.num_streams += 1
                if got != wanted:
                    self._found(f"a stream was {got}, alone it was {wanted}")

    def _streamed(self, prompt: str) -> list[int]:
        """The tokens of a stream of the tenant's own adapter."""
        body = {
            "text": prompt,
            "adapter": "reverse",
            "stream": True,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": TENANTS_TOKENS,
                "ignore_eos": True,
            },
        }
        headers = {"Authorization": f"Bearer {TENANT_KEY}"}
        with requests.post(
            f"{self._server.url}/generate",
            json=body,
            headers=headers,
            timeout=STREAM_TIMEOUT_S,
            stream=True,
        ) as answer:
            if answer.status_code != 200:
                raise ValueError(f"{answer.status_code}: {answer.text[:200]}")
            events = [line[6:] for line in answer.iter_lines() if line.startswith(b"data: ")]
        if len(events) < 2 or events[-1] != b"[DONE]":
            raise ValueError(f"the stream was cut after {len(events)} events: {events[-1:]}")
        tokens: list[int] = json.loads(events[-2])["output_ids"]
        return tokens

    def _watch_health(self) -> None:
        while not self._over.wait(0.2):
            started = time.monotonic()
            try:
                requests.get(f"{self._server.url}/healthz", timeout=STREAM_TIMEOUT_S)
            except requests.RequestException:
                continue  # a sender finds it too, and knows after which case
            took = time.monotonic() - started
            self.outcome.worst_health_s = max(self.outcome.worst_health_s, took)

    def _found(self, what: str) -> None:
        sent = "\n  ".join(self._last)
        self.outcome.findings.append(f"{what}\nsent last:\n  {sent}")


def _read(answer: requests.Response) -> bytes:
    """The answer's bytes, for at most CASE_TIMEOUT_S."""
    deadline = time.monotonic() + CASE_TIMEOUT_S
    content = b""
    for chunk in answer.iter_content(1 << 16):
        content += chunk
        if time.monotonic() > deadline:
            raise requests.Timeout
    return content
