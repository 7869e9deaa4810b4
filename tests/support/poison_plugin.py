"""A plugin of SGLang's by which certain prompts kill the rank that is about to compute them.

tests --install--> folder for PYTHONPATH --entry point--> every SGLang process --> [register]
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

POISON = [7] * 32  # token ids of a whole prompt


def install(folder: Path) -> Path:
    """A folder that makes this module a plugin of every Python that has it in its path."""
    described = folder / "poison-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: poison\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(
        f"[sglang.srt.plugins]\npoison = {__name__}:register\n"
    )
    return folder


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.managers.scheduler.Scheduler.run_batch"
    HookRegistry.register(target, end_if_poisoned, HookType.BEFORE)


def end_if_poisoned(scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    """As a kernel's fault would: no exception, no word."""
    if any(list(req.origin_input_ids) == POISON for req in batch.reqs):
        os.kill(os.getpid(), signal.SIGKILL)
