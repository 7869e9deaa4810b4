"""Hook functions that give each request ids of ours, in the process that serves HTTP.

any route's request -> [answer: whose] -> SGLang counts its sequences -> [take_ids] -> scheduler
client <- meta_info.id as the client said it <- [answer]        abort by a client's id -> [abort]
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final

from sgl_esft.http import request_ids
from sgl_esft.http.request_ids import IdBook, Named

_NAMED: Final = "_sgl_esft_named"  # of SGLang's request: its Named
_CLIENTS: Final = "_sgl_esft_clients_id"  # of one sequence and its copies: (key's name, id)

_book = IdBook()


def use(book: IdBook) -> None:
    """Where ids are kept from now on."""
    global _book
    _book = book


async def answer(
    original: Callable[..., AsyncGenerator[Any]], manager: Any, obj: Any, request: Any = None
) -> AsyncGenerator[Any]:
    """SGLang's answers to one request, under the ids that its client gave."""
    asker = request_ids.asker()
    in_session = bool(getattr(obj, "session_params", None))
    has_own = (obj.rid is not None and not asker.is_probe) or in_session
    named = vars(obj)[_NAMED] = Named(asker, has_own)
    try:
        async with aclosing(original(manager, obj, request)) as answers:
            async for each in answers:
                if named.shown:
                    _show(each, named)
                yield each
    finally:
        _book.end(named)


def _show(answer: Any, named: Named) -> None:
    for each in answer if isinstance(answer, list) else (answer,):
        about = each["meta_info"]
        about["id"] = named.shown.get(about["id"], about["id"])


def take_ids(manager: object, obj: Any) -> None:
    """Once SGLang has settled how many sequences a request has. Raises DuplicateRequestIdError."""
    named: Named = vars(obj)[_NAMED]
    _separate(obj, named)
    if not named.has_own:
        return
    in_session = bool(getattr(obj, "session_params", None))
    if obj.is_single:
        given, (obj.rid,) = [obj.rid], _book.begin(named, [obj.rid], in_session=in_session)
        singles = [obj]
    else:
        given, obj.rid = obj.rid, _book.begin(named, obj.rid, in_session=in_session)
        singles = [obj[place] for place in range(len(given))]
    for single, clients in zip(singles, given, strict=True):
        vars(single)[_CLIENTS] = (named.asker.namespace, clients)


def _separate(obj: Any, named: Named) -> None:
    """What names state that requests share means, of each key, its own."""
    if obj.routing_key:
        obj.routing_key = _book.digest(named.asker, "routing_key", obj.routing_key)
    if not hasattr(obj, "cache_salt"):
        return  # embeddings have neither salt nor session
    salts = obj.cache_salt
    if obj.is_single:
        obj.cache_salt = _book.salt(named.asker, salts)
    else:
        each = salts if isinstance(salts, list) else [salts] * len(obj.rid)
        obj.cache_salt = [_book.salt(named.asker, salt) for salt in each]
    earlier = (obj.session_params or {}).get("rid")
    if earlier is not None:
        own = _book.digest(named.asker, "rid", earlier)
        obj.session_params = {**obj.session_params, "rid": own}


def abort(
    original: Callable[..., None], manager: Any, rid: str = "", abort_all: bool = False
) -> None:
    """An id inside is meant as it is; a client's means the asker's own requests, and no other's."""
    if abort_all or not rid or rid in manager.rid_to_state:
        original(manager, rid, abort_all)
        return
    meant = (request_ids.asker().namespace, rid)
    running = list(manager.rid_to_state.items())
    for own in [own for own, state in running if vars(state.obj).get(_CLIENTS) == meant]:
        original(manager, own)
