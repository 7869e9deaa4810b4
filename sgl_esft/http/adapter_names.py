"""Which adapter an HTTP request means, settled before SGLang sees the request.

    gate --body's adapter / lora_path / model--> [resolve] --> one adapter for each prompt, or 404
      └--RequestBody--> [AdapterNames: on disk -> library.ensure] --> SGLang

SGLang knows `lora_path` and `model="base:adapter"`, ignores fields and model
names it does not know, and would then answer with the base model. Here
`"adapter"` means the same as `lora_path`, `model="adapter"` works as the names
in /v1/models suggest, and what names nobody is a 404.
"""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sgl_esft.errors import (
    AdapterNameError,
    ConfigError,
    EsftError,
    NotAllowedError,
    TooManyAdaptersError,
    UnknownAdapterError,
)
from sgl_esft.fields.prompts import prompts_of
from sgl_esft.http.answers import App, Receive, Scope, Send, send_error
from sgl_esft.http.body import body_of
from sgl_esft.http.classes import routed_path

Body = dict[str, Any]
# Returns once a request may use all these adapters. Raises EsftError.
Ensure = Callable[[Collection[str]], Awaitable[None]]

# Routes on which SGLang 0.5.23 reads `lora_path`.
ADAPTER_ROUTES = frozenset({"/generate", "/v1/completions", "/v1/chat/completions", "/invocations"})
# Routes of SGLang 0.5.23 that read whole weights, so also slots that have no memory.
ROUTES_OVER_ALL_SLOTS = frozenset({"/weights_checker", "/send_weights_to_remote_instance"})
_MAX_COMPARED, _MAX_NAME = 256, 64  # names, characters: a comparison takes time
# Between the names, and between the ids, of two adapters in one request. No name can have it.
BESIDE = "+"
_KIND_NAMES = {"esft": "ESFT", "lora": "LoRA"}
# Names of the base model that clients send when they do not care.
BASE_ALIASES = frozenset({"", "default", "base"})


def parts_of(joined: str) -> tuple[str, ...]:
    """The names, or ids, of the adapters that are named together: one, or two."""
    return tuple(joined.split(BESIDE))


@dataclass(frozen=True)
class KnownNames:
    """Names a request may use at this moment."""

    adapters: Collection[str]  # loaded, or loaded when a request asks for them
    base_models: frozenset[str]  # the served model's names, besides BASE_ALIASES
    of_some: bool = False  # of a key that may not use all: what is not here may be others'
    # A name -> the kind of its adapter, None where that is not known; the whole is None on a server
    # that takes one kind only, where nobody names two adapters for a prompt.
    kind_of: Callable[[str], str | None] | None = None

    def is_base(self, model: str) -> bool:
        return model in self.base_models or model in BASE_ALIASES

    def check_adapter(self, name: object) -> str | None:
        """The adapter's name; None for the base. Raises EsftError.

        Two adapters for one prompt are a list of their names, or these joined by BESIDE.
        """
        if name is None:
            return None
        if self.kind_of is not None and isinstance(name, list):
            return self._check_pair(name)
        if self.kind_of is not None and isinstance(name, str) and BESIDE in name:
            return self._check_pair(parts_of(name))
        return self._check_one(name)

    def _check_one(self, name: object) -> str:
        if not isinstance(name, str):
            raise AdapterNameError(f"an adapter is named by a string, not by {_shown(name)}")
        if name not in self.adapters:
            raise self._unknown(f"adapter {_shown(name)} is not known", name)
        return name

    def _check_pair(self, names: Sequence[object]) -> str:
        """One or two names, joined; the ESFT adapter's first."""
        if not 1 <= len(names) <= 2 or len(set(map(str, names))) != len(names):
            raise TooManyAdaptersError(
                f"a prompt has one adapter, or two of different kinds, not {_shown(list(names))}"
            )
        found = [self._check_one(name) for name in names]
        kinds = [self.kind_of(name) if self.kind_of else None for name in found]
        if len(kinds) == 2 and kinds[0] is not None and kinds[0] == kinds[1]:
            raise TooManyAdaptersError(
                f"a prompt may have one ESFT and one LoRA adapter, and {found[0]!r} and "
                f"{found[1]!r} are both {_KIND_NAMES.get(kinds[0], kinds[0])} adapters"
            )
        return BESIDE.join(reversed(found) if kinds[0] == "lora" else found)

    def adapter_of_model(self, model: str) -> str | None:
        """What `model` asks for: an adapter's name, or None for the base."""
        if model in self.adapters:
            return model
        if self.kind_of is not None and BESIDE in model and ":" not in model:
            return self.check_adapter(model)
        if self.is_base(model):
            return None
        _, colon, adapter = model.partition(":")
        if not colon:
            what = f"model {_shown(model)} is neither the base model nor an adapter"
            raise self._unknown(what, model)
        return self.check_adapter(adapter.strip() or None)

    def _unknown(self, what: str, name: str) -> EsftError:
        """The error of a name that nothing has: with the nearest, of the names here only."""
        # Sorted, so that of many names the same are looked at each time.
        names = sorted(islice(self.adapters, _MAX_COMPARED))
        near = difflib.get_close_matches(name.rpartition(":")[2][:_MAX_NAME], names, 1)
        hint = f"did you mean {near[0]!r}?" if near else self._where_to_look()
        if self.of_some:
            return NotAllowedError(f"this key may not use that adapter; {hint}")
        return UnknownAdapterError(f"{what}; {hint}")

    def _where_to_look(self) -> str:
        listed = "GET /v1/models lists what is loaded"
        if self.kind_of is not None:
            return listed
        return f"{listed}, and LoRA adapters are not enabled: --enable-lora takes them"


