"""SGLang's registry, really, in a manager whose ranks are a dictionary.

test --> SglangEngine --> Ranks --messages--> FakeManager --answers-->
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang.srt.lora.lora_registry import LoRARegistry

from sgl_esft import sglang_api
from sgl_esft.config import EsftConfig
from sgl_esft.formats.adapter_config import AdapterKind
from sgl_esft.formats.manifest import check_loadable
from sgl_esft.formats.model_spec import read_moe_spec
from sgl_esft.lifecycle import commands, registry
from sgl_esft.lifecycle.ranks import Ranks
from sgl_esft.lifecycle.room import HostLimits, LoadTimeouts
from sgl_esft.lifecycle.sglang_engine import SglangEngine


class FakeManager:
    """The parts of a TokenizerManager that the engine uses; its ranks hold what they were told."""

    def __init__(self) -> None:
        self.lora_registry = LoRARegistry()
        self.lora_ref_cache: dict[str, Any] = {}
        self.rid_to_state: dict[str, Any] = {}
        self.on_ranks: dict[str, Any] = {}  # adapter id -> load message
        self.staged: set[str] = set()
        self.fail_next: str | None = None
        self.is_resident = False
        self.is_reading = False  # what is staged is not read to its end
        self.told: list[str] = []
        self._rids = itertools.count()

    def auto_create_handle_loop(self) -> None: ...

    async def update_lora_adapter_communicator(self, message: Any) -> list[Any]:
        await asyncio.sleep(0)
        if self.fail_next is not None:
            failure, self.fail_next = self.fail_next, None
            return [sglang_api.make_lora_result(False, failure, {})]
        path = getattr(message, "lora_path", None)
        if commands.is_command(path):
            command = commands.decode(path)
            table = commands.reply_table(command, self._answer(command))
            return [sglang_api.make_lora_result(True, "", table)]
        self.told.append(f"{'load' if path else 'unload'} {message.lora_name}")
        if path:
            self.staged.discard(message.lora_id)
            self.on_ranks[message.lora_id] = message
        elif self.on_ranks.pop(message.lora_id, None) is None:
            return [sglang_api.make_lora_result(False, "UnknownAdapterError: not loaded", {})]
        return [sglang_api.make_lora_result(True, "", {})]

    def _answer(self, command: commands.Command) -> Any:
        self.told.append(f"{command.verb} {command.name}".strip())
        if command.verb == "report":
            slots = {i: (n, 4096) for n, i in enumerate(self.on_ranks)}
            return [asdict(commands.RankReport(0, 3, self.is_resident, slots))]
        if command.verb == "stage":
            self.staged.add(command.adapter_id)
        if command.verb == "drop":
            self.staged.discard(command.adapter_id)
        return asdict(commands.StageState(10, 10, not self.is_reading))

    @asynccontextmanager
    async def request(self, name: str) -> AsyncIterator[str]:
        """A request of the adapter, from its look-up to its end; gives the adapter's id."""
        adapter_id: str = await registry.acquire(self.lora_registry, name)
        rid = str(next(self._rids))
        self.rid_to_state[rid] = SimpleNamespace(obj=SimpleNamespace(lora_id=adapter_id))
        try:
            yield adapter_id
        finally:
            del self.rid_to_state[rid]
            await self.lora_registry.release(adapter_id)


def make_engine(
    manager: FakeManager,
    base: Path,
    limits: HostLimits | None = None,
    room_timeout_s: float = 0.3,
    stay_s: float = 0.0,
    turn_s: float = 0.0,
    slots: Mapping[AdapterKind, int] | None = None,
) -> SglangEngine:
    spec, config = read_moe_spec(base), EsftConfig(max_adapters=3, max_experts_per_adapter=3)
    return SglangEngine(
        manager,
        Ranks(manager),
        lambda name, folder, taken: check_loadable(name, folder, taken, spec, config),
        limits or HostLimits(),
        LoadTimeouts(room_timeout_s, stay_s, turn_s),
        slots,
    )
