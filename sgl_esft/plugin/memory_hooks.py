"""The way of a memory report from the ranks to HTTP.

    GET /v1/memory -> SGLang's get_internal_state -> [add_report] on every rank -> reply
    GET /v1/heat   ->            "                ->       "      -> heat_hooks.py

SGLang asks every scheduler for its state; the reports of all ranks travel in that reply. They are
made between two steps, so each is made only for the question whose subject it is.
"""

from __future__ import annotations

import json
from typing import Any

from sgl_esft import sglang_api
from sgl_esft.config import required_config
from sgl_esft.memory.measure import measure_device
from sgl_esft.memory.report import MemoryReport
from sgl_esft.plugin import heat_hooks

STATE_KEY = "esft_memory"


def add_report(reply: Any, scheduler: Any, recv_req: Any) -> Any:
    """Add to a scheduler's state what was asked for, if anything."""
    if recv_req.rid == STATE_KEY:
        add_memory(reply, scheduler)
    elif recv_req.rid == heat_hooks.STATE_KEY:
        heat_hooks.add_heat(reply, sglang_api.adapter_manager(scheduler).heat)
    return reply


def add_memory(reply: Any, scheduler: Any) -> None:
    """Gather all ranks' reports into the reply; every rank handles the request, so all meet."""
    manager = sglang_api.adapter_manager(scheduler)
    own = measure_device(
        manager.plane,
        required_config().expert_memory,
        sglang_api.tp_rank(),
        sglang_api.device_of(scheduler),
        sglang_api.kv_memory(scheduler),
        None if manager.tiers is None else manager.tiers.report(),
        None if manager.lora is None else manager.lora.memory(),
    )
    reports = sglang_api.gather_bytes(json.dumps(own.to_json()).encode())
    reply.internal_state[STATE_KEY] = {"devices": [json.loads(report) for report in reports]}


async def fetch_report(tokenizer_manager: Any) -> MemoryReport:
    """The server's report, asked from the process that serves HTTP."""
    states = await sglang_api.internal_states(tokenizer_manager, STATE_KEY)
    return MemoryReport.from_json(states[0][STATE_KEY])
