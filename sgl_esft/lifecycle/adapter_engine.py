"""What the adapter library asks of the engine that serves.

    library.py --load, replace, unload, pin--> [AdapterEngine] -> SGLang's registry, all ranks

One object of the process that serves HTTP implements it over SGLang; tests have a pure one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol, TypeAlias

from sgl_esft.formats.adapter_config import AdapterKind


class LoadPhase(Enum):
    """What a load does now, in this order."""

    VALIDATING = "validating"
    READING = "reading"  # disk to host, beside the running streams
    PLACING = "placing"  # host to device, between two steps


# (phase, share of the phase's bytes done, 0 to 1)
OnProgress: TypeAlias = Callable[[LoadPhase, float], None]


def nobody_looks(phase: LoadPhase, share: float) -> None:
    """OnProgress of a load that nobody has asked about."""


@dataclass(frozen=True)
class LoadedAdapter:
    """One version of an adapter that the ranks hold."""

    adapter_id: str  # new for every load; keys the prefix cache
    name: str
    folder: Path
    digest: str  # of the folder's content
    pinned: bool
    num_experts: int  # replaced, over all layers; of a LoRA adapter 0
    num_bytes: int  # of its experts or matrices, over all ranks, in host memory
    num_references: int  # requests that use it now
    last_used_s: float | None  # Unix time of the last request; None = never
    kind: AdapterKind = "esft"


@dataclass(frozen=True)
class Residency:
    """An adapter's place on one rank's device."""

    rank: int
    adapter_slot: int
    mapped_bytes: int


class AdapterEngine(Protocol):
    """Loads, replaces and unloads on all ranks alike. Methods raise EsftError, changing nothing."""

    async def load(
        self, name: str, folder: Path, *, pinned: bool, on_progress: OnProgress
    ) -> LoadedAdapter:
        """Make a new name servable. Running streams keep their pace meanwhile."""

    async def replace(
        self, name: str, folder: Path, *, pinned: bool, on_progress: OnProgress
    ) -> LoadedAdapter:
        """Load beside the old version, then let the name mean the new one.

        Requests in flight end on the old one, which then leaves in the background.
        """

    async def unload(self, name: str) -> None:
        """New requests no longer find the name; returns once the last that uses it has ended.

        Also where it fails: then the ranks may hold what nobody finds.
        """

    async def set_pinned(self, name: str, pinned: bool) -> None:
        """A pinned adapter is never evicted, neither from the device nor from the host."""

    def loaded(self) -> Sequence[LoadedAdapter]:
        """What names mean now."""

    def draining(self) -> Sequence[LoadedAdapter]:
        """Versions that no new request finds, and old ones still use."""

    async def residency(self) -> Mapping[str, tuple[Residency, ...]]:
        """Adapter id -> its places, of everything on the device."""
