"""What is told of adapters: frozen values, made into JSON for the routes.

library.py -> AdapterRecord, Listing -> api.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sgl_esft.errors import EsftError
from sgl_esft.lifecycle.engine import LoadedAdapter, LoadPhase, Residency
from sgl_esft.lifecycle.states import AdapterState


@dataclass(frozen=True)
class LoadView:
    """A load that goes on."""

    phase: LoadPhase
    progress: float  # 0 to 1, of the phase
    replaces: bool

    def to_json(self) -> dict[str, Any]:
        return {"phase": self.phase.value, "progress": self.progress, "replaces": self.replaces}


@dataclass(frozen=True)
class AdapterRecord:
    """One adapter, as a listing shows it."""

    name: str
    state: AdapterState
    folder: str  # below the root; as it was given, without one
    digest: str | None = None
    pinned: bool = False
    num_experts: int | None = None
    num_bytes: int | None = None
    devices: Sequence[Residency] = ()
    num_references: int = 0
    last_used_s: float | None = None
    load: LoadView | None = None
    error: EsftError | None = None
    draining: Sequence[LoadedAdapter] = ()
    changed_on_disk: bool | None = None  # None: not known yet, or nothing is loaded
    on_demand: bool = False  # whether a request for the model may load it

    def to_json(self) -> dict[str, Any]:
        """As `GET /v1/adapters/{name}` answers."""
        return {
            "name": self.name,
            "state": self.state.value,
            "folder": self.folder,
            "digest": self.digest,
            "pinned": self.pinned,
            "num_experts": self.num_experts,
            "num_bytes": self.num_bytes,
            "devices": [asdict(place) for place in self.devices],
            "num_references": self.num_references,
            "last_used": None if self.last_used_s is None else _rfc3339(self.last_used_s),
            "load": None if self.load is None else self.load.to_json(),
            "error": None if self.error is None else _error(self.error),
            "draining_versions": [
                {"digest": each.digest, "num_references": each.num_references}
                for each in self.draining
            ],
            "changed_on_disk": self.changed_on_disk,
            "on_demand": self.on_demand,
        }


@dataclass(frozen=True)
class Listing:
    """All adapters, and the room they have."""

    adapters: Sequence[AdapterRecord]
    num_slots: int
    slots_used: int
    host_budget_bytes: int | None
    host_used_bytes: int

    def to_json(self) -> dict[str, Any]:
        """As `GET /v1/adapters` answers."""
        return {
            "adapters": [each.to_json() for each in self.adapters],
            "slots": {"total": self.num_slots, "used": self.slots_used},
            "host": {
                "budget_bytes": self.host_budget_bytes,
                "used_bytes": self.host_used_bytes,
            },
        }


@dataclass(frozen=True)
class EngineView:
    """What the engine says at one moment."""

    loaded: Mapping[str, LoadedAdapter]  # by name
    draining: Sequence[LoadedAdapter]
    residency: Mapping[str, Sequence[Residency]]  # by adapter id
    fingerprints: Mapping[Path, str | None]  # of the folders that reloads would read

    def places_of(self, adapter: LoadedAdapter) -> Sequence[Residency]:
        return self.residency.get(adapter.adapter_id, ())

    @property
    def slots_used(self) -> int:
        """Adapter slots that are taken, on the rank with the most."""
        taken: dict[int, set[int]] = {}
        for places in self.residency.values():
            for place in places:
                taken.setdefault(place.rank, set()).add(place.adapter_slot)
        return max(map(len, taken.values()), default=0)

    @property
    def host_bytes(self) -> int:
        return sum(each.num_bytes for each in (*self.loaded.values(), *self.draining))


def folder_text(folder: Path, root: Path | None) -> str:
    """A folder below the root is told without the root."""
    if root is not None and folder.is_relative_to(root):
        return str(folder.relative_to(root))
    return str(folder)


def _error(error: EsftError) -> dict[str, str]:
    return {"type": type(error).__name__, "message": str(error)}


def _rfc3339(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")
