"""SGLang's door `sglang.srt.plugins` for elastic engines; other processes it leaves alone.

SGLang logs what a plugin raises and serves on, so a failure here ends the process.
"""

from __future__ import annotations

import logging

from sgl_elastic.instance import engine_config
from sgl_esft.observe import console

logger = logging.getLogger(__name__)

_is_installed = False


def register() -> None:
    """Install the engine's hooks. Raises SystemExit when one cannot be put in place."""
    global _is_installed
    if _is_installed or not engine_config.is_engine():
        return
    try:
        _install()
    except Exception as error:  # an unknown SGLang may fail in any way
        raise console.refusal("sgl_elastic", error, logger) from error
    _is_installed = True


def _install() -> None:
    import sglang

    from sgl_elastic.engine import sglang_api
    from sgl_elastic.engine.hooks import ENGINE_HOOKS
    from sgl_esft import hook_ledger

    hook_ledger.check_version(ENGINE_HOOKS, str(sglang.__version__))
    hook_ledger.install(ENGINE_HOOKS)
    sglang_api.register_prefix_cache()
