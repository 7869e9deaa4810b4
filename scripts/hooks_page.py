"""docs/hooks.md from the hook ledgers: `python -m scripts.hooks_page`.

    sgl_esft/plugin/hook_table.py, sgl_elastic's ledgers -> [page] -> docs/hooks.md

A test holds the page to the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sgl_elastic.engine.hooks import ENGINE_HOOKS
from sgl_elastic.front_hooks import FRONT_HOOKS, FRONT_OVERRIDES
from sgl_esft.hook_ledger import Hook, HookKind
from sgl_esft.plugin.hook_table import (
    CPU_HOOKS,
    GRAPH_HOOKS,
    JSON_LOG_HOOKS,
    JSON_LOG_OVERRIDES,
    LAUNCHER_HOOKS,
    LORA_HOOKS,
    OBSERVE_OVERRIDES,
    ROUTER_HOOKS,
    SIGNAL_OVERRIDES,
    TIER_HOOKS,
    WEAVE_HOOKS,
    WEAVE_OVERRIDES,
)

ALL_HOOKS: tuple[Hook, ...] = (
    *WEAVE_HOOKS,
    *JSON_LOG_HOOKS,
    *ROUTER_HOOKS,
    *GRAPH_HOOKS,
    *TIER_HOOKS,
    *LORA_HOOKS,
    *LAUNCHER_HOOKS,
    *CPU_HOOKS,
    *ENGINE_HOOKS,
    *FRONT_HOOKS,
)
ALL_OVERRIDES: tuple[Hook, ...] = (
    *WEAVE_OVERRIDES,
    *OBSERVE_OVERRIDES,
    *JSON_LOG_OVERRIDES,
    *SIGNAL_OVERRIDES,
    *FRONT_OVERRIDES,
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

Three other ways change nothing of SGLang. What it takes a registration for is registered with it:
the runner core of woven layers (`sgl_esft/plugin/runner_core.py`), and the CPU platform's experts,
attention and MLA handler (`sgl_esft/platform/operators.py`). Where its server takes a class or a
function from its caller, our launcher hands one over (`launch/tokenizer.py`,
`sgl_esft/health/engine_processes.py`): the *overrides* at the end of this page are the methods of
those classes, checked as hooks are. What its platform interface asks for, the CPU platform answers
(`sgl_esft/platform/cpu.py`).

In all: {counts}.
"""


def page() -> str:
    """The whole page."""
    parts = [
        _HEAD.format(counts=_counts()),
        *_section(
            "Weaving", "Installed unless the server was started with `--no-esft`.", WEAVE_HOOKS
        ),
        *_section("JSON logs", "Installed with `--log-format json`.", JSON_LOG_HOOKS),
        *_section("Rerouting in the router", "Installed with `--reroute router`.", ROUTER_HOOKS),
        *_section("Experts in tiers", "Installed with `--expert-cache`.", TIER_HOOKS),
        *_section(
            "Graphs with breaks",
            "Installed with `--expert-cache` on an accelerator.",
            GRAPH_HOOKS,
        ),
        *_section("LoRA on the CPU platform", "Installed with `--enable-lora` there.", LORA_HOOKS),
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
        *_section(
            "Overrides: weaving",
            "Methods of the class that our launcher starts SGLang's `TokenizerManager` as.",
            WEAVE_OVERRIDES,
        ),
        *_section("Overrides: metrics and logs", "With weaving.", OBSERVE_OVERRIDES),
        *_section("Overrides: JSON logs", "With `--log-format json`.", JSON_LOG_OVERRIDES),
        *_section(
            "Overrides: the end of the server",
            "Of the class of its signal handlers, with and without weaving: "
            "[health.md](health.md).",
            SIGNAL_OVERRIDES,
        ),
        *_section("Overrides: the elastic runtime", "With `--elastic`.", FRONT_OVERRIDES),
    ]
    return "\n".join(parts)


def _counts() -> str:
    replacing = sum(hook.kind is HookKind.REPLACE for hook in ALL_HOOKS)
    return f"{len(ALL_HOOKS)} hooks, {replacing} of which replace; {len(ALL_OVERRIDES)} overrides"


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
