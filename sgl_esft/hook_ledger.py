"""What a hook into SGLang is, and the proof that it is in place.

    [plugin/hook_table.py: the ledger] -> install() -> SGLang's HookRegistry -> verify()
                                       -> subclass(): where SGLang takes a class from its caller

SGLang's plugin loader logs a failing hook and goes on, which would give a
running server that answers adapter requests with the base model. So every hook
here is checked twice: before it is applied, its target must exist and take the
parameters we know; afterwards, the target must really lead to our function.
Both failures are a `HookError`.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from packaging.specifiers import SpecifierSet

from sgl_esft.errors import HookError

_MISSING = object()

_required: tuple[Hook, ...] | None = None  # without which this process must not serve


class HookKind(Enum):
    """How a hook meets its target; the first four are SGLang's own kinds."""

    BEFORE = "before"  # fn(*args, **kwargs) -> (args, kwargs) or None for unchanged
    AFTER = "after"  # fn(result, *args, **kwargs) -> new result or None for unchanged
    AROUND = "around"  # fn(original, *args, **kwargs) -> result
    REPLACE = "replace"  # fn(*args, **kwargs) -> result
    CONSTANT = "constant"  # a module-level value, not a function; `function` is the value
    ADD = "add"  # an attribute SGLang asks for but does not define; `function` is its value


@dataclass(frozen=True)
class Hook:
    """One entry of the ledger."""

    target: str  # dotted path of a function, a method or (CONSTANT) a module attribute
    kind: HookKind
    function: Any  # the hook, or the new value of a CONSTANT
    why: str
    remove_when: str
    parameters: tuple[str, ...] = ()  # the target's parameter names, in order; () for a value
    sglang: str = ">=0.5.23,<0.5.24"  # versions the hook was tried with

    @property
    def is_value(self) -> bool:
        """Set by us as it is, not wrapped by SGLang's registry."""
        return self.kind in (HookKind.CONSTANT, HookKind.ADD)

    def owner(self) -> tuple[Any, str]:
        """The module or class the target lives in, and the target's name there."""
        owner, _, name = self.target.rpartition(".")
        try:
            return pkgutil.resolve_name(owner), name
        except (ImportError, AttributeError) as error:
            raise HookError(f"{self.target}: {error}") from error

    def resolve(self) -> Any:
        """The object the target names now. Raises HookError if there is none."""
        found = getattr(*self.owner(), _MISSING)
        if found is _MISSING:
            raise HookError(f"{self.target}: SGLang has no such name")
        return found


def _hook(
    kind: HookKind, target: str, function: Any, names: str = "", *, why: str, remove_when: str
) -> Hook:
    """One entry; `names` are the target's parameters, in order."""
    return Hook(target, kind, function, why, remove_when, tuple(names.split()))


before = partial(_hook, HookKind.BEFORE)
after = partial(_hook, HookKind.AFTER)
around = partial(_hook, HookKind.AROUND)
replace = partial(_hook, HookKind.REPLACE)
constant = partial(_hook, HookKind.CONSTANT)
add = partial(_hook, HookKind.ADD)


def check_version(hooks: Iterable[Hook], sglang_version: str) -> None:
    """Refuse an SGLang the hooks were not tried with. Raises HookError."""
    for hook in hooks:
        if sglang_version not in SpecifierSet(hook.sglang, prereleases=True):
            raise HookError(
                f"{hook.target} was tried with sglang {hook.sglang}, this is {sglang_version}; "
                "install a supported sglang"
            )


def check_signature(hook: Hook) -> None:
    """The target is what the hook was written for. Raises HookError.

    A function must take the parameters we know, a constant must exist, and what
    is added must not exist yet.
    """
    if hook.kind is HookKind.ADD:
        if hasattr(*hook.owner()):
            raise HookError(f"{hook.target}: SGLang defines it now; remove the hook")
        return
    target = hook.resolve()
    if hook.kind is HookKind.CONSTANT:
        return
    seen = tuple(inspect.signature(target).parameters)
    if seen != hook.parameters:
        raise HookError(f"{hook.target} takes {seen}, the hook was written for {hook.parameters}")


def install(hooks: Iterable[Hook]) -> None:
    """Check, register and apply `hooks` in this process. Raises HookError."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = tuple(hooks)
    for hook in hooks:
        check_signature(hook)
    for hook in hooks:
        if hook.is_value:
            setattr(*hook.owner(), hook.function)
        else:
            HookRegistry.register(hook.target, hook.function, HookType(hook.kind.value))
    HookRegistry.apply_hooks()
    verify(hooks)


def subclass(base: type, overrides: Iterable[Hook]) -> type:
    """A subclass of one of SGLang's classes in which each entry meets the method of its name.

    For SGLang's own factories, which take a class: nothing of SGLang is changed. Raises HookError
    for an entry that is not `base`'s or whose method is not as it was.
    """
    methods = {}
    for hook in overrides:
        owner, name = hook.owner()
        if hook.is_value or not (isinstance(owner, type) and issubclass(base, owner)):
            raise HookError(f"{hook.target} is no method of {base.__name__}")
        check_signature(hook)
        if getattr(base, name) is not hook.resolve():
            raise HookError(f"{hook.target}: {base.__name__} has one of its own")
        methods[name] = _override(hook, hook.resolve())
    return type(base.__name__, (base,), {"__module__": __name__, **methods})


def _override(hook: Hook, original: Any) -> Callable[..., Any]:
    function = hook.function
    if hook.kind is HookKind.REPLACE:
        return function  # type: ignore[no-any-return]

    def before(self: Any, *args: Any, **kwargs: Any) -> Any:
        function(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    def after(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        function(result, self, *args, **kwargs)
        return result

    def around(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(original, self, *args, **kwargs)

    by_kind = {HookKind.BEFORE: before, HookKind.AFTER: after, HookKind.AROUND: around}
    return functools.wraps(original)(by_kind[hook.kind])


def require(hooks: Iterable[Hook]) -> None:
    """Install the plugin's hooks; from now on `verify_required` asks for them."""
    global _required
    hooks = tuple(hooks)
    install(hooks)
    _required = hooks


def is_required() -> bool:
    """Whether this process has the plugin's hooks already."""
    return _required is not None


def verify_required() -> None:
    """The plugin's hooks were installed and are still in place. Raises HookError otherwise."""
    if _required is None:
        raise HookError(
            "SGLang did not load the plugin 'sgl_esft': is it left out of SGLANG_PLUGINS, "
            "or is the package not installed (pip install -e .)?"
        )
    verify(_required)


def verify(hooks: Iterable[Hook]) -> None:
    """Every hook's target leads to its function now. Raises HookError naming those that do not."""
    missing = [hook.target for hook in hooks if not is_in_place(hook)]
    if missing:
        raise HookError(
            "these hooks into SGLang are not in place, so adapters would be ignored: "
            + ", ".join(missing)
        )


def is_in_place(hook: Hook) -> bool:
    """Whether calling the target now reaches `hook.function`."""
    target = hook.resolve()
    if hook.is_value:
        return bool(target is hook.function)
    return leads_to(target, hook.function)


def leads_to(target: Any, function: Callable[..., Any]) -> bool:
    """Whether SGLang's registry has put `function` before `target`."""
    wrapper = inspect.unwrap(target, stop=lambda layer: _closes_over(layer, function))
    return _closes_over(wrapper, function)


def _closes_over(wrapper: Any, function: Callable[..., Any]) -> bool:
    cells = getattr(wrapper, "__closure__", None) or ()
    return any(cell.cell_contents is function for cell in cells)
