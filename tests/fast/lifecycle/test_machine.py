"""Random operations on the adapter routes against a pure model of what they promise.

Adapters are of both kinds, and a name's kind may change with its folder; test_both_kinds.py has the
engine beneath.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from sgl_esft.errors import AdapterMismatchError, NoFreeSlotError
from sgl_esft.formats.adapter_config import AdapterKind
from sgl_esft.formats.manifest import content_digest
from tests.fast.lifecycle.site import Site
from tests.support.state_machines import run_steps

NAMES = ("a", "b", "c")
names = st.sampled_from(NAMES)
pairs = st.lists(names, min_size=2, max_size=2, unique=True)
FAILURES = {"user": AdapterMismatchError, "later": NoFreeSlotError}


@dataclass
class Work:
    """A load or a replacement that the engine has begun."""

    replaces: bool
    digest: str
    pinned: bool
    kind: AdapterKind
    leaves: bool = False  # a DELETE waits for its end
    is_outdated: bool = False  # the folder has another content by now


@dataclass
class Known:
    """What the model knows of one name."""

    on_disk: str | None = None  # "good", "broken"
    digest: str | None = None  # of the folder
    kind: AdapterKind = "esft"  # of the folder
    loaded: str | None = None  # digest
    loaded_kind: AdapterKind | None = None  # of what was loaded last
    pinned: bool = False
    work: Work | None = None
    draining: bool = False  # being unloaded, while requests use it
    held: bool = False
    was_loaded: bool = False
    failed: str | None = None  # kind of the last failure
    failed_load: bool = False  # it was a load, and not a replacement
    failed_changed: bool = False  # the folder has changed since it failed

    @property
    def exists(self) -> bool:
        signs = (self.on_disk, self.loaded, self.work, self.draining, self.was_loaded, self.failed)
        return any(signs)


class LifecycleMachine(RuleBasedStateMachine):
    """Each rule says first what must come of it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.known = {name: Known() for name in NAMES}
        self.versions = 0
        self.flying: list[tuple[tuple[str, Any], ...]] = []  # (name, the version that it uses)...
        self.waiting: list[tuple[str, asyncio.Task[httpx.Response]]] = []

    @initialize()
    def begin(self) -> None:
        self.root = Path(self.folder.name)
        self.site = Site(self.root, holds=True, takes_lora=True)

    def teardown(self) -> None:
        for _, task in self.waiting:
            task.cancel()
        self.run(self.site.client.aclose())
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.run(asyncio.sleep(0.01))
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        self.folder.cleanup()

    def run(self, awaitable: Any) -> Any:
        return self.loop.run_until_complete(awaitable)

    def call(self, method: str, path: str, body: Any = None) -> httpx.Response:
        answer = self.run(self.site.client.request(method, path, json=body))
        self.run(self.site.settle())
        assert isinstance(answer, httpx.Response)
        return answer

    # ---- the disk ----

    @rule(
        name=names,
        broken=st.sampled_from([False, False, False, True]),
        kind=st.sampled_from(get_args(AdapterKind)),
    )
    def write(self, name: str, broken: bool, kind: AdapterKind) -> None:
        self.versions += 1
        content = "broken" if broken else f"{name}{self.versions}" + "." * self.versions
        self.site.write(name, content, kind)
        known = self.known[name]
        known.on_disk, known.kind = "broken" if broken else "good", kind
        known.digest = content_digest(self.root / name)
        known.held, known.failed_changed = False, True
        if known.work:
            known.work.is_outdated = True

    @precondition(lambda self: any(known.on_disk for known in self.known.values()))
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([n for n, k in self.known.items() if k.on_disk]))
        self.site.remove(name)
        known = self.known[name]
        known.on_disk, known.digest, known.failed_changed = None, None, False
        if known.work:
            known.work.is_outdated = False

    # ---- commands ----

    @rule(name=names, pinned=st.booleans())
    def post(self, name: str, pinned: bool) -> None:
        known = self.known[name]
        answer = self.call("POST", "/v1/adapters", {"name": name, "pinned": pinned})
        if known.on_disk is None:  # every path leads to the folder, which is not there
            assert answer.status_code == 400, answer.text
        elif known.draining or (known.work and known.work.leaves):
            # A loaded name's content may be read before it is known that it leaves.
            assert answer.status_code in (409, 400)
        elif known.work:
            same = not pinned or known.work.pinned
            assert answer.status_code == (202 if same else 409)
        elif known.loaded:
            self._expect_compared(answer, known, pinned)
        else:
            assert answer.status_code == 202
            assert known.on_disk
            self._begin_load(name, pinned)

    def _expect_compared(self, answer: httpx.Response, known: Known, pinned: bool) -> None:
        is_same = known.digest == known.loaded
        assert answer.status_code == (200 if is_same else 409)
        known.pinned = known.pinned or (pinned and is_same)

    def _begin_load(self, name: str, pinned: bool) -> None:
        known = self.known[name]
        known.held = False
        known.work = Work(False, content_digest(self.root / name), pinned, known.kind)

    @rule(name=names)
    def reload(self, name: str) -> None:
        known = self.known[name]
        answer = self.call("PATCH", f"/v1/adapters/{name}", {"reload": True})
        if not known.exists:
            assert answer.status_code == 404
        elif known.work or known.draining:
            replaces = known.work and known.work.replaces and known.loaded
            joins = replaces and not known.work.leaves
            expected = {202} if joins and known.on_disk else {409, 400}
            assert answer.status_code in expected, answer.text
        elif not known.loaded and not known.was_loaded:
            assert answer.status_code == 409
        elif known.on_disk is None:
            assert answer.status_code == 400
        elif not known.loaded:
            assert answer.status_code == 202
            self._begin_load(name, pinned=False)
        else:
            digest = content_digest(self.root / name)
            assert answer.status_code == (200 if digest == known.loaded else 202)
            if digest != known.loaded:
                known.work = Work(True, digest, known.pinned, known.kind)

    @rule(name=names, pinned=st.booleans())
    def pin(self, name: str, pinned: bool) -> None:
        known = self.known[name]
        answer = self.call("PATCH", f"/v1/adapters/{name}", {"pinned": pinned})
        if not known.exists:
            assert answer.status_code == 404
        elif known.work or known.draining or not (known.loaded or known.was_loaded):
            assert answer.status_code == 409
        elif not known.loaded:
            self._expect_brought_back(answer, name, pinned)
        else:
            assert (answer.status_code, answer.json()["pinned"]) == (200, pinned)
            known.pinned = pinned

    def _expect_brought_back(self, answer: httpx.Response, name: str, pinned: bool) -> None:
        known = self.known[name]
        assert answer.status_code == (202 if pinned else 200), answer.text
        if not pinned:
            assert answer.json()["pinned"] is False
        elif known.on_disk is not None:
            self._begin_load(name, pinned=True)
        else:
            known.failed, known.failed_load, known.failed_changed = "user", True, False

    @rule(name=names)
    def delete(self, name: str) -> None:
        known = self.known[name]
        in_use = self._in_use(name)
        answer = self.call("DELETE", f"/v1/adapters/{name}")
        if not known.exists:
            assert answer.status_code == 404
        elif known.work:
            assert answer.status_code == 202
            known.work.leaves = True
        elif known.draining:
            assert answer.status_code == 202
        elif known.loaded:
            assert answer.status_code in ((202,) if in_use else (202, 204))
            known.loaded = None
            known.draining = in_use
            if not in_use:
                self._forget(name)
        else:
            assert answer.status_code in ((202, 204) if known.was_loaded else (204,))
            self._forget(name)

    def _in_use(self, name: str) -> bool:
        """Whether a request uses the version that the name means now."""
        known = self.known[name]
        return any(n == name and used.digest == known.loaded for n, used in self._used())

    def _used(self) -> Iterator[tuple[str, Any]]:
        return itertools.chain.from_iterable(self.flying)

    def _forget(self, name: str) -> None:
        known = self.known[name]
        known.loaded, known.pinned, known.draining = None, False, False
        known.was_loaded, known.failed, known.work = False, None, None
        known.held = known.on_disk is not None

    # ---- requests for the model ----

    @rule(name=names)
    def use(self, name: str) -> None:
        known = self.known[name]
        request = self.loop.create_task(self.site.generate(name))
        for _ in range(3):
            self.run(asyncio.sleep(0.001))
            self.run(self.site.settle())
        if self._is_ready(known):
            answer = self.run(request)
            assert answer.json() == {"digests": [known.loaded]}
        elif self._is_usable(known):
            self._expect_load_for(name, request)
        else:
            assert self.run(request).status_code == 404

    @rule(pair=pairs)
    def use_both(self, pair: list[str]) -> None:
        """One prompt with two adapters, where nothing has to be loaded for it."""
        known = [self.known[name] for name in pair]
        if any(self._is_usable(each) and not self._is_ready(each) for each in known):
            return
        body = {"text": "x", "adapter": pair}
        answer = self.call("POST", "/generate", body)
        if not all(self._is_ready(each) for each in known):
            assert answer.status_code == 404, answer.text
        elif known[0].loaded_kind == known[1].loaded_kind:
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["type"] == "TooManyAdaptersError"
        else:
            known.sort(key=lambda each: each.loaded_kind or "")
            assert answer.json() == {"digests": ["+".join(str(each.loaded) for each in known)]}

    def _is_ready(self, known: Known) -> bool:
        """Whether a request finds it."""
        return bool(known.loaded) and not (known.draining or (known.work and known.work.leaves))

    def _is_usable(self, known: Known) -> bool:
        if known.draining or (known.work and known.work.leaves) or known.held:
            return False
        return known.exists

    def _expect_load_for(self, name: str, request: asyncio.Task[httpx.Response]) -> None:
        known = self.known[name]
        if known.work is None and not self._is_loadable(known):
            assert self.run(request).status_code == 400
            return
        if known.work is None and known.on_disk is None:  # evicted, and its folder is gone
            answer = self.run(request)
            assert answer.status_code == 400, answer.text
            known.failed, known.failed_load, known.failed_changed = "user", True, False
            return
        if known.work is None:
            self._begin_load(name, pinned=False)
        assert not request.done()
        self.waiting.append((name, request))

    def _is_loadable(self, known: Known) -> bool:
        stuck = known.failed == "user" and known.failed_load and not known.failed_changed
        return not stuck and known.on_disk != "broken"

    # ---- the engine ----

    @precondition(lambda self: any(known.work for known in self.known.values()))
    @rule(data=st.data(), failure=st.sampled_from([None, None, None, "user", "later"]))
    def work_ends(self, data: st.DataObject, failure: str | None) -> None:
        name = data.draw(st.sampled_from([n for n, k in self.known.items() if k.work]))
        known = self.known[name]
        work = known.work
        in_use = self._in_use(name)
        self.site.engine.finish(name, FAILURES[failure](f"a {failure} error") if failure else None)
        self.run(self.site.settle())
        known.work = None
        self._expect_answers(name, failure, work)
        if failure is None:
            known.loaded, known.pinned, known.was_loaded = work.digest, work.pinned, True
            known.loaded_kind = work.kind
            known.failed = None
            in_use = self._in_use(name)
        else:
            known.failed, known.failed_load = failure, not work.replaces
            known.failed_changed = work.is_outdated
        if work.leaves:
            if known.loaded and in_use:
                known.loaded, known.draining = None, True
            else:
                self._forget(name)

    def _expect_answers(self, name: str, failure: str | None, work: Work) -> None:
        for n, request in [each for each in self.waiting if each[0] == name]:
            answer = self.run(request)
            self.waiting.remove((n, request))
            if failure is None and not work.leaves:
                assert answer.json() == {"digests": [work.digest]}
            elif failure is not None:
                assert answer.status_code == {"user": 400, "later": 503}[failure]

    @precondition(lambda self: any(k.loaded and not k.work for k in self.known.values()))
    @rule(data=st.data())
    def begin_request(self, data: st.DataObject) -> None:
        usable = [n for n, k in self.known.items() if k.loaded and not k.work]
        name = data.draw(st.sampled_from(usable))
        self.flying.append(((name, self.site.engine.begin_request(name)),))

    @rule(pair=pairs)
    def begin_request_of_both(self, pair: list[str]) -> None:
        """It holds both until it ends, and neither longer."""
        known = [self.known[name] for name in pair]
        is_pair = known[0].loaded_kind != known[1].loaded_kind
        if is_pair and all(each.loaded and not each.work for each in known):
            parts = ((name, self.site.engine.begin_request(name)) for name in pair)
            self.flying.append(tuple(parts))

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def end_request(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.flying) - 1))
        for name, used in self.flying.pop(index):
            self.site.engine.end_request(used)
            self.run(self.site.settle())
            still = any(used.adapter_id == other.adapter_id for _, other in self._used())
            known = self.known[name]
            if known.draining and not still and name not in self.site.library.known.jobs:
                self._forget(name)

    @precondition(lambda self: any(self._can_evict(n) for n in NAMES))
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([n for n in NAMES if self._can_evict(n)]))
        self.site.engine.evict(name)
        self.known[name].loaded = None

    def _can_evict(self, name: str) -> bool:
        known = self.known[name]
        idle = known.loaded and not known.pinned
        if known.work and not known.work.replaces:
            return False
        return bool(idle) and not self._in_use(name)

    # ---- what the listing says ----

    @invariant()
    def listing_is_as_predicted(self) -> None:
        if not hasattr(self, "site"):
            return
        listed = self.run(self.site.adapters())
        assert set(listed) == {name for name, known in self.known.items() if known.exists}
        for name, shown in listed.items():
            known = self.known[name]
            assert shown["state"] == self._state(known), (name, shown, known)
            if known.loaded:
                assert (shown["digest"], shown["pinned"], shown["kind"]) == (
                    known.loaded,
                    known.pinned or bool(known.work and known.work.pinned),
                    known.loaded_kind,
                )
            elif known.on_disk == "good" and not any(n == name for n, _ in self._used()):
                assert shown["kind"] == known.kind
            assert (shown["load"] is not None) == (known.work is not None)

    def _state(self, known: Known) -> str:
        if known.draining:
            return "draining"
        if known.loaded:
            return "in_host_cache"
        if known.work:
            return "loading"
        stuck = known.failed and not known.failed_changed
        return "failed" if stuck or known.on_disk == "broken" else "on_disk"


def test_a_thousand_steps() -> None:
    run_steps(LifecycleMachine, 20, 50)


@pytest.mark.soak
def test_ten_thousand_steps() -> None:
    run_steps(LifecycleMachine, 100, 100, derandomize=False)
