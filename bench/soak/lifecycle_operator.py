"""The operator of the load test: adapters loaded, replaced, unloaded, pinned while they are asked.

On an elastic server the number of devices is changed too.

    [Planner] -> Operation --[carry_out]--> /v1/adapters, waits for its end -> Done
    Done, Done, .. -> [History] -> which versions an answer may be of

One operation at a time. A name of the traffic that is unloaded is loaded again by the next one, as
its other version: in between its requests are answered with 404.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import aiohttp

from bench.elasticmoe.load import scale
from bench.soak.lifecycle_versions import Versions

Kind: TypeAlias = Literal[
    "load", "load_live", "replace", "unload", "unload_live", "pin", "unpin", "scale"
]
CYCLE: tuple[Kind, ...] = (
    "load",
    "replace",
    "pin",
    "replace",
    "unload_live",
    "load_live",
    "unload",
    "replace",
    "unpin",
    "replace",
)
LOADS = ("load", "load_live", "replace")
CHANGES = ("load_live", "replace")  # of what a name of the traffic means
TIMEOUT_S = 60.0
CONFLICT = 409


@dataclass(frozen=True)
class Operation:
    """One thing to do. `folder` below the adapter root: what the name means afterwards."""

    kind: Kind
    name: str
    folder: str
    dp_size: int = 0  # of a scale


@dataclass(frozen=True)
class Done:
    """What came of it. Times in seconds of the monotonic clock."""

    operation: Operation
    sent_s: float
    returned_s: float
    status: int
    answer: str  # empty where it succeeded

    @property
    def seconds(self) -> float:
        return self.returned_s - self.sent_s


@dataclass
class Planner:
    """Chooses operations that must succeed, the same ones for the same seed."""

    live: Mapping[str, Versions]  # that the traffic asks for
    extras: Sequence[str]  # that nobody asks for; loaded and unloaded by turns
    seed: int = 0
    sizes: Sequence[int] = ()  # of an elastic server, taken by turns after each cycle
    meaning: dict[str, str] = field(default_factory=dict)  # name -> folder
    pinned: str | None = None  # at most one: the traffic needs the other slots
    absent: str | None = None  # of the live ones, unloaded a moment ago
    _loaded: set[str] = field(default_factory=set)  # of the extras
    _number: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.meaning |= {name: each.old for name, each in self.live.items()}

    def next(self) -> Operation:
        """What CYCLE says, of a random name."""
        cycle = (*CYCLE, "scale") if self.sizes else CYCLE
        turn, place = divmod(self._number, len(cycle))
        self._number += 1
        kind = cycle[place]
        if kind == "scale":
            return Operation(kind, "", "", self.sizes[turn % len(self.sizes)])
        if kind == "load":
            return Operation(kind, self._extra(loaded=False), "")
        if kind == "unload":
            return Operation(kind, self._extra(loaded=True), "")
        if kind == "unpin":
            assert self.pinned is not None, "CYCLE pins before it unpins"
            return Operation(kind, self.pinned, self.meaning[self.pinned])
        name = self.absent or self._random.choice(sorted(set(self.live) - {self.pinned}))
        if kind in CHANGES:
            versions = self.live[name]
            other = versions.new if self.meaning[name] == versions.old else versions.old
            return Operation(kind, name, other)
        return Operation(kind, name, self.meaning[name])

    def took(self, operation: Operation) -> None:
        """It succeeded."""
        if operation.kind == "load":
            self._loaded.add(operation.name)
        elif operation.kind == "unload":
            self._loaded.discard(operation.name)
        elif operation.kind == "pin":
            self.pinned = operation.name
        elif operation.kind == "unpin":
            self.pinned = None
        elif operation.kind == "unload_live":
            self.absent = operation.name
        elif operation.kind != "scale":
            self.absent = None
            self.meaning[operation.name] = operation.folder

    def _extra(self, *, loaded: bool) -> str:
        return self._random.choice([n for n in self.extras if (n in self._loaded) == loaded])


async def carry_out(session: aiohttp.ClientSession, url: str, operation: Operation) -> Done:
    """Do it and wait for its end; a refusal or a break is in the answer.

    Where other work on the name goes on, as when a request has just had it loaded, the server says
    so and when to come again (409 with Retry-After); that is done.
    """
    if operation.kind == "scale":
        return await _scale(url, operation)
    method, path, body = _call(operation)
    sent_s = time.monotonic()
    status, text = 0, ""
    again_s: float | None = 0.0
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while again_s is not None:
                await asyncio.sleep(again_s)
                status, text, again_s = await _ask(session, method, f"{url}{path}", body)
    except (aiohttp.ClientError, TimeoutError) as error:
        text, status = f"{type(error).__name__}: {error} {text}", 0
    is_good = status in (200, 201, 204)
    return Done(operation, sent_s, time.monotonic(), status, "" if is_good else text[:800])


async def _ask(
    session: aiohttp.ClientSession, method: str, url: str, body: Any
) -> tuple[int, str, float | None]:
    """Status, text, and seconds until it is to be asked again; None: that is the answer."""
    async with session.request(method, f"{url}?wait=true", json=body) as response:
        again = response.headers.get("Retry-After") if response.status == CONFLICT else None
        return response.status, await response.text(), None if again is None else float(again)


async def _scale(url: str, operation: Operation) -> Done:
    sent_s = time.monotonic()
    try:
        found = await scale(url, {"dp_size": operation.dp_size}, TIMEOUT_S)
    except (aiohttp.ClientError, TimeoutError) as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    answer = "" if found.get("state") == "succeeded" else json.dumps(found)[:800]
    return Done(operation, sent_s, time.monotonic(), 0 if answer else 200, answer)


def _call(operation: Operation) -> tuple[str, str, dict[str, Any] | None]:
    one = f"/v1/adapters/{operation.name}"
    if operation.kind in ("load", "load_live"):
        path = {"path": operation.folder} if operation.folder else {}
        return "POST", "/v1/adapters", {"name": operation.name, **path}
    if operation.kind in ("unload", "unload_live"):
        return "DELETE", one, None
    if operation.kind == "replace":
        return "PATCH", one, {"path": operation.folder}
    return "PATCH", one, {"pinned": operation.kind == "pin"}


@dataclass(frozen=True)
class History:
    """What each name of the traffic meant, when that changed, and when it meant nothing."""

    first: Mapping[str, str]  # name -> folder
    changes: Mapping[str, Sequence[Done]]  # in order of time
    absences: Mapping[str, Sequence[tuple[float, float]]]  # from, to

    @classmethod
    def of(cls, live: Mapping[str, Versions], done: Iterable[Done]) -> History:
        changes: dict[str, list[Done]] = {name: [] for name in live}
        absences: dict[str, list[tuple[float, float]]] = {name: [] for name in live}
        for each in done:
            name = each.operation.name
            if each.operation.kind in CHANGES:
                changes[name].append(each)
            if each.operation.kind == "unload_live":
                absences[name].append((each.sent_s, math.inf))
            if each.operation.kind == "load_live" and absences[name] and not each.answer:
                absences[name][-1] = (absences[name][-1][0], each.returned_s)
        return cls({name: v.old for name, v in live.items()}, changes, absences)

    def may_be_unknown(self, name: str, began_s: float, ended_s: float) -> bool:
        """Whether a request may be told that there is no such adapter.

        It was unloaded after the request was sent, or before and not loaded again yet.
        """
        spans = self.absences[name]
        return any(begin_s <= ended_s and began_s <= end for begin_s, end in spans)

    def allowed(self, name: str, began_s: float, first_token_s: float) -> set[str]:
        """Folders that an answer may be of, by when it was asked for and when it had begun.

        One that had begun before a change was asked for is of the version before it, one that was
        asked for after the change had returned is of the version after it; between, of either. A
        change that failed may have happened all the same.
        """
        found = {self.first[name]}
        for change in self.changes[name]:
            after = change.operation.folder
            if change.returned_s < began_s and not change.answer:
                found = {after}
            elif change.sent_s <= first_token_s:
                found.add(after)
        return found
