"""SGLang's door `sglang.srt.plugins`: `register` runs in every SGLang process.

    register() -> which hooks apply here -> hook_ledger.require -> verified, or the process ends

SGLang catches every `Exception` a plugin raises, logs it and serves on. Serving
on would mean answering adapter requests with the base model, so a failure here
ends the process with `SystemExit`, which that handler does not catch; SGLang
takes the whole server down when one of its processes dies.
"""

from __future__ import annotations

import logging

from sgl_esft import hook_ledger, platform
from sgl_esft.hook_ledger import Hook
from sgl_esft.observe import console

logger = logging.getLogger(__name__)


def register() -> None:
    """Install this process's hooks. Raises SystemExit when one cannot be put in place."""
    try:
        install()
    except Exception as error:  # an unknown SGLang may fail in any way, an ImportError above all
        raise console.refusal("sgl_esft", error, logger) from error


def install() -> None:
    """As `register`, but raises HookError or ConfigError."""
    if not hook_ledger.is_required():
        hooks = select_hooks()
        hook_ledger.check_version(hooks, sglang_version())
        hook_ledger.require(hooks)


def select_hooks() -> tuple[Hook, ...]:
    """The ledger's entries that apply to this process."""
    from sgl_esft import env
    from sgl_esft.config import current_config
    from sgl_esft.plugin import hook_table

    selected: tuple[Hook, ...] = hook_table.JSON_LOG_HOOKS if env.log_format() == "json" else ()
    if platform.is_active():
        selected += hook_table.CPU_HOOKS
    if env.heartbeat_table() is not None:
        selected += hook_table.LAUNCHER_HOOKS
    config = current_config()
    if config is not None:
        selected += hook_table.WEAVE_HOOKS
        selected += hook_table.ROUTER_HOOKS if config.reroute == "router" else ()
        selected += hook_table.TIER_HOOKS if config.tiers is not None else ()
        has_breaks = config.tiers is not None and not platform.is_active()
        selected += hook_table.GRAPH_HOOKS if has_breaks else ()
        selected += hook_table.LORA_HOOKS if config.lora and platform.is_active() else ()
    return selected


def manager_overrides() -> tuple[Hook, ...]:
    """The ledger's entries for the TokenizerManager of this process, which serves HTTP."""
    from sgl_esft import env
    from sgl_esft.config import current_config
    from sgl_esft.plugin import hook_table

    is_json = env.log_format() == "json"
    selected = hook_table.ENDING_OVERRIDES + hook_table.REQUEST_OVERRIDES
    selected += hook_table.JSON_LOG_OVERRIDES if is_json else ()
    if current_config() is not None:
        selected += hook_table.WEAVE_OVERRIDES + hook_table.OBSERVE_OVERRIDES
    return selected


def sglang_version() -> str:
    """The version that is installed."""
    import sglang

    return str(sglang.__version__)
