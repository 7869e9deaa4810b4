"""What a key sees of the adapters: those that it may use, and no folders of the server's machine.

    answer of /v1/models, /v1/adapters --> [VisibleSend: kept until it is whole] --> less entries
    theirs, /model_info's, any error's --> [VisibleSend] --> a folder's name in place of its path

Admin keys see everything. Routes that tell of all adapters at once, and cannot be told apart, are
not for keys that may use some only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from sgl_esft.access.keys import Caller
from sgl_esft.errors import NotAllowedError
from sgl_esft.http.answers import Message, Send
from sgl_esft.http.classes import TABLE

MODEL: Final = "/v1/models/"  # and its name
_MODELS, _ADAPTERS, _ADAPTER = "/v1/models", "/v1/adapters", "/v1/adapters/"
_LISTS: Final = frozenset({_MODELS, _ADAPTERS, "/model_info", "/get_model_info"})
# Two parts at least; what may stand around one in JSON and in messages ends it.
_PART: Final = r"""[^\s/'"`,;:()\\]"""
_PATH: Final = re.compile(rf"(?<![\w.:/-])/({_PART}+)/(?:{_PART}+/)*({_PART}*)")
_OF_ROUTES: Final = frozenset(path.split("/")[1] for path in TABLE)
# Their text names every adapter that was ever used.
_OF_ALL: Final = frozenset({"/metrics", "/v1/heat"})


def check_visible(caller: Caller, path: str) -> None:
    """Raises NotAllowedError for a route that would show a key others' adapters."""
    if caller.is_admin or not caller.is_restricted:
        return
    if path in _OF_ALL:
        raise NotAllowedError("this route tells of all adapters, and this key is for some")
    name = path.removeprefix(_ADAPTER)
    if name != path and caller.adapters is not None and name not in caller.adapters:
        raise NotAllowedError("this key may not use that adapter")


def without_folders(text: str) -> str:
    """A text with every absolute path, but for those of routes, cut to its last part."""
    return _PATH.sub(lambda found: found[0] if found[1] in _OF_ROUTES else found[2], text)


def visible_part(document: Any, caller: Caller, path: str) -> Any:
    """The answer of one of the lists, less what the caller is not to see."""
    if not isinstance(document, dict):
        return document
    if path == _MODELS:
        models = [m for m in document.get("data", ()) if _may_see_model(m, caller)]
        return {**document, "data": [_without_root(model) for model in models]}
    if path.startswith(MODEL):
        return _without_root(document)
    if path == _ADAPTERS:
        adapters = [a for a in document.get("adapters", ()) if _may_use(a.get("name"), caller)]
        return {**document, "adapters": [_without_folder(adapter) for adapter in adapters]}
    return _without_folder(document)


def _may_see_model(model: Mapping[str, Any], caller: Caller) -> bool:
    if model.get("parent") is None:
        return caller.base_model
    return _may_use(model.get("id"), caller)


def _may_use(name: object, caller: Caller) -> bool:
    return caller.adapters is None or name in caller.adapters


def _without_root(model: Mapping[str, Any]) -> dict[str, Any]:
    return {**model, "root": model.get("id")}


def _without_folder(adapter: Mapping[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in adapter.items() if field != "folder"}


class VisibleSend:
    """Keeps a list's answer, and an error's, until it is whole, and sends the caller's part."""

    def __init__(self, send: Send, caller: Caller, method: str, path: str) -> None:
        self._send = send
        self._caller = caller
        self._path = path
        self._is_list = method in ("GET", "HEAD") and (
            path in _LISTS or path.startswith((_ADAPTER, MODEL))
        )
        self._start: Message | None = None
        self._chunks: list[bytes] = []

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and self._is_kept(message["status"]):
            self._start = message
            return
        if self._start is None or message["type"] != "http.response.body":
            await self._send(message)
            return
        self._chunks.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        body = self._part(self._start["status"], b"".join(self._chunks))
        headers = [h for h in self._start["headers"] if h[0].lower() != b"content-length"]
        headers.append((b"content-length", b"%d" % len(body)))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    def _is_kept(self, status: int) -> bool:
        return status >= 400 or (status == 200 and self._is_list)

    def _part(self, status: int, raw: bytes) -> bytes:
        if not raw:  # the answer to HEAD
            return raw
        if status == 200:
            document = visible_part(json.loads(raw), self._caller, self._path)
            raw = json.dumps(document).encode()
        return without_folders(raw.decode("utf-8", "replace")).encode()