@dataclass(frozen=True)
class Resolved:
    """What a body asks for."""

    rewritten: Body | None  # what SGLang should see; None: what came
    asked: frozenset[str | None]  # adapters; None is the base


def resolve(path: str, body: Body, names: KnownNames, *, everywhere: bool = False) -> Resolved:
    """Which adapters a body means, by `names`.

    everywhere: check `lora_path` on routes besides ADAPTER_ROUTES too, of which some read it.
    Raises AdapterNameError, UnknownAdapterError, or ConfigError for fields that contradict each
    other and for a route that cannot use an adapter.
    """
    rewritten = _rewritten(path, body, names)
    if path not in ADAPTER_ROUTES and not everywhere:
        return Resolved(rewritten, frozenset())
    named = (rewritten or body).get("lora_path")
    each = named if isinstance(named, list) and named else [named]
    asked = [names.check_adapter(name) for name in each]
    if names.kind_of is None:
        return Resolved(rewritten, frozenset(asked))
    parts = (parts_of(name) if name else (None,) for name in asked)
    return Resolved(rewritten, frozenset(part for each in parts for part in each))


def _rewritten(path: str, body: Body, names: KnownNames) -> Body | None:
    """The body SGLang should see, None for the one it was given."""
    fields = ("adapter", "lora_path") if path in ADAPTER_ROUTES else ("adapter",)
    for field in ("adapter", "lora_path"):  # some of the other routes read the second one too
        _check_batch(path, body.get(field), body, has_pairs=names.kind_of is not None)
    asked = [adapter for adapter in _asked_for(path, body, fields, names) if adapter is not None]
    if not asked:
        return None
    if path not in ADAPTER_ROUTES:
        raise ConfigError(
            f"{path} cannot use an adapter; these routes can: {', '.join(sorted(ADAPTER_ROUTES))}"
        )
    if any(adapter != asked[0] for adapter in asked):
        raise ConfigError(f"the request names different adapters: {_shown(asked)}")
    if body.get("lora_path") == asked[0] and "adapter" not in body:
        return None
    return {**{k: v for k, v in body.items() if k != "adapter"}, "lora_path": asked[0]}


def _asked_for(
    path: str, body: Mapping[str, Any], fields: tuple[str, ...], names: KnownNames
) -> list[Any]:
    """Each field's adapter: a name, a batch's list of names, or None for the base."""
    is_batch = prompts_of(path, body).is_batch
    asked = [_checked(body.get(field), names, is_batch=is_batch) for field in fields]
    model = body.get("model")
    if isinstance(model, str):
        asked.append(names.adapter_of_model(model))
    return asked


def _checked(value: object, names: KnownNames, *, is_batch: bool) -> Any:
    if not isinstance(value, list) or not is_batch:
        return names.check_adapter(value)
    checked = [names.check_adapter(name) for name in value]
    return checked if any(name is not None for name in checked) else None


def _check_batch(path: str, adapter: object, body: Mapping[str, Any], *, has_pairs: bool) -> None:
    """A list of adapters needs a list of prompts of its length. Raises ConfigError.

    SGLang takes a list with a single prompt, and its scheduler fails on it. has_pairs: on this
    server such a list names two adapters for the prompt.
    """
    if not isinstance(adapter, list):
        return
    prompts = prompts_of(path, body)
    if has_pairs and not prompts.is_batch:
        return
    if not prompts.is_batch or len(adapter) != prompts.num:
        num = prompts.num if prompts.is_batch else "a single"
        raise ConfigError(
            f"the request has {len(adapter)} adapters for {num} prompt(s): "
            "name one for each, or one for all, as a string"
        )


def _shown(value: object) -> str:
    return repr(value)[:120]


class AdapterNames:
    """Loads what a body asks for before SGLang sees it, or answers what is wrong with the names.

    `refused_routes` are answered with an error, whatever the method. `ensure` None: weaving is off,
    and no body names an adapter.
    """

    def __init__(
        self, app: App, ensure: Ensure | None, refused_routes: Collection[str] = ()
    ) -> None:
        self._app = app
        self._ensure = ensure
        self._refused_routes = refused_routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                await self._prepare(scope)
        except EsftError as error:
            await send_error(send, error)
        else:
            await self._app(scope, receive, send)

    async def _prepare(self, scope: Scope) -> None:
        path = routed_path(scope)
        if path in self._refused_routes:
            raise ConfigError(
                f"{path} reads every expert slot, also those without memory: start the server with "
                "--expert-memory padded"
            )
        body = body_of(scope)
        if body is not None and body.refusal is not None:
            raise body.refusal
        if body is not None and body.adapters and self._ensure is not None:
            await self._ensure(body.adapters)
