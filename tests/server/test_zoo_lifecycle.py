"""Adapters come and go at random while requests run; every answer is its merged model's.

The operations are drawn from a fixed seed. What a name holds is known at every moment, so each
answer is compared with the merged model of that content, and each refusal with docs/http.md.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests

from sgl_esft import zoo
from tests.support.families import MergedDemo
from tests.support.servers import Server, ServerPool, ServerSpec

pytestmark = pytest.mark.server

NUM_OPERATIONS = 60
NUM_SLOTS = 3
MAX_LOADED = 5  # and up to six are asked for: some are evicted, and come back
NAMES = ("n0", "n1", "n2", "n3", "n4")
STEADY = "steady"  # asked for all the time, and left alone
NUM_NEW_TOKENS = 24

Texts = dict[str | None, str]  # content (None: the base) -> what its merged model answers


def prompt_of(content: str | None) -> str:
    return zoo.held_out(content or zoo.tasks()[0], 1)[0].prompt


def ask(server: Server, contents: list[str | None], adapters: list[str | None]) -> list[str]:
    """Each content's own prompt, to the adapters that should hold it."""
    answers = server.generate(
        [prompt_of(content) for content in contents],
        adapters,
        NUM_NEW_TOKENS,
        stop=["\n"],
        ignore_eos=False,
    )
    return [answer["text"] for answer in answers]


@pytest.fixture(scope="module")
def merged_texts(server_pool: ServerPool, merged_demo: MergedDemo) -> Texts:
    server = server_pool.get(ServerSpec(zoo.base_path(), weave=False))
    texts: Texts = {}
    for content in (None, *zoo.adapter_paths()):
        server.use_weights(merged_demo.get(content))
        texts[content] = ask(server, [content], [None])[0]
    server.use_weights(zoo.base_path())
    assert len(set(texts.values())) == len(texts)
    return texts


@dataclass
class Life:
    """The server, and what must be so: nothing is assumed of what may be evicted."""

    server: Server
    root: Path
    texts: Texts
    rng: random.Random
    on_disk: dict[str, str] = field(default_factory=dict)  # folder -> content
    loaded: dict[str, str] = field(default_factory=dict)  # or evicted since
    pinned: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    seen: Counter[str] = field(default_factory=Counter)

    def call(self, method: str, path: str, body: Any = None) -> requests.Response:
        return requests.request(method, f"{self.server.url}{path}", json=body, timeout=60)

    def put(self, name: str, content: str) -> None:
        """A folder is renamed to its place, so nobody sees half of it; then the listing follows."""
        built = self.root.parent / "built"
        shutil.copytree(zoo.adapter_paths()[content], built)
        if name in self.on_disk:
            (self.root / name).rename(self.root.parent / f"old-{time.monotonic_ns()}")
        built.rename(self.root / name)
        self.on_disk[name] = content
        self.held.discard(name)
        self._until_listed(name)

    def _until_listed(self, name: str) -> None:
        deadline = time.monotonic() + 2.0  # what docs/http.md promises
        wanted = self.loaded.get(name, self.on_disk[name]) != self.on_disk[name]
        while True:
            answer = self.call("GET", f"/v1/adapters/{name}")
            shown = answer.json()
            if answer.status_code == 200 and (
                shown["on_demand"] and shown["changed_on_disk"] in (wanted, None)
            ):
                return
            assert time.monotonic() < deadline, shown
            time.sleep(0.05)

    # ---- operations, each with what must come of it ----

    def write(self) -> None:
        self.put(self.rng.choice(NAMES), self.rng.choice(list(zoo.adapter_paths())))

    def load(self) -> None:
        name, pinned = self.rng.choice(NAMES), self.rng.random() < 0.2 and not self.pinned
        answer = self.call("POST", "/v1/adapters?wait=true", {"name": name, "pinned": pinned})
        if name not in self.on_disk:
            assert answer.status_code == 400, answer.text
        elif answer.status_code == 409:  # other content is loaded, and was not evicted
            assert self.loaded[name] != self.on_disk[name]
        else:
            assert answer.status_code in (200, 201), answer.text
            self.loaded[name] = self.on_disk[name]
            self.held.discard(name)
            if pinned:
                self.pinned.add(name)

    def reload(self) -> None:
        name = self.rng.choice(NAMES)
        answer = self.call("PATCH", f"/v1/adapters/{name}?wait=true", {"reload": True})
        if name not in self.loaded:
            assert answer.status_code == (409 if name in self.on_disk else 404), answer.text
        elif answer.status_code == 409:  # it was evicted
            assert name not in self.pinned
        else:
            assert answer.status_code == 200, answer.text
            self.loaded[name] = self.on_disk[name]

    def pin(self) -> None:
        name, pinned = self.rng.choice(NAMES), self.rng.random() < 0.5
        if pinned and self.pinned - {name}:
            return  # one at a time: two slots stay for the others
        answer = self.call("PATCH", f"/v1/adapters/{name}", {"pinned": pinned})
        if name not in self.loaded:
            assert answer.status_code == (409 if name in self.on_disk else 404), answer.text
        elif answer.status_code == 200:
            (self.pinned.add if pinned else self.pinned.discard)(name)
            assert answer.json()["pinned"] is pinned
        else:
            assert answer.status_code == 409
            assert name not in self.pinned

    def unload(self) -> None:
        name = self.rng.choice(NAMES)
        answer = self.call("DELETE", f"/v1/adapters/{name}?wait=true")
        assert answer.status_code == (204 if name in self.on_disk else 404), answer.text
        if name in self.on_disk:
            self.loaded.pop(name, None)
            self.pinned.discard(name)
            self.held.add(name)

    def use(self) -> None:
        """A batch of names and the base, or one name that nobody may use."""
        name = self.rng.choice(NAMES)
        if name in self.held or name not in self.on_disk:
            refused = self.server.post("/generate", {"text": "x", "adapter": name})
            assert refused.status_code == 404, refused.text
            return
        names = [name, self.rng.choice([n for n in self.on_disk if n not in self.held])]
        for each in names:  # what is used last is not evicted for the next one
            self._learn_eviction(each)
            self._expect_answers([each])
        self._expect_answers([*names, None])

    def _expect_answers(self, names: list[str | None]) -> None:
        contents = [name and self._content_of(name) for name in names]
        found = ask(self.server, contents, names)
        assert found == [self.texts[content] for content in contents], names
        self.loaded.update({name: self._content_of(name) for name in names if name})

    def _content_of(self, name: str) -> str:
        return self.loaded.get(name, self.on_disk[name])

    def _learn_eviction(self, name: str) -> None:
        """What was evicted comes back as its folder is now."""
        if self.call("GET", f"/v1/adapters/{name}").json()["state"] == "on_disk":
            assert name not in self.pinned
            self.loaded.pop(name, None)


