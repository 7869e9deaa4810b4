"""The classes that SGLang's server is started with, in the process that serves HTTP.

    hook_table.py's overrides -> [manager_class] -> SGLang's init_tokenizer_manager, which takes one

Nothing of SGLang is changed for them: a process that was not started by us has SGLang's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sgl_esft import hook_ledger
from sgl_esft.errors import HookError
from sgl_esft.hook_ledger import Hook
from sgl_esft.plugin import hook_table, register


def manager_class(more: tuple[Hook, ...] = ()) -> type:
    """SGLang's TokenizerManager with our overrides and `more`. Raises HookError."""
    from sglang.srt.managers.tokenizer_manager import SignalHandler, TokenizerManager

    overrides = register.manager_overrides() + more
    hook_ledger.check_version(overrides + hook_table.SIGNAL_OVERRIDES, register.sglang_version())
    base: Any = hook_ledger.subclass(TokenizerManager, overrides)
    handler = hook_ledger.subclass(SignalHandler, hook_table.SIGNAL_OVERRIDES)

    class ServingTokenizerManager(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.signal_handler_class = handler

    return ServingTokenizerManager


def initializer(manager: type) -> Callable[..., Any]:
    """SGLang's own start of its tokenizer manager, of the given class."""
    from sglang.srt.entrypoints.engine import init_tokenizer_manager

    return partial(init_tokenizer_manager, TokenizerManagerClass=manager)


def check_is(manager: Any, wanted: type) -> None:
    """Raises HookError if SGLang serves with a manager of another class."""
    if not isinstance(manager, wanted):
        raise HookError(
            f"SGLang serves with {type(manager).__name__}, not with the class it was started with, "
            "so requests would not have ids of their own, nor adapters"
        )
