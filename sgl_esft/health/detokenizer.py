"""SGLang's detokenizer process, with a loop that beats. SGLang takes the function as argument."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.detokenizer_manager import DetokenizerManager, run_detokenizer_process

from sgl_esft.health.heartbeat import BeatingSocket


class BeatingDetokenizer(DetokenizerManager):
    """Beats whenever it waits for tokens."""

    def init_ipc_channels(self, port_args: Any, server_args: Any) -> None:
        self.recv_from_scheduler: Any
        super().init_ipc_channels(port_args, server_args)
        self.recv_from_scheduler = BeatingSocket(self.recv_from_scheduler)


def run_beating_detokenizer(server_args: Any, port_args: Any) -> None:
    """In place of SGLang's own, in the process that it has started for it."""
    run_detokenizer_process(server_args, port_args, BeatingDetokenizer)
