"""The frontend language's programs: an adapter for a whole run, and errors that reach the reader.

    function -> SglFunction.run(adapter=) -> SGLang's interpreter -> [ProgramState] -> the reader

A run's adapter is a backend of its own (endpoint.py). SGLang hands the backend on to forks and to
the caching of a batch's common prefix, and so they use the same adapter.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from sglang.lang import interpreter, ir
from sglang.lang.global_config import global_config

from sgl_esft.errors import EsftError, UserError
from sgl_esft.lang.endpoint import UNSET, AdapterChoice, RuntimeEndpoint, Unset, no_adapters


class ProgramState(interpreter.ProgramState):
    """A program's state: once a call failed for its adapter, reading or adding raises that error.

    SGLang's own then has a KeyError, a text that ends early, or waits for ever.
    """

    forked: weakref.WeakSet[Any]  # executors of all forks in the program, shared by its states

    def fork(
        self, size: int = 1, position_ids_offset: list[int] | None = None
    ) -> ProgramStateGroup:
        self._raise_failure()
        executors = self.stream_executor.fork(size, position_ids_offset)
        self.forked.update(executors)
        states = [ProgramState(each) for each in executors]
        for state in states:
            state.forked = self.forked
        self._raise_failure()  # of the request that caches the common prefix
        return ProgramStateGroup(states, self)

    def sync(self) -> None:
        if self.stream_executor.error_ is None:  # after an error there is nothing to wait for
            super().sync()

    def text(self) -> str:
        self.sync()
        self._raise_failure()
        return str(super().text())

    def messages(self) -> list[Any]:
        self.sync()
        self._raise_failure()
        return list(super().messages())

    def get_var(self, name: str) -> Any:
        self._raise_failure()
        try:
            return super().get_var(name)
        finally:
            self._raise_failure()

    def get_meta_info(self, name: str) -> Any:
        self._raise_failure()
        meta_info = super().get_meta_info(name)
        self._raise_failure()
        return meta_info

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        self._raise_failure()
        yield from super().text_iter(var_name)
        self._raise_failure()

    async def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[Any]:
        self._raise_failure()
        async for part in super().text_async_iter(var_name, return_meta_data):
            yield part
        self._raise_failure()

    def __iadd__(self, other: Any) -> Any:
        self._raise_failure()
        return super().__iadd__(other)

    def _raise_failure(self) -> None:
        error = self.stream_executor.error_
        if isinstance(error, EsftError):
            # A new one: the old one lives as long as the executor, and would keep alive whatever
            # its traceback meets, other forks and their threads included.
            raise type(error)(*error.args) from error


class ProgramStateGroup(interpreter.ProgramStateGroup):
    """A program's forks."""

    def join(self, mode: str = "gather_variable") -> None:
        for state in self.states:
            state.text()  # raises what went wrong
        super().join(mode)


class SglFunction(ir.SglFunction):
    """A program. `run` and `run_batch` take the adapter of the calls that name none."""

    def __init__(
        self,
        func: Callable[..., Any],
        num_api_spec_tokens: int | None = None,
        bind_arguments: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(_with_our_state(func), num_api_spec_tokens, bind_arguments)
        if "adapter" in self.arg_names:
            raise UserError(
                f"program {func.__name__!r} has an argument 'adapter', which is a keyword of "
                "run(): give the argument another name"
            )

    def bind(self, **kwargs: Any) -> SglFunction:
        bound = super().bind(**kwargs)
        return SglFunction(self.func, self.num_api_spec_tokens, bound.bind_arguments)

    def run(
        self, *args: Any, adapter: AdapterChoice = UNSET, backend: Any = None, **kwargs: Any
    ) -> Any:
        return _as_ours(super().run(*args, backend=_bound(backend, adapter), **kwargs))

    def run_batch(
        self,
        batch_kwargs: Sequence[Any],
        *,
        adapter: AdapterChoice = UNSET,
        backend: Any = None,
        **kwargs: Any,
    ) -> Any:
        return super().run_batch(batch_kwargs, backend=_bound(backend, adapter), **kwargs)

    def trace(self, *, adapter: AdapterChoice = UNSET, **kwargs: Any) -> Any:
        return super().trace(**kwargs)  # which calls no model


def function(func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None) -> Any:
    """Make a program of a function whose first argument is ``s``; a decorator, as in SGLang."""
    if func is None:
        return functools.partial(function, num_api_spec_tokens=num_api_spec_tokens)
    return SglFunction(func, num_api_spec_tokens)


def _with_our_state(func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    def program(s: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return func(_as_ours(s), *args, **kwargs)
        except EsftError:
            # A fork that waits for more to do would keep the process from ending.
            for executor in list(getattr(s, "forked", ())):
                executor.end()
            raise

    # SGLang reads the arguments' names off it.
    program.__signature__ = inspect.signature(func)  # type: ignore[attr-defined]
    return program


def _as_ours(state: Any) -> Any:
    """The same object, because a second one would end the program when it is dropped."""
    if type(state) is interpreter.ProgramState:  # not a tracer's
        state.forked = weakref.WeakSet()
        state.__class__ = ProgramState
    return state


def _bound(backend: Any, adapter: AdapterChoice) -> Any:
    """The backend of a run whose default is `adapter`."""
    backend = backend or global_config.default_backend
    if isinstance(adapter, Unset):
        return backend
    endpoint = getattr(backend, "endpoint", backend)
    if not isinstance(endpoint, RuntimeEndpoint):
        raise no_adapters(type(endpoint).__name__)
    return endpoint.with_adapter(adapter)
