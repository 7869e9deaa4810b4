"""A client's id of a request, the id inside, and what of one key another one can mean: nothing."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_esft.errors import DuplicateRequestIdError
from sgl_esft.http import request_ids
from sgl_esft.http.request_ids import Asker, IdBook
from sgl_esft.plugin import request_hooks

OURS = re.compile(r"[0-9a-f]{32}")


@contextmanager
def asked_by(asker: Asker) -> Iterator[None]:
    token = request_ids._asker.set(asker)
    try:
        yield
    finally:
        request_ids._asker.reset(token)


@dataclass
class Manager:
    """The steps of SGLang's TokenizerManager that the hooks meet, and its states."""

    rid_to_state: dict[str, Any] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        obj.normalize_batch_and_arguments()
        request_hooks.take_ids(self, obj)
        singles = [obj] if obj.is_single else [obj[i] for i in range(obj.batch_size)]
        self.rid_to_state |= {each.rid: SimpleNamespace(obj=each) for each in singles}
        try:
            answers = [{"meta_info": {"id": each.rid}} for each in singles]
            yield answers[0] if obj.is_single else answers
            await self.go_on.wait()
        finally:
            for each in singles:
                del self.rid_to_state[each.rid]

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        self.aborted.append("(all)" if abort_all else rid)

    def answer(self, obj: Any) -> Any:
        return request_hooks.answer(Manager.serve, self, obj)

    def abort(self, rid: str, *, abort_all: bool = False) -> list[str]:
        """What SGLang is told to abort."""
        self.aborted = []
        request_hooks.abort(Manager.abort_request, self, rid, abort_all)
        return self.aborted


A, B, ADMIN = Asker("a"), Asker("b"), Asker("admin", is_admin=True)


@pytest.fixture(autouse=True)
def book() -> Iterator[None]:
    request_hooks.use(IdBook())
    yield
    request_hooks.use(IdBook())


def one(rid: Any = None, **fields: Any) -> GenerateReqInput:
    return GenerateReqInput(text="x", rid=rid, **fields)


async def begin(manager: Manager, asker: Asker, obj: Any) -> tuple[Any, Any]:
    """A running request of a key, and its first answer."""
    with asked_by(asker):
        running = manager.answer(obj)
        return running, await anext(running)


def test_ids_inside_are_ours_and_answers_have_the_clients() -> None:
    async def check() -> None:
        manager = Manager()
        for asker, rid in ((A, "ab"), (B, "abc123"), (B, "ab"), (A, "0"), (A, "HEALTH_CHECK_1")):
            _, answer = await begin(manager, asker, one(rid))
            assert answer["meta_info"]["id"] == rid
        _, unnamed = await begin(manager, A, one())
        assert unnamed["meta_info"]["id"] in manager.rid_to_state
        assert len(manager.rid_to_state) == 6
        assert all(map(OURS.fullmatch, manager.rid_to_state))

    asyncio.run(check())


@pytest.mark.parametrize(
    ("rid", "shown"), [(["p", "q"], ["p", "q"]), ("p", ["p_0", "p_1"])], ids=["list", "one"]
)
def test_each_of_a_batch(rid: Any, shown: list[str]) -> None:
    async def check() -> None:
        manager = Manager()
        obj = GenerateReqInput(text=["x", "y"], rid=rid)
        _, answers = await begin(manager, A, obj)
        assert [each["meta_info"]["id"] for each in answers] == shown
        assert list(manager.rid_to_state) == obj.rid
        assert all(map(OURS.fullmatch, obj.rid))

    asyncio.run(check())


def test_an_id_that_runs_is_refused_to_its_key_until_it_ends() -> None:
    async def check() -> None:
        manager = Manager()
        running, _ = await begin(manager, A, one("p"))
        with pytest.raises(DuplicateRequestIdError, match="'p' is running"):
            await begin(manager, A, GenerateReqInput(text=["x", "y"], rid=["q", "p"]))
        await begin(manager, B, one("p"))
        await begin(manager, A, one("q"))  # what was refused has taken none
        await running.aclose()
        assert len(manager.rid_to_state) == 2
        await begin(manager, A, one("p"))

    asyncio.run(check())


