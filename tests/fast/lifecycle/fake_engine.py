"""An engine without SGLang: it holds what it is told, at the moment a test lets it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sgl_esft.errors import EsftError, UnknownAdapterError
from sgl_esft.formats.adapter_config import kind_of
from sgl_esft.formats.manifest import content_digest
from sgl_esft.lifecycle.adapter_engine import LoadedAdapter, LoadPhase, OnProgress, Residency


@dataclass
class Pending:
    """A load that waits for the test."""

    adapter: LoadedAdapter
    on_progress: OnProgress
    end: asyncio.Future[None]


class FakeEngine:
    """Loads at once, or with `holds` when `finish` is called. Refuses what an engine would."""

    def __init__(self, *, holds: bool = False) -> None:
        self.holds = holds
        self.num_loads = 0
        self.pending: dict[str, Pending] = {}
        self.fails: dict[str, EsftError] = {}  # name -> what its next load raises
        self.slots: dict[str, int] = {}  # adapter id -> slot
        self._loaded: dict[str, LoadedAdapter] = {}
        self._draining: dict[str, LoadedAdapter] = {}
        self._references: dict[str, int] = {}  # adapter id -> requests
        self._idle: dict[str, asyncio.Event] = {}
        self._ids = itertools.count()

    async def load(
        self, name: str, folder: Path, *, pinned: bool, on_progress: OnProgress
    ) -> LoadedAdapter:
        assert name not in self._loaded, "the library loads a name that is loaded"
        adapter = await self._read(name, folder, pinned, on_progress)
        assert name not in self._loaded
        self._loaded[name] = adapter
        return adapter

    async def replace(
        self, name: str, folder: Path, *, pinned: bool, on_progress: OnProgress
    ) -> LoadedAdapter:
        assert name in self._loaded, "the library replaces a name that is not loaded"
        adapter = await self._read(name, folder, pinned, on_progress)
        old = self._loaded.get(name)  # it may have been evicted meanwhile
        self._loaded[name] = adapter
        if old is not None and self._references.get(old.adapter_id):
            self._draining[old.adapter_id] = old
        return adapter

    async def _read(
        self, name: str, folder: Path, pinned: bool, on_progress: OnProgress
    ) -> LoadedAdapter:
        self.num_loads += 1
        adapter_id = f"id-{next(self._ids)}"
        on_progress(LoadPhase.READING, 0.5)
        digest, kind = content_digest(folder), kind_of(folder)
        adapter = LoadedAdapter(adapter_id, name, folder, digest, pinned, 3, 100, 0, None, kind)
        if self.holds:
            end = asyncio.get_running_loop().create_future()
            self.pending[name] = Pending(adapter, on_progress, end)
            await end
        else:
            await asyncio.sleep(0)
        error = self.fails.pop(name, None)
        if error is not None:
            raise error
        return adapter

    def finish(self, name: str, error: EsftError | None = None) -> None:
        """Let a held load end."""
        pending = self.pending.pop(name)
        if error is None:
            pending.end.set_result(None)
        else:
            pending.end.set_exception(error)

    async def unload(self, name: str) -> None:
        if name not in self._loaded:
            raise UnknownAdapterError(f"adapter {name!r} is not loaded")
        adapter = self._loaded.pop(name)
        if self._references.get(adapter.adapter_id):
            self._draining[adapter.adapter_id] = adapter
            self._idle[adapter.adapter_id] = asyncio.Event()
            await self._idle[adapter.adapter_id].wait()
        self.slots.pop(adapter.adapter_id, None)

    async def set_pinned(self, name: str, pinned: bool) -> None:
        self._loaded[name] = replace(self._loaded[name], pinned=pinned)

    def loaded(self) -> Sequence[LoadedAdapter]:
        return [self._counted(each) for each in self._loaded.values()]

    def draining(self) -> Sequence[LoadedAdapter]:
        return [self._counted(each) for each in self._draining.values()]

    async def residency(self) -> Mapping[str, tuple[Residency, ...]]:
        return {each: (Residency(0, slot, 4096),) for each, slot in self.slots.items()}

    # ---- requests for the model, and an engine that needs room ----

    def has(self, name: str) -> bool:
        """Whether a request finds the name."""
        return name in self._loaded

    def begin_request(self, name: str) -> LoadedAdapter:
        """A request finds what the name means now, and keeps it."""
        adapter = self._loaded[name]
        self._references[adapter.adapter_id] = self._references.get(adapter.adapter_id, 0) + 1
        return adapter

    def end_request(self, adapter: LoadedAdapter) -> None:
        """The last request of a version that leaves lets it go."""
        self._references[adapter.adapter_id] -= 1
        if not self._references[adapter.adapter_id]:
            self._draining.pop(adapter.adapter_id, None)
            if adapter.adapter_id in self._idle:
                self._idle[adapter.adapter_id].set()

    def evict(self, name: str) -> None:
        """As the host's tier does with an idle adapter."""
        self._loaded.pop(name)

    def _counted(self, adapter: LoadedAdapter) -> LoadedAdapter:
        return replace(adapter, num_references=self._references.get(adapter.adapter_id, 0))