class Traffic(threading.Thread):
    """Asks the steady adapter, which is pinned, and the base all the time."""

    def __init__(self, server: Server, texts: Texts, content: str) -> None:
        super().__init__()
        self._server, self._texts, self._content = server, texts, content
        self.stopped = threading.Event()
        self.num_answers = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stopped.is_set():
                contents = [self._content, None]
                found = ask(self._server, contents, [STEADY, None])
                assert found == [self._texts[content] for content in contents]
                self.num_answers += 1
        except (AssertionError, OSError, ValueError) as error:  # the test's thread raises it
            self.failure = error


@pytest.mark.full
def test_a_random_life(merged_texts: Texts, server_pool: ServerPool, tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    root.mkdir()
    args = (
        *("--max-adapters", str(NUM_SLOTS), "--max-loaded-loras", str(MAX_LOADED)),
        *("--adapter-root", str(root)),
    )
    server = server_pool.get(ServerSpec(zoo.base_path(), args=args))
    life = Life(server, root, merged_texts, random.Random(6))
    steady = zoo.tasks()[-1]
    life.put(STEADY, steady)
    pinned = life.call("POST", "/v1/adapters?wait=true", {"name": STEADY, "pinned": True})
    assert pinned.status_code == 201, pinned.text
    life.loaded[STEADY] = steady
    traffic = Traffic(server, merged_texts, steady)
    traffic.start()
    operations: list[Callable[[], None]] = [life.write, life.load, life.reload, life.pin]
    try:
        for number in range(NUM_OPERATIONS):
            weights = [1, 1, 1, 0.5, 0.7, 3] if number else [1, 0, 0, 0, 0, 0]
            (operation,) = life.rng.choices([*operations, life.unload, life.use], weights)
            operation()
            life.seen[operation.__name__] += 1
            assert traffic.failure is None, traffic.failure
    finally:
        traffic.stopped.set()
        traffic.join()
    assert traffic.failure is None, traffic.failure
    assert len(life.seen) == 6, life.seen
    assert traffic.num_answers > 5
    listing = life.call("GET", "/v1/adapters").json()
    assert listing["slots"]["total"] == NUM_SLOTS
    assert 0 < listing["slots"]["used"] <= NUM_SLOTS
    assert all(each["num_references"] == 0 for each in listing["adapters"])
