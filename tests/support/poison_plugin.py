"""A plugin of SGLang's by which certain prompts kill a rank, or make it raise as they come in.

tests --install--> folder for PYTHONPATH --entry point--> every SGLang process --> [register]
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

POISON = [7] * 32  # token ids of a whole prompt
UNFIT = [8] * 32


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

    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}.run_batch", end_if_poisoned, HookType.BEFORE)
    HookRegistry.register(f"{scheduler}._add_request_to_queue", queue_unfit, HookType.AROUND)


def end_if_poisoned(scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    """As a kernel's fault would: no exception, no word."""
    if any(list(req.origin_input_ids) == POISON for req in batch.reqs):
        os.kill(os.getpid(), signal.SIGKILL)


def queue_unfit(original: Any, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """As where SGLang trips over what a client sent: the request is in the queue by then."""
    original(scheduler, req, *args, **kwargs)
    if list(req.origin_input_ids) == UNFIT:
        raise OverflowError("Python int too large to convert to C long")
