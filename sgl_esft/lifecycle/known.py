"""What is known of each adapter's name: loaded, on disk, at work, failed, unloaded on purpose.

    engine, catalogue, jobs, failures --> [KnownAdapters] --> library.py decides, listing.py shows

Of one event loop. It changes nothing by itself: the library tells it what was begun and what ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from sgl_esft.errors import EsftError
from sgl_esft.formats.adapter_config import AdapterKind
from sgl_esft.lifecycle.adapter_engine import AdapterEngine, LoadedAdapter
from sgl_esft.lifecycle.catalogue import Catalogue, Source
from sgl_esft.lifecycle.folders import Fingerprint, fingerprint
from sgl_esft.lifecycle.jobs import Failure, Job, JobKind
from sgl_esft.lifecycle.states import Action, Command, Situation, decide

logger = logging.getLogger(__name__)

_MAX_FAILURES: Final = 256  # the newest are kept


class KnownAdapters:
    """All names that mean, meant or may mean an adapter."""

    def __init__(self, engine: AdapterEngine, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.jobs: dict[str, Job] = {}  # what goes on, by name
        self.sources: dict[str, Source] = {}  # of what was loaded once; it may have been evicted
        self._engine = engine
        self._failures: dict[str, Failure] = {}  # of last works that failed, the newest last
        # Unloaded on purpose: no request brings it back until its folder changes or somebody asks.
        self._held: dict[str, Fingerprint | None] = {}

    def loaded(self) -> dict[str, LoadedAdapter]:
        """What the engine serves now, by name."""
        found = {each.name: each for each in self._engine.loaded()}
        for each in found.values():
            known = self.sources.get(each.name)
            if known is None or known.adapter_id != each.adapter_id:
                self.sources[each.name] = self.catalogue.source_of(each)
        return found

    def names(self) -> list[str]:
        """Every name that anything is known of."""
        known = (self.loaded(), self.sources, self.jobs, self._failures, self.catalogue.entries)
        return sorted({name for each in known for name in each})

    @property
    def usable(self) -> Collection[str]:
        """Names that a request may say: loaded, or loaded for it by `ensure`. Always as of now."""
        return UsableNames(self)

    def situation(self, name: str, loaded: Collection[str] | None = None) -> Situation:
        """Where the table of states.py finds a name; `loaded` for who asks of many at once."""
        job = self.jobs.get(name)
        if job is not None:
            if job.kind is JobKind.UNLOAD:
                return Situation.DRAINING
            if job.unload_next is not None:
                return Situation.LEAVING
        is_loaded = name in (self.loaded() if loaded is None else loaded)
        if job is not None:
            # The old version may have left for others meanwhile.
            is_replaced = job.kind is JobKind.REPLACE and is_loaded
            return Situation.REPLACING if is_replaced else Situation.LOADING
        if is_loaded:
            return Situation.LOADED
        if name in self.sources:
            return Situation.EVICTED
        known = (self._failures, self.catalogue.entries)
        return Situation.ON_DISK if any(name in each for each in known) else Situation.ABSENT

    def action(self, command: Command, name: str, loaded: Collection[str] | None = None) -> Action:
        """What to do about a command."""
        return decide(command, self.situation(name, loaded))

    def is_usable(self, name: str, loaded: Collection[str] | None = None) -> bool:
        """Whether `ensure` answers for a name, if only with the error of its load."""
        action = self.action(Command.USE, name, loaded)
        return action is not Action.UNKNOWN and not (action is Action.START and self.is_held(name))

    def kind_of(self, name: str) -> AdapterKind | None:
        """Which kind a name's adapter is, as it was seen last; None if that cannot be told."""
        entry = self.loaded().get(name) or self.catalogue.entries.get(name)
        return None if entry is None else entry.kind

    def is_held(self, name: str) -> bool:
        """Whether it was unloaded on purpose, and its folder is what it was then."""
        if name not in self._held:
            return False
        entry = self.catalogue.entries.get(name)
        return entry is None or entry.seen == self._held[name]

    def failure_of(self, name: str) -> EsftError | None:
        """What went wrong last with a name, or what is wrong with its folder."""
        entry = self.catalogue.entries.get(name)
        failure = self._failures.get(name)
        if failure is None or failure.is_outdated:
            return None if entry is None else entry.error
        if entry is None or failure.folder != entry.folder or failure.seen == entry.seen:
            return failure.error
        return entry.error

    def obstacle_of(self, name: str) -> EsftError | None:
        """Why loading it again would fail again: nothing has changed since."""
        entry, folder = self.catalogue.entries.get(name), self.folder_of(name)
        failure = self._failures.get(name)
        if failure is not None and failure.is_lasting and failure.folder == folder:
            return self.failure_of(name)
        return None if entry is None or entry.folder != folder else entry.error

    async def look_again(self, name: str) -> None:
        """A folder that failed, and that nobody watches, may have changed since."""
        entry, failure = self.catalogue.entries.get(name), self._failures.get(name)
        if failure is None or (entry is not None and entry.folder == failure.folder):
            return
        seen = await asyncio.to_thread(fingerprint, failure.folder)
        has_changed = seen is not None and seen != failure.seen
        if has_changed and self._failures.get(name) is failure:
            self._failures[name] = replace(failure, is_outdated=True)

    def folder_of(self, name: str) -> Path | None:
        """Where a load without a path reads from."""
        job = self.jobs.get(name)
        return self.home_of(name) if job is None else job.folder

    def home_of(self, name: str) -> Path | None:
        """The folder of a name on which no work goes on.

        An evicted adapter comes back from where it came, whatever lies below the root by its name.
        """
        source, entry = self.sources.get(name), self.catalogue.entries.get(name)
        if source is not None and not source.is_own:
            return source.folder
        for known in (entry, source, self._failures.get(name)):
            if known is not None:
                return known.folder
        return None

    def begin(self, job: Job) -> None:
        """Work on a name goes on from now on; who asked for it wants the adapter."""
        self.jobs[job.name] = job
        self._held.pop(job.name, None)

    def note_loaded(self, name: str) -> None:
        """Its source is noted while a link still leads where it was followed."""
        self.loaded()
        self._failures.pop(name, None)

    def note_failure(self, job: Job, seen: Fingerprint | None, error: EsftError) -> None:
        """`seen`: the folder as it was when the work began."""
        shown = str(error).encode(errors="backslashreplace").decode()  # file names may be any bytes
        logger.warning("adapter %s: the %s failed: %s", job.name, job.kind.value, shown)
        self._failures.pop(job.name, None)
        failure = Failure(job.kind, job.folder, seen, error.with_traceback(None))
        self._failures[job.name] = failure
        if len(self._failures) > _MAX_FAILURES:
            del self._failures[next(iter(self._failures))]

    def forget(self, name: str) -> None:
        """It was unloaded on purpose."""
        entry = self.catalogue.entries.get(name)
        self.sources.pop(name, None)
        self._failures.pop(name, None)
        self._held.pop(name, None)
        if entry is not None:
            self._held[name] = entry.seen


class UsableNames(Collection[str]):
    """A set that is never made, since it may be large: looked up one by one, always as of now."""

    def __init__(self, known: KnownAdapters) -> None:
        self._known = known

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._known.is_usable(name)

    def __iter__(self) -> Iterator[str]:
        loaded = self._known.loaded()
        return (name for name in self._known.names() if self._known.is_usable(name, loaded))

    def __len__(self) -> int:
        return sum(1 for _ in self)
