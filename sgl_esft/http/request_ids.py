"""Who asks, and the ids that the engine knows requests by: ours, whatever a client calls them.

    gate --carry--> scope["state"] --> [RequestIds layer] --> asker(), for all that the request runs
    plugin/request_hooks.py --> [IdBook]: a client's `rid` <-> the id inside, by key

SGLang aborts every request whose id begins with the one that it is told. Inside, an id is
32 random hexadecimal digits: none is the beginning of another, and none can be guessed. What a
client names besides (salts of the prefix cache, routing keys, requests of a session) is a digest of
its key's name and that, so that two keys never mean the same by one word.
"""

from __future__ import annotations

import hashlib
import secrets
import uuid
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from sgl_esft.errors import DuplicateRequestIdError, EsftError, NotAllowedError
from sgl_esft.http.answers import App, Receive, Scope, Send, send_error
from sgl_esft.http.body import body_of
from sgl_esft.http.classes import routed_path

_STATE: Final = "sgl_esft_asker"
_NUM_BYTES: Final = 16  # of an id, twice as many digits
# SGLang's own probes have ids by which its scheduler knows them.
_PROBES: Final = frozenset({"/health", "/health_generate"})
# A session is opened by an admin, and whoever knows its id reads on where it was left.
_OF_SESSIONS: Final = ("session_id", "session_params")


@dataclass(frozen=True)
class Asker:
    """Whom a request is from."""

    namespace: str  # the name of its key
    is_admin: bool = False
    is_probe: bool = False


# What this process asks itself, outside of any request.
NOBODY: Final = Asker("", is_admin=True, is_probe=True)
_asker: ContextVar[Asker] = ContextVar("sgl_esft_asker", default=NOBODY)


def asker() -> Asker:
    """Whom this code runs for."""
    return _asker.get()


def carry(namespace: str, scope: Scope, *, is_admin: bool) -> Scope:
    """The scope of a request that is from the key of this name."""
    found = Asker(namespace, is_admin, is_probe=routed_path(scope) in _PROBES)
    return {**scope, "state": {**scope.get("state", {}), _STATE: found}}


class RequestIds:
    """An ASGI application around the server's: all that a request runs knows whom it is for."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found: Asker | None = scope.get("state", {}).get(_STATE)
        if scope["type"] == "http" and found is not None:
            try:
                _check_sessions(found, scope)
            except EsftError as error:
                await send_error(send, error)
                return
            _asker.set(found)
        await self._app(scope, receive, send)


def _check_sessions(found: Asker, scope: Scope) -> None:
    body = body_of(scope)
    if found.is_admin or body is None or not isinstance(body.document, dict):
        return
    named = [name for name in _OF_SESSIONS if body.document.get(name) is not None]
    if named:
        raise NotAllowedError(f"{', '.join(named)}: sessions are for the admin key; leave it out")


@dataclass
class Named:
    """One request's ids."""

    asker: Asker
    has_own: bool  # ids inside that differ from the client's
    shown: dict[str, str] = field(default_factory=dict)  # id inside -> the client's


class IdBook:
    """Clients' ids of running requests, and what they are inside."""

    def __init__(self, *, isolates_prefix_cache: bool = False) -> None:
        self._isolates = isolates_prefix_cache
        self._secret = secrets.token_bytes(_NUM_BYTES)
        self._running: set[tuple[str, str]] = set()

    def begin(self, named: Named, given: Iterable[str], *, in_session: bool) -> list[str]:
        """The ids inside of a request's sequences. Raises DuplicateRequestIdError, as SGLang does.

        Later requests of a session name earlier ones, so there an id follows from the client's.
        """
        given = list(given)
        keys = {(named.asker.namespace, each) for each in given}
        for _, each in sorted(keys & self._running):
            raise DuplicateRequestIdError(
                f"rid {each!r} is running: name a request otherwise, or leave rid out"
            )
        own = [
            self.digest(named.asker, "rid", each) if in_session else uuid.uuid4().hex
            for each in given
        ]
        self._running |= keys
        named.shown = dict(zip(own, given, strict=True))
        return own

    def end(self, named: Named) -> None:
        """The request has ended: its client may use the ids again."""
        self._running -= {(named.asker.namespace, each) for each in named.shown.values()}

    def salt(self, asker: Asker, given: str | None) -> str | None:
        """The prefix cache's salt of a request."""
        if not given and not self._isolates:
            return None
        return self.digest(asker, "cache_salt", given or "")

    def digest(self, asker: Asker, kind: str, given: str) -> str:
        """What one key means by a word, of an id's form; another key means something else."""
        told = "\0".join((kind, asker.namespace, given)).encode("utf-8", "surrogatepass")
        return hashlib.blake2b(told, key=self._secret, digest_size=_NUM_BYTES).hexdigest()
