"""docs/hooks.md from the hook ledgers: `python -m scripts.hooks_page`.

    sgl_esft/plugin/hook_table.py, sgl_elastic's ENGINE_HOOKS and FRONT_HOOKS -> [page] ->
    docs/hooks.md

A test holds the page to the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sgl_elastic.engine.hooks import ENGINE_HOOKS
from sgl_elastic.front_hooks import FRONT_HOOKS
from sgl_esft.hook_ledger import Hook
from sgl_esft.plugin.hook_table import (
    CPU_HOOKS,
    JSON_LOG_HOOKS,
    LAUNCHER_HOOKS,
    OBSERVE_HOOKS,
    ROUTER_HOOKS,
    WEAVE_HOOKS,
)

ALL_HOOKS: tuple[Hook, ...] = (
    *WEAVE_HOOKS,
    *OBSERVE_HOOKS,
    *JSON_LOG_HOOKS,
    *ROUTER_HOOKS,
    *LAUNCHER_HOOKS,
    *CPU_HOOKS,
    *ENGINE_HOOKS,
    *FRONT_HOOKS,
)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "hooks.md"

_HEAD = """\
# Hooks into SGLang

Made from `sgl_esft/plugin/hook_table.py`, `sgl_elastic/engine/hooks.py` and
`sgl_elastic/front_hooks.py` by `python -m scripts.hooks_page`; do not edit.

SGLang is not modified. It is entered through its two plugin doors, the entry points
`sglang.srt.platforms` and `sglang.srt.plugins`, and the second installs the hooks below in every
process of SGLang. A *before*, *after*, *around* or *replace* hook is one of SGLang's own kinds. A
*constant* hook sets a module's value, an *add* hook an attribute that SGLang asks for but does not
define.

SGLang logs a plugin that fails and serves on. So each hook is checked before it is installed: its
target must exist and take the parameters that are known (of an *add* hook, it must not exist). It
is checked again once it is installed, before the server starts, and with weaving when the model has
been loaded. A hook that fails a check ends the process, and the server with it.
"""


def page() -> str:
    """The whole page."""
    parts = [
        _HEAD,
        *_section(
            "Weaving", "Installed unless the server was started with `--no-esft`.", WEAVE_HOOKS
        ),
        *_section("Metrics and logs", "Installed with weaving.", OBSERVE_HOOKS),
        *_section("JSON logs", "Installed with `--log-format json`.", JSON_LOG_HOOKS),
        *_section("Rerouting in the router", "Installed with `--reroute router`.", ROUTER_HOOKS),
        *_section(
            "Start, health and end of the server",
            "Installed by our launcher, with and without weaving: [health.md](health.md).",
            LAUNCHER_HOOKS,
        ),
        *_section(
            "The CPU reference platform",
            "Installed where that [platform](cpu_platform.md) is active.",
            CPU_HOOKS,
        ),
        *_section(
            "The elastic runtime: engines",
            "Installed in the processes of an engine that `--elastic` has started, by an entry of "
            "their own in `sglang.srt.plugins`.",
            ENGINE_HOOKS,
        ),
        *_section(
            "The elastic runtime: the process that serves HTTP",
            "Installed there with `--elastic`, before SGLang starts.",
            FRONT_HOOKS,
        ),
    ]
    return "\n".join(parts)


def _section(title: str, when: str, hooks: Sequence[Hook]) -> list[str]:
    return [f"## {title}\n", f"{when}\n", *map(_entry, hooks)]


def _entry(hook: Hook) -> str:
    return (
        f"### `{_short(hook.target)}`\n\n"
        f"- target: `{hook.target}`\n"
        f"- kind: {hook.kind.value}, {_meets(hook)}\n"
        f"- why: {hook.why}\n"
        f"- SGLang: {hook.sglang}\n"
        f"- remove when: {hook.remove_when}\n"
    )


def _short(target: str) -> str:
    """The last two parts of a dotted name: class and method, or module and function."""
    return ".".join(target.split(".")[-2:])


def _meets(hook: Hook) -> str:
    if not callable(hook.function):
        return f"becomes `{hook.function!r}`"
    return f"by `{hook.function.__module__}.{hook.function.__name__}`"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
