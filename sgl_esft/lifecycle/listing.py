"""The adapters as they are at one moment, put together for the routes.

    AdapterLibrary + AdapterEngine.residency --> [Lister] --> Listing, AdapterRecord

Places on devices come from the ranks, which may be in a long step or in a scale. After
RESIDENCY_TIMEOUT_S, or when they fail, the places that were told last are shown.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from sgl_esft.errors import EsftError, UnknownAdapterError
from sgl_esft.lifecycle.engine import LoadedAdapter, Residency
from sgl_esft.lifecycle.folders import fingerprint
from sgl_esft.lifecycle.jobs import JobKind
from sgl_esft.lifecycle.library import AdapterLibrary
from sgl_esft.lifecycle.records import AdapterRecord, EngineView, Listing, folder_text
from sgl_esft.lifecycle.states import AdapterState

logger = logging.getLogger(__name__)

RESIDENCY_TIMEOUT_S: Final = 2.0

Places = Mapping[str, Sequence[Residency]]


class Lister:
    """Answers the questions about one library."""

    def __init__(
        self, library: AdapterLibrary, *, num_slots: int, host_budget_bytes: int | None = None
    ) -> None:
        self._library = library
        self._num_slots = num_slots
        self._host_budget_bytes = host_budget_bytes
        self._asking: asyncio.Task[Places] | None = None
        self._places: Places = {}

    async def list_all(self) -> Listing:
        """Every adapter that anything is known of, by name."""
        view = await self._view()
        return Listing(
            adapters=[self._record(name, view) for name in self._library.names()],
            num_slots=self._num_slots,
            slots_used=view.slots_used,
            host_budget_bytes=self._host_budget_bytes,
            host_used_bytes=view.host_bytes,
        )

    async def show(self, name: str) -> AdapterRecord:
        """One adapter. Raises UnknownAdapterError."""
        view = await self._view()
        if name not in self._library.names():
            raise UnknownAdapterError(f"adapter {name!r} is not known")
        return self._record(name, view)

    async def _view(self) -> EngineView:
        engine, digests = self._library.engine, self._library.digests
        places = await self._residency()
        homes = (self._library.home_of(name) for name in self._library.loaded())
        folders = {home for home in homes if home is not None}
        fingerprints = await asyncio.to_thread(_fingerprints, folders)
        for folder, seen in fingerprints.items():
            if seen is not None and digests.get(folder, seen) is None:
                digests.read_later(folder)
        return EngineView(self._library.loaded(), tuple(engine.draining()), places, fingerprints)

    async def _residency(self) -> Places:
        """One question to the ranks at a time, shared by all who want to know."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        try:
            async with asyncio.timeout(RESIDENCY_TIMEOUT_S):
                return await asyncio.shield(self._asking)
        except TimeoutError:
            logger.warning("the ranks do not say what is on the device: told from before")
            return self._places

    async def _ask(self) -> Places:
        try:
            self._places = await self._library.engine.residency()
        except EsftError as error:  # a listing is wanted most when the ranks do not answer
            logger.warning("what is on the device is told from before: %s", error)
        finally:
            self._asking = None
        return self._places

    def _record(self, name: str, view: EngineView) -> AdapterRecord:
        library = self._library
        job, loaded = library.jobs.get(name), view.loaded.get(name)
        entry = library.catalogue.entries.get(name)
        draining = [each for each in view.draining if each.name == name]
        shown = loaded or (draining[-1] if draining else None)
        folder = loaded.folder if loaded else library.folder_of(name)
        known = shown or entry
        return AdapterRecord(
            name=name,
            state=self._state(name, view),
            folder="" if folder is None else folder_text(folder, library.catalogue.root),
            digest=shown.digest if shown else None,
            pinned=(loaded is not None and loaded.pinned) or (job is not None and job.pinned),
            num_experts=known.num_experts if known else None,
            num_bytes=known.num_bytes if known else None,
            devices=view.places_of(loaded) if loaded else (),
            num_references=sum(each.num_references for each in (loaded, *draining) if each),
            last_used_s=shown.last_used_s if shown else None,
            load=job.view if job else None,
            error=None if job else library.failure_of(name),
            draining=draining,
            changed_on_disk=self._changed(loaded, view) if loaded else None,
            on_demand=library.is_usable(name, view.loaded),
        )

    def _state(self, name: str, view: EngineView) -> AdapterState:
        job = self._library.jobs.get(name)
        if job is not None and job.kind is not JobKind.REPLACE:
            return AdapterState.LOADING if job.kind is JobKind.LOAD else AdapterState.DRAINING
        loaded = view.loaded.get(name)
        if loaded is not None:
            on_device = bool(view.places_of(loaded))
            return AdapterState.ON_DEVICE if on_device else AdapterState.IN_HOST_CACHE
        if job is not None:
            return AdapterState.LOADING
        failed = self._library.failure_of(name) is not None
        return AdapterState.FAILED if failed else AdapterState.ON_DISK

    def _changed(self, loaded: LoadedAdapter, view: EngineView) -> bool | None:
        """Whether a reload would bring something else; None until that has been read."""
        home = self._library.home_of(loaded.name)
        if home is None or home not in view.fingerprints:
            return None  # loaded since
        seen = view.fingerprints[home]
        if seen is None:
            return True  # it is gone
        digest = self._library.digests.get(home, seen)
        return None if digest is None else digest != loaded.digest


def _fingerprints(folders: set[Path]) -> dict[Path, str | None]:
    return {folder: fingerprint(folder) for folder in folders}
