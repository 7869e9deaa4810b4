"""Work on one adapter that goes on whether or not somebody waits for it.

library.py -> [Job] -> AdapterEngine; what failed -> [Failure] -> known.py
clients  --wait--> Job.done, at most so long; leaving changes nothing
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

from sgl_esft.errors import (
    AdapterFormatError,
    AdapterLoadTimeoutError,
    AdapterMismatchError,
    AdapterNameError,
    AdapterPathError,
    AdapterTooLargeError,
    DeviceMemoryError,
    EsftError,
    UnsupportedAdapterError,
)
from sgl_esft.lifecycle.adapter_engine import LoadedAdapter, LoadPhase
from sgl_esft.lifecycle.folders import Fingerprint

# What is wrong with a name, a folder, or what lies in it, and stays so until it changes.
_OF_CONTENT: Final = (
    AdapterFormatError,
    AdapterMismatchError,
    AdapterNameError,
    AdapterPathError,
    AdapterTooLargeError,
    DeviceMemoryError,
    UnsupportedAdapterError,
)


class JobKind(Enum):
    """What a job does."""

    LOAD = "load"
    REPLACE = "replace"
    UNLOAD = "unload"


def _future() -> asyncio.Future[LoadedAdapter | None]:
    future: asyncio.Future[LoadedAdapter | None] = asyncio.get_running_loop().create_future()
    # A failure that nobody waits for is in the adapter's record; it is no loose end.
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


@dataclass
class Job:
    """One piece of work. A name has one at a time."""

    kind: JobKind
    name: str
    folder: Path
    pinned: bool = False
    phase: LoadPhase = LoadPhase.VALIDATING
    progress: float = 0.0
    unload_next: Job | None = None  # what was asked for meanwhile
    done: asyncio.Future[LoadedAdapter | None] = field(default_factory=_future)

    def note(self, phase: LoadPhase, progress: float) -> None:
        """The engine's report of a load."""
        self.phase = phase
        self.progress = min(max(progress, 0.0), 1.0)

    async def wait(self, timeout_s: float | None = None) -> LoadedAdapter | None:
        """What came of it; raises its error, or AdapterLoadTimeoutError. It goes on in any case."""
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self.done)
        except TimeoutError as error:
            if self.done.done():
                return self.done.result()
            raise AdapterLoadTimeoutError(
                f"adapter {self.name!r}: the {self.kind.value} has not ended after {timeout_s:g} s "
                "and goes on; ask again later"
            ) from error


@dataclass(frozen=True)
class Failure:
    """Work that failed, and the folder as it was when the work began."""

    kind: JobKind
    folder: Path
    seen: Fingerprint | None
    error: EsftError
    is_outdated: bool = False  # the folder was looked at since, and has changed

    @property
    def is_lasting(self) -> bool:
        """Whether to load the same content again would fail again.

        Not for want of room, nor because of a defect, of ranks that did not answer, or of what
        others did with the name meanwhile.
        """
        return self.kind is JobKind.LOAD and isinstance(self.error, _OF_CONTENT)
