"""The frontend language's backend: which adapter each request to the server names.

    gen(adapter=) -> SGLang's interpreter -> [RuntimeEndpoint] -> POST /generate with lora_path

The interpreter merges a call's sampling parameters with the run's by a list of names, and an
adapter is not on it. But it hands two things on to the backend unread, the `dtype` of a gen and
the `choices_method` of a select: the adapter travels packed with those.
"""

from __future__ import annotations

import contextlib
import copy
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

import sglang
from sglang.lang import interpreter, ir
from sglang.lang.choices import ChoicesDecision, ChoicesSamplingMethod

from sgl_esft.errors import EsftError, HookError, UnknownAdapterError, UserError
from sgl_esft.formats.adapter_paths import validate_adapter_name


class Unset(enum.Enum):
    """The type of UNSET."""

    UNSET = enum.auto()

    def __repr__(self) -> str:
        return self.name


UNSET = Unset.UNSET
"""No adapter is named here; `None` names the base model."""

AdapterChoice: TypeAlias = str | Unset | None


@dataclass(frozen=True)
class _AdapterAndDtype:
    """A gen's `dtype`, with the adapter. SGLang's own endpoint refuses it as no dtype."""

    adapter: str | None
    dtype: Any


@dataclass(frozen=True)
class _AdapterAndMethod(ChoicesSamplingMethod):
    """A select's `choices_method`, with the adapter. SGLang's own endpoint would call it."""

    adapter: str | None
    method: Any

    def __call__(self, **_: Any) -> ChoicesDecision:
        raise no_adapters(f"the backend of select(adapter={self.adapter!r})")


def name_adapter(expr: Any, adapter: AdapterChoice) -> Any:
    """Make a new gen or select expression a call of this adapter."""
    if isinstance(adapter, Unset):
        return expr
    if isinstance(expr, ir.SglSelect):
        expr.choices_method = _AdapterAndMethod(adapter, expr.choices_method)
    else:
        params = expr.sampling_params
        params.dtype = _AdapterAndDtype(adapter, params.dtype)
    return expr


def no_adapters(what: str) -> UserError:
    """The error of a backend that cannot name an adapter to its server."""
    return UserError(f"{what} knows no adapters: use a sgl_esft.lang.RuntimeEndpoint")


class RuntimeEndpoint(sglang.RuntimeEndpoint):
    """SGLang's client of a server, with an adapter for the calls that name none.

    It never changes once made, because the programs of a batch share it between threads: a call
    that names an adapter goes through a copy.
    """

    adapter: str | None = None

    def __init__(
        self, base_url: str, *args: Any, adapter: str | None = None, **kwargs: Any
    ) -> None:
        """SGLang's arguments, and the default adapter. Raises AdapterNameError."""
        self.adapter = _checked(adapter)
        super().__init__(base_url, *args, **kwargs)

    def with_adapter(self, adapter: str | None) -> RuntimeEndpoint:
        """The same server with another default adapter. Raises AdapterNameError."""
        other = copy.copy(self)
        other.adapter = _checked(adapter)
        return other

    def generate(self, s: Any, sampling_params: Any) -> Any:
        with _remembered_by(s):
            endpoint = self._for_call(sampling_params)
            return sglang.RuntimeEndpoint.generate(endpoint, s, sampling_params)

    def generate_stream(self, s: Any, sampling_params: Any) -> Iterator[Any]:
        with _remembered_by(s):
            endpoint = self._for_call(sampling_params)
            try:
                yield from sglang.RuntimeEndpoint.generate_stream(endpoint, s, sampling_params)
            except KeyError:
                # In a stream the server puts an error where SGLang's client reads the text. The
                # same prompt without a stream says what it is.
                sglang.RuntimeEndpoint.commit_lazy_operations(endpoint, s)
                raise

    def select(
        self, s: Any, choices: Sequence[str], temperature: float, choices_method: Any
    ) -> ChoicesDecision:
        with _remembered_by(s):
            endpoint, method = self, choices_method
            if isinstance(choices_method, _AdapterAndMethod):
                endpoint = self.with_adapter(choices_method.adapter)
                method = choices_method.method
            return sglang.RuntimeEndpoint.select(endpoint, s, choices, temperature, method)

    def commit_lazy_operations(self, s: Any) -> None:
        with _remembered_by(s):
            super().commit_lazy_operations(s)

    def cache_prefix(self, prefix_str: str) -> None:
        # SGLang's own names no adapter, and so would fill the base model's part of the cache.
        super().commit_lazy_operations(SimpleNamespace(text_=prefix_str, images_=[]))

    def _for_call(self, sampling_params: Any) -> RuntimeEndpoint:
        """The endpoint of a call; sampling_params is this call's own copy and loses the adapter."""
        packed = sampling_params.dtype
        if not isinstance(packed, _AdapterAndDtype):
            return self
        sampling_params.dtype = packed.dtype
        return self.with_adapter(packed.adapter)

    def _add_images(self, s: Any, data: dict[str, Any]) -> None:
        """SGLang's last touch on the body of every request to /generate."""
        super()._add_images(s, data)
        if self.adapter is not None:
            data["lora_path"] = self.adapter

    def _assert_success(self, res: Any) -> None:
        try:
            super()._assert_success(res)
        except RuntimeError as error:
            if self.adapter is None or not _is_unknown(self.adapter, res.status_code, str(error)):
                raise
            raise UnknownAdapterError(
                f"adapter {self.adapter!r} is not loaded at {self.base_url}: load it there, or "
                f"name one that is. The server says: {error}"
            ) from error


def _checked(adapter: str | None) -> str | None:
    # An empty name would mean "no adapter" to the server.
    return None if adapter is None else validate_adapter_name(adapter)


def _is_unknown(adapter: str, status: int, answer: str) -> bool:
    """Whether the server refused this adapter; 400 is what SGLang itself answers."""
    refused = status == 404 or (status == 400 and "never been loaded" in answer)
    return refused and adapter in answer


@contextlib.contextmanager
def _remembered_by(s: Any) -> Iterator[None]:
    """Keep our errors where SGLang does, but before it wakes those who wait for the answer."""
    try:
        yield
    except EsftError as error:
        s.error_ = error
        raise


def _check_sglang() -> None:
    """Raises HookError if this SGLang would drop an adapter on its way into the request.

    A client may have another SGLang than the one we were tried with, and a dropped adapter would
    mean the base model's answer.
    """
    try:
        works = _passes_dtype_on() and _asks_for_images()
    except AttributeError:
        works = False
    if not works:
        raise HookError(
            f"the frontend language of SGLang {sglang.__version__} would drop adapters: use the "
            "version that requirements/ names"
        )


def _passes_dtype_on() -> bool:
    executor = SimpleNamespace(
        default_sampling_para=ir.SglSamplingParams(),
        chat_template=SimpleNamespace(stop_str=()),
    )
    packed = _AdapterAndDtype("adapter", None)
    call = ir.SglSamplingParams(dtype=packed)
    return interpreter.StreamExecutor._resolve_sampling_params(executor, call).dtype is packed


def _asks_for_images() -> bool:
    """Whether every request goes through `_add_images`, select's by way of another method."""

    def names(method: str) -> tuple[str, ...]:
        used: tuple[str, ...] = getattr(sglang.RuntimeEndpoint, method).__code__.co_names
        return used

    posts = ("generate", "generate_stream", "commit_lazy_operations", "_generate_http_request")
    return all("_add_images" in names(each) for each in posts) and (
        "http_request" not in names("select")
    )


_check_sglang()
