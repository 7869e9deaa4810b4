"""SGLang's processes beside the front, as we have them run; it takes the functions.

    launch_server -> scheduler, detokenizer -> [run_...] -> SGLang's own -> ending.leave_after

They end without tearing down modules: Python would do that in an order in which Triton's extension
finds its own types still in use, and prints a list of some hundred names.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.detokenizer_manager import DetokenizerManager, run_detokenizer_process
from sglang.srt.managers.scheduler import run_scheduler_process

from sgl_esft.health import ending
from sgl_esft.health.heartbeat import BeatingSocket


class BeatingDetokenizer(DetokenizerManager):
    """Beats whenever it waits for tokens."""

    def init_ipc_channels(self, port_args: Any, server_args: Any) -> None:
        self.recv_from_scheduler: Any
        super().init_ipc_channels(port_args, server_args)
        self.recv_from_scheduler = BeatingSocket(self.recv_from_scheduler)


def run_beating_detokenizer(server_args: Any, port_args: Any) -> None:
    """In place of SGLang's own, in the process that it has started for it."""
    ending.leave_after(
        lambda: run_detokenizer_process(server_args, port_args, BeatingDetokenizer) or 0
    )


def run_scheduler(*args: Any, **options: Any) -> None:
    """In place of SGLang's own, in the process of a rank."""
    ending.leave_after(lambda: run_scheduler_process(*args, **options) or 0)
