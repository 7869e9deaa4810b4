"""The adapters as they are at one moment, as the routes tell them.

    KnownAdapters + AdapterEngine.residency --> [Lister] --> JSON values of GET /v1/adapters

Places on devices come from the ranks, which may be in a long step or in a scale. After
RESIDENCY_TIMEOUT_S, or when they fail, the places that were told last are shown.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from sgl_esft.errors import EsftError, UnknownAdapterError
from sgl_esft.formats.adapter_config import AdapterKind
from sgl_esft.lifecycle.adapter_engine import LoadedAdapter, Residency
from sgl_esft.lifecycle.folders import fingerprint
from sgl_esft.lifecycle.jobs import Job, JobKind
from sgl_esft.lifecycle.library import AdapterLibrary
from sgl_esft.lifecycle.states import AdapterState

logger = logging.getLogger(__name__)

RESIDENCY_TIMEOUT_S: Final = 2.0

Places = Mapping[str, Sequence[Residency]]


@dataclass(frozen=True)
class EngineView:
    """What the engine says at one moment."""

    loaded: Mapping[str, LoadedAdapter]  # by name
    draining: Sequence[LoadedAdapter]
    residency: Places  # by adapter id
    fingerprints: Mapping[Path, str | None]  # of the folders that reloads would read

    def places_of(self, adapter: LoadedAdapter) -> Sequence[Residency]:
        return self.residency.get(adapter.adapter_id, ())

    def slots_used(self, kind: AdapterKind) -> int:
        """Slots of one kind that are taken, on the rank with the most."""
        others = {a.adapter_id for a in (*self.loaded.values(), *self.draining) if a.kind != kind}
        taken: dict[int, set[int]] = {}
        for adapter_id, places in self.residency.items():
            for place in () if adapter_id in others else places:
                taken.setdefault(place.rank, set()).add(place.adapter_slot)
        return max(map(len, taken.values()), default=0)

    @property
    def host_bytes(self) -> int:
        return sum(each.num_bytes for each in (*self.loaded.values(), *self.draining))


class Lister:
    """Answers the questions about one library."""

    def __init__(
        self,
        library: AdapterLibrary,
        *,
        num_slots: int,
        host_budget_bytes: int | None = None,
        num_lora_slots: int | None = None,
    ) -> None:
        """num_lora_slots: None on a server that takes no LoRA adapters."""
        self._engine = library.engine
        self._known = library.known
        self._digests = library.digests
        self._num_slots = num_slots
        self._num_lora_slots = num_lora_slots
        self._host_budget_bytes = host_budget_bytes
        self._asking: asyncio.Task[Places] | None = None
        self._places: Places = {}

    async def list_all(self) -> dict[str, Any]:
        """Every adapter that anything is known of, by name, and the room they have."""
        view = await self._view()
        lora = None
        if self._num_lora_slots is not None:
            lora = {"total": self._num_lora_slots, "used": view.slots_used("lora")}
        return {
            "adapters": [self._record(name, view) for name in self._known.names()],
            "slots": {"total": self._num_slots, "used": view.slots_used("esft")},
            "lora_slots": lora,
            "host": {"budget_bytes": self._host_budget_bytes, "used_bytes": view.host_bytes},
        }

    async def show(self, name: str) -> dict[str, Any]:
        """One adapter. Raises UnknownAdapterError."""
        view = await self._view()
        if name not in self._known.names():
            raise UnknownAdapterError(f"adapter {name!r} is not known")
        return self._record(name, view)

    async def _view(self) -> EngineView:
        places = await self._residency()
        homes = (self._known.home_of(name) for name in self._known.loaded())
        folders = {home for home in homes if home is not None}
        fingerprints = await asyncio.to_thread(_fingerprints, folders)
        for folder, seen in fingerprints.items():
            if seen is not None and self._digests.get(folder, seen) is None:
                self._digests.read_later(folder)
        loaded, draining = self._known.loaded(), tuple(self._engine.draining())
        return EngineView(loaded, draining, places, fingerprints)

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
            self._places = await self._engine.residency()
        except EsftError as error:  # a listing is wanted most when the ranks do not answer
            logger.warning("what is on the device is told from before: %s", error)
        finally:
            self._asking = None
        return self._places

    def _record(self, name: str, view: EngineView) -> dict[str, Any]:
        job, loaded = self._known.jobs.get(name), view.loaded.get(name)
        draining = [each for each in view.draining if each.name == name]
        shown = loaded or (draining[-1] if draining else None)
        folder = loaded.folder if loaded else self._known.folder_of(name)
        described = shown or self._known.catalogue.entries.get(name)
        error = None if job else self._known.failure_of(name)
        return {
            "name": name,
            "kind": described.kind if described else None,
            "state": self._state(name, view).value,
            "folder": "" if folder is None else self._told(folder),
            "digest": shown.digest if shown else None,
            "pinned": (loaded is not None and loaded.pinned) or (job is not None and job.pinned),
            "num_experts": described.num_experts if described else None,
            "num_bytes": described.num_bytes if described else None,
            "devices": [asdict(place) for place in view.places_of(loaded)] if loaded else [],
            "num_references": sum(each.num_references for each in (loaded, *draining) if each),
            "last_used": _rfc3339(shown.last_used_s) if shown else None,
            "load": _load(job),
            "error": error and {"type": type(error).__name__, "message": str(error)},
            "draining_versions": [
                {"digest": each.digest, "num_references": each.num_references} for each in draining
            ],
            "changed_on_disk": self._changed(loaded, view) if loaded else None,
            "on_demand": self._known.is_usable(name, view.loaded),
        }

    def _state(self, name: str, view: EngineView) -> AdapterState:
        job = self._known.jobs.get(name)
        if job is not None and job.kind is not JobKind.REPLACE:
            return AdapterState.LOADING if job.kind is JobKind.LOAD else AdapterState.DRAINING
        loaded = view.loaded.get(name)
        if loaded is not None:
            on_device = bool(view.places_of(loaded))
            return AdapterState.ON_DEVICE if on_device else AdapterState.IN_HOST_CACHE
        if job is not None:
            return AdapterState.LOADING
        failed = self._known.failure_of(name) is not None
        return AdapterState.FAILED if failed else AdapterState.ON_DISK

    def _told(self, folder: Path) -> str:
        """A folder below the root is told without the root."""
        root = self._known.catalogue.root
        if root is not None and folder.is_relative_to(root):
            return str(folder.relative_to(root))
        return str(folder)

    def _changed(self, loaded: LoadedAdapter, view: EngineView) -> bool | None:
        """Whether a reload would bring something else; None until that has been read."""
        home = self._known.home_of(loaded.name)
        if home is None or home not in view.fingerprints:
            return None  # loaded since
        seen = view.fingerprints[home]
        if seen is None:
            return True  # it is gone
        digest = self._digests.get(home, seen)
        return None if digest is None else digest != loaded.digest


def _fingerprints(folders: set[Path]) -> dict[Path, str | None]:
    return {folder: fingerprint(folder) for folder in folders}


def _load(job: Job | None) -> dict[str, Any] | None:
    """A load that goes on."""
    if job is None or job.kind is JobKind.UNLOAD:
        return None
    replaces = job.kind is JobKind.REPLACE
    return {"phase": job.phase.value, "progress": job.progress, "replaces": replaces}


def _rfc3339(unix_s: float | None) -> str | None:
    if unix_s is None:
        return None
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")