def test_who_aborts_means_its_own() -> None:
    async def check() -> None:
        manager = Manager()
        obj = one("p")
        await begin(manager, A, obj)
        await begin(manager, B, one("p"))
        await begin(manager, A, one("pq"))
        with asked_by(A):
            assert manager.abort("p") == [obj.rid]
        with asked_by(ADMIN):
            assert manager.abort("p") == []
            assert manager.abort(obj.rid) == [obj.rid]  # as the log has it
            assert manager.abort(obj.rid[:8]) == []
            assert manager.abort("", abort_all=True) == ["(all)"]

    asyncio.run(check())


def test_a_probe_keeps_the_id_that_the_scheduler_knows() -> None:
    async def check() -> None:
        manager = Manager()
        await begin(manager, Asker("(probing)", is_probe=True), one("HEALTH_CHECK_1"))
        assert list(manager.rid_to_state) == ["HEALTH_CHECK_1"]

    asyncio.run(check())


def seen(asker: Asker, obj: Any) -> Any:
    """What SGLang sees of a request."""
    asyncio.run(begin(Manager(), asker, obj))
    return obj


@pytest.mark.parametrize("name", ["cache_salt", "routing_key"])
def test_one_word_of_two_keys_means_two_things(name: str) -> None:
    of_a, again, of_b = (getattr(seen(asker, one(**{name: "word"})), name) for asker in (A, A, B))
    assert of_a == again != of_b
    assert OURS.fullmatch(of_a)
    assert OURS.fullmatch(of_b)
    assert getattr(seen(A, one()), name) is None


def test_each_prompt_has_its_own_salt() -> None:
    salts = seen(A, GenerateReqInput(text=["x", "y"], cache_salt=["s", ""])).cache_salt
    assert salts == [seen(A, one(cache_salt="s")).cache_salt, None]


def test_an_isolated_cache_has_a_salt_for_each_key() -> None:
    request_hooks.use(IdBook(isolates_prefix_cache=True))
    of_a, again, of_b, salted = (
        seen(asker, one(cache_salt=salt)).cache_salt
        for asker, salt in ((A, None), (A, ""), (B, None), (A, "s"))
    )
    assert of_a == again
    assert len({of_a, of_b, salted}) == 3
    obj = seen(A, GenerateReqInput(text=["x", "y"]))
    assert obj.cache_salt == [of_a, of_a]
    assert obj[1].cache_salt == of_a


def test_a_session_names_its_earlier_requests() -> None:
    first = seen(ADMIN, one("turn 1", session_params={"id": "s"}))
    then = seen(ADMIN, one("turn 2", session_params={"id": "s", "rid": "turn 1"}))
    assert then.session_params == {"id": "s", "rid": first.rid}
    unnamed = one(session_params={"id": "s"})
    _, answer = asyncio.run(begin(Manager(), ADMIN, unnamed))
    later = one(session_params={"id": "s", "rid": answer["meta_info"]["id"]})
    assert seen(ADMIN, later).session_params["rid"] == unnamed.rid


def test_sessions_of_two_keys_have_no_request_in_common() -> None:
    other = Asker("other", is_admin=True)
    inside = [
        seen(asker, one("turn 1", session_params={"id": "s"})).rid for asker in (ADMIN, other)
    ]
    assert len(set(inside)) == 2
    then = seen(other, one("turn 2", session_params={"id": "s", "rid": "turn 1"}))
    assert then.session_params["rid"] == inside[1]


def test_what_a_word_means_is_told_by_no_other_word_and_no_other_server() -> None:
    meant = [
        book.digest(A, kind, "word") for book in (IdBook(), IdBook()) for kind in ("rid", "salt")
    ]
    assert len(set(meant)) == 4
