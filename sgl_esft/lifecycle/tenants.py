"""The versions of adapters that take memory on the ranks: what they hold, and how they leave.

sglang_engine.py --came--> [Tenants] <--who takes how much, who may leave-- room.py
                               '--unload, when the last request has ended--> ranks
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from sgl_esft.errors import UnknownAdapterError
from sgl_esft.formats.adapter_config import AdapterKind
from sgl_esft.lifecycle.adapter_engine import LoadedAdapter
from sgl_esft.lifecycle.content import AdapterContent, content_at_launch
from sgl_esft.lifecycle.ranks import Ranks
from sgl_esft.lifecycle.registry import Registry

logger = logging.getLogger(__name__)

T = TypeVar("T")

_tasks: set[asyncio.Task[Any]] = set()  # the event loop itself does not keep them


def start(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that runs to its end, whether or not somebody holds it."""
    task = asyncio.get_running_loop().create_task(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


def log_failure(task: asyncio.Task[Any]) -> None:
    """For a task whose failure nobody else hears of."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("an adapter's change failed: %s: %s", type(error).__name__, error)


class Tenants:
    """What the ranks of one engine hold: what names mean, and old versions that drain."""

    def __init__(self, registry: Registry, ranks: Ranks) -> None:
        self._registry = registry
        self._ranks = ranks
        self._content: dict[str, AdapterContent] = {}  # by adapter id
        self._draining: dict[str, Any] = {}  # adapter id -> ref
        self._came_s: dict[str, float] = {}  # adapter id -> when, by the monotonic clock

    def note_came(self, ref: Any, content: AdapterContent) -> None:
        """The ranks hold it now."""
        self._content[ref.lora_id] = content
        self._came_s[ref.lora_id] = time.monotonic()

    def age_s(self, ref: Any) -> float:
        """How long it has been there; what was loaded at launch, for ever."""
        return time.monotonic() - self._came_s.get(ref.lora_id, -math.inf)

    def draining_refs(self) -> Sequence[Any]:
        """Of versions that no name means any more, and that the ranks still hold."""
        return tuple(self._draining.values())

    def num_bytes_of(self, ref: Any) -> int:
        """Of host memory, over all ranks."""
        return self._content_of(ref).num_bytes

    def kind_of(self, ref: Any) -> AdapterKind:
        """Of an adapter that the ranks hold."""
        return self._content_of(ref).kind

    def loaded(self) -> Sequence[LoadedAdapter]:
        """What names mean now."""
        return self._described_all(self._registry.refs().values())

    def draining(self) -> Sequence[LoadedAdapter]:
        """Versions that no new request finds, and old ones still use."""
        return self._described_all(self._draining.values())

    def _described_all(self, refs: Any) -> Sequence[LoadedAdapter]:
        counts = self._registry.num_references()
        return tuple(self.described(ref, counts) for ref in refs)

    def described(self, ref: Any, counts: Counter[str]) -> LoadedAdapter:
        """One version; `counts`: adapter id -> requests that use it."""
        content = self._content_of(ref)
        return LoadedAdapter(
            adapter_id=ref.lora_id,
            name=ref.lora_name,
            folder=content.folder,
            digest=content.digest,
            pinned=bool(ref.pinned),
            num_experts=content.num_experts,
            num_bytes=content.num_bytes,
            num_references=counts[ref.lora_id],
            last_used_s=self._registry.last_used_s(ref.lora_id),
            kind=content.kind,
        )

    def _content_of(self, ref: Any) -> AdapterContent:
        found = self._content.get(ref.lora_id)
        if found is None:  # loaded at launch
            found = self._content[ref.lora_id] = content_at_launch(ref.lora_path)
        return found

    def unload_when_idle(self, ref: Any) -> asyncio.Task[None]:
        """Unload what no name means any more once nobody uses it. It drains from now on."""
        self._draining[ref.lora_id] = ref  # at once: it takes room until the ranks forget it
        task = start(self._forgotten(ref))
        task.add_done_callback(log_failure)
        return task

    async def _forgotten(self, ref: Any) -> None:
        try:
            await self._registry.forget_when_idle(ref.lora_id)
            with contextlib.suppress(UnknownAdapterError):  # ranks that replaced lost ones
                await self._ranks.unload(ref)
        finally:
            self._draining.pop(ref.lora_id, None)
            self._content.pop(ref.lora_id, None)
            self._came_s.pop(ref.lora_id, None)

    async def num_kept_slots(self) -> int | None:
        """Adapter slots where a loaded adapter keeps its own; None where it does not."""
        first = (await self._ranks.report())[0]
        return first.num_slots if first.is_resident else None
