"""The first thing a request meets: an ASGI application around the server's.

    request -> headers -> Host, Origin -> route's class -> key -> key's limits -> body -> SGLang
                 431        400, 403       404, 405      401, 403     429      408, 413, 400

Cheap checks come first, and nothing of a body is read for who may not send it. Answers are passed
on as they come. What the key was is not passed on: SGLang, which checks keys too, gets one that the
server made up when it started.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from sgl_esft.access import origins
from sgl_esft.access.ask import Ask
from sgl_esft.access.bodies import check_client_body
from sgl_esft.access.keys import Caller, KeyRing
from sgl_esft.access.limits import KeyLimits, Ticket
from sgl_esft.access.token_usage import UsageReader
from sgl_esft.access.visible import MODEL, VisibleSend, check_visible
from sgl_esft.errors import EsftError, NoKeyError, NotAllowedError
from sgl_esft.fields.rules import BodyRules, ModelBounds
from sgl_esft.http import adapter_names, body, record, request_ids
from sgl_esft.http.adapter_names import ADAPTER_ROUTES, KnownNames
from sgl_esft.http.answers import (
    App,
    Headers,
    Message,
    Receive,
    Scope,
    Send,
    header_values,
    send_error,
)
from sgl_esft.http.body import RequestBody
from sgl_esft.http.classes import WEBSOCKET, RouteClass, RouteTable, routed_path
from sgl_esft.http.deadline import is_event_stream, run_within

# Names that no key can have, so none shares their limits.
ANYONE = Caller("(anyone)", is_admin=True)  # of a server without keys
PUBLIC = Caller("(public)")  # of a server with keys
# SGLang's probe, which may run the model and takes a second. Its limit is not that of other probes:
# whoever uses it up would make a server look dead.
PROBING = Caller("(probing)", max_concurrency=64)
_PROBE_OF_MODEL = "/health"
STARTING = Caller("(start-up)", is_admin=True)

# Routes for clients that take a body and do not run the model.
WITHOUT_MODEL = frozenset(
    {
        "/detokenize",
        "/parse_function_call",
        "/separate_reasoning",
        "/tokenize",
        "/v1/detokenize",
        "/v1/messages/count_tokens",
        "/v1/tokenize",
    }
)
_BYTES_A_TOKEN = 4  # of a text that is not tokenized; English has about so many
_WORKED = 413  # from behind the gate: a text took all the time that it may
_NOT_NOW = 503  # no room for the adapter, a full queue: the model has not worked either
_PRESENTED = (b"authorization", b"x-api-key")


@dataclass(frozen=True)
class Policy:
    """What a server was started with."""

    keys: KeyRing = field(default_factory=KeyRing)
    table: RouteTable = field(default_factory=RouteTable)
    rules: BodyRules = field(default_factory=BodyRules)
    body_timeout_s: float = 30.0
    request_timeout_s: float = 1800.0
    allowed_origins: tuple[str, ...] = ()


class InnerKey:
    """The key that SGLang knows. SGLang calls its own server with it while that starts."""

    def __init__(self) -> None:
        self.value = secrets.token_urlsafe(32)
        self._is_open = True

    def __repr__(self) -> str:
        return "InnerKey()"

    def opens(self, key: str) -> bool:
        """Whether this is the key, and the server still starts."""
        given = key.encode("utf-8", "surrogateescape")
        return self._is_open and hmac.compare_digest(given, self.value.encode())

    def close(self) -> None:
        """The server has started: from outside the key is worth nothing now."""
        self._is_open = False


class Gate:
    """The server's application behind all checks."""

    def __init__(
        self,
        app: App,
        policy: Policy,
        limits: KeyLimits,
        bounds: Callable[[], ModelBounds],
        names: Callable[[], KnownNames] | None,
        inner_key: InnerKey | None = None,
        keys: Callable[[], KeyRing] | None = None,
    ) -> None:
        """names: which a request may use now; None: weaving is off, and no body is asked."""
        self._app = app
        self._policy = policy
        self._limits = limits
        self._bounds = bounds
        self._names = names
        self._inner_key = inner_key
        self._keys = keys or (lambda: policy.keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._serve_websocket(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        ticket: Ticket | None = None
        ask: Ask | None = None
        try:
            self._check_where_from(scope)
            if _is_preflight(scope):  # no key comes with it, and CORSMiddleware answers it
                await self._app(scope, receive, send)
                return
            route_class, caller = self._admit(scope, scope["method"])
            scope = request_ids.carry(caller.name, scope, is_admin=caller.is_admin)
            path = routed_path(scope)
            if route_class is not RouteClass.PUBLIC and not caller.is_admin:
                self._check_model(caller, path)
                send = VisibleSend(send, caller, scope["method"], path)
            ticket = self._limits.enter(caller)
            if route_class is not RouteClass.PUBLIC:  # those take no body, and leave it unread
                rules, seconds = self._policy.rules, self._policy.body_timeout_s
                raw = await body.read(receive, scope["headers"], rules.max_bytes, seconds)
                if raw is None:
                    return
                found, ask = self._check(route_class, caller, scope, raw)
                scope, receive = body.carry(found, scope, receive)
                if ask is not None:
                    ticket.grow(ask.sequences)
                    ticket.reserve(ask.tokens)
        except EsftError as error:
            await send_error(send, error)
        else:
            await self._run(ticket, ask, scope, receive, send)
        finally:
            if ticket is not None:
                ticket.leave()

    async def _run(
        self, ticket: Ticket, ask: Ask | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        meter = _Meter(ask, receive, send) if ask is not None and ticket.is_metered else None
        if meter is not None:
            receive, send = meter.receive, meter.send
        passed = self._with_inner_key(scope)
        seconds = self._policy.request_timeout_s
        try:
            await run_within(seconds, self._app, passed, receive, send)
        finally:
            if meter is not None:
                ticket.leave(meter.tokens())

    async def _serve_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_where_from(scope)
            self._admit(scope, WEBSOCKET)
        except EsftError:
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        await self._app(self._with_inner_key(scope), receive, send)

    def _check_where_from(self, scope: Scope) -> None:
        headers: Headers = scope["headers"]
        origins.check_headers(headers)
        origins.check_host(headers, has_keys=len(self._keys()) > 0)
        origins.check_origin(headers, self._policy.allowed_origins)

    def _admit(self, scope: Scope, method: str) -> tuple[RouteClass, Caller]:
        """Raises UnknownRouteError, UnknownMethodError, NoKeyError, NotAllowedError."""
        route_class = self._policy.table.find(method, routed_path(scope))
        keys = self._keys()
        if route_class is not RouteClass.PUBLIC:
            allowed = self._policy.allowed_origins
            origins.check_site(scope["headers"], allowed, has_keys=len(keys) > 0)
        if not keys:
            return route_class, ANYONE
        if route_class is RouteClass.PUBLIC:
            return route_class, PROBING if routed_path(scope) == _PROBE_OF_MODEL else PUBLIC
        caller = self._caller(scope["headers"], keys)
        if route_class is RouteClass.ADMIN and not caller.is_admin:
            raise NotAllowedError(
                "this route is for the admin key"
                + ("" if keys.has_admin else ", and the server has none")
            )
        check_visible(caller, routed_path(scope))
        return route_class, caller

    def _check_model(self, caller: Caller, path: str) -> None:
        """Of /v1/models/{name}, what a restricted key may ask for. Raises EsftError."""
        model = path.removeprefix(MODEL)
        if self._names is None or not caller.is_restricted or model == path:
            return
        names = _names_for(caller, self._names())
        if names.adapter_of_model(model) is None and not caller.base_model:
            raise NotAllowedError("this key may not use the base model: name an adapter")

    def _caller(self, headers: Headers, keys: KeyRing) -> Caller:
        key = _presented_key(headers)
        if self._inner_key is not None and self._inner_key.opens(key):
            return STARTING
        caller = keys.find(key)
        if caller is None:
            raise NoKeyError("the key is not known")
        if (request := record.current()) is not None:
            request.key_name = caller.name
        return caller

    def _check(
        self, route_class: RouteClass, caller: Caller, scope: Scope, raw: bytes
    ) -> tuple[RequestBody, Ask | None]:
        """A request's body, and what it would use of the model, if it is for that.

        Raises EsftError.
        """
        is_client = route_class is RouteClass.CLIENT
        if not is_client and _is_form(scope):
            return RequestBody(raw), None
        document = body.parse(raw) if raw else {}
        path = routed_path(scope)
        ask: Ask | None = None
        if is_client:
            rules = self._policy.rules
            ask = check_client_body(path, document, len(raw), rules, self._bounds())
        if scope["method"] not in ("POST", "PUT"):
            return RequestBody(raw, document), None
        found = self._resolve(caller if is_client else ANYONE, path, RequestBody(raw, document))
        return found, _ask_for_text(raw) if path in WITHOUT_MODEL else ask

    def _resolve(self, caller: Caller, path: str, found: RequestBody) -> RequestBody:
        """The body with its adapters' names resolved, as if others' adapters were not there.

        So a key meets the same words for an adapter of others and for one that is not there. A key
        for all adapters is told of what is wrong further in: other reasons to refuse come first.
        """
        if self._names is None or not isinstance(found.document, dict):
            return found
        names = _names_for(caller, self._names())
        try:
            resolved = adapter_names.resolve(
                path, found.document, names, everywhere=caller.is_restricted
            )
        except EsftError as error:
            if not caller.is_restricted:
                return replace(found, refusal=error)
            raise
        if None in resolved.asked and not caller.base_model and path not in WITHOUT_MODEL:
            raise NotAllowedError("this key may not use the base model: name an adapter")
        if resolved.rewritten is not None:
            found = RequestBody(json.dumps(resolved.rewritten).encode(), resolved.rewritten)
        used = frozenset(filter(None, resolved.asked)) if path in ADAPTER_ROUTES else frozenset()
        return replace(found, adapters=used)

    def _with_inner_key(self, scope: Scope) -> Scope:
        if self._inner_key is None:
            return scope
        kept = [(name, value) for name, value in scope["headers"] if name.lower() not in _PRESENTED]
        inner = (b"authorization", b"Bearer " + self._inner_key.value.encode())
        return {**scope, "headers": [*kept, inner]}


class _Meter:
    """Passes an answer on and reads what it used."""

    def __init__(self, ask: Ask, receive: Receive, send: Send) -> None:
        self._ask = ask
        self._receive = receive
        self._send = send
        self._reader = UsageReader(is_stream=False)
        self._is_refusal = False
        self._is_whole = False
        self._has_left = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._has_left = self._has_left or message["type"] == "http.disconnect"
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._reader = UsageReader(is_stream=is_event_stream(message))
            status = message["status"]
            refused = 400 <= status < 500 and status != _WORKED
            self._is_refusal = refused or status == _NOT_NOW
        elif message["type"] == "http.response.body":
            self._reader.feed(message.get("body", b""))
            self._is_whole = not message.get("more_body", False)
        await self._send(message)

    def tokens(self) -> int:
        """Tokens used, as the answer says; else what was asked for, or more if more has passed."""
        # SGLang answers a client that has left with 400 too, when the model has worked for it.
        if self._is_refusal and not self._has_left:
            return 0
        told = self._reader.tokens()
        if told is not None and self._is_whole:
            return told
        passed = self._ask.prompt_tokens + self._reader.num_events
        return max(passed, self._ask.tokens if told is None else told)


def _names_for(caller: Caller, names: KnownNames) -> KnownNames:
    """Those that the key may say: others' are not there."""
    if not caller.is_restricted:
        return names
    own = names.adapters
    if caller.adapters is not None:
        own = frozenset(name for name in caller.adapters if name in names.adapters)
    return replace(names, adapters=own, of_some=True)


def _presented_key(headers: Headers) -> str:
    """The one key of a request, as a bearer token or as `x-api-key`. Raises NoKeyError."""
    keys = set(header_values(headers, b"x-api-key"))
    for value in header_values(headers, b"authorization"):
        scheme, _, token = value.partition(" ")
        if scheme.lower() != "bearer":
            raise NoKeyError("send the key as Authorization: Bearer KEY")
        keys.add(token.strip())
    if len(keys) != 1:
        raise NoKeyError("send one key, as Authorization: Bearer KEY")
    return keys.pop()


def _ask_for_text(raw: bytes) -> Ask:
    """What a route that only works on a text is charged: about the text's tokens."""
    tokens = len(raw) // _BYTES_A_TOKEN
    return Ask(sequences=1, tokens=tokens, prompt_tokens=tokens)


def _is_preflight(scope: Scope) -> bool:
    headers: Headers = scope["headers"]
    return (
        scope["method"] == "OPTIONS"
        and bool(header_values(headers, b"origin"))
        and bool(header_values(headers, b"access-control-request-method"))
    )


def _is_form(scope: Scope) -> bool:
    kinds = header_values(scope["headers"], b"content-type")
    return any(kind.startswith("multipart/form-data") for kind in kinds)
