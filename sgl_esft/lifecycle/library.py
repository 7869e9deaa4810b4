"""The adapters of one server: every change and every question goes through one object.

    /v1/adapters, /load_lora_adapter --command--> [AdapterLibrary] --job--> AdapterEngine -> ranks
    a request that names an adapter --ensure---->      |
                                                  Catalogue: what lies on disk

It lives in one event loop. Between two awaits its view does not change, so each command is decided
by the table in states.py and begun without an await in between. A name has one job at a time; many
may wait for it, and none of them can cancel it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from sgl_esft.errors import (
    AdapterBusyError,
    AdapterExistsError,
    AdapterNotLoadedError,
    AdapterPathError,
    EsftError,
    InternalError,
    UnknownAdapterError,
)
from sgl_esft.formats.adapter_paths import resolve_adapter_path
from sgl_esft.lifecycle.catalogue import Catalogue, Source, check_name
from sgl_esft.lifecycle.engine import AdapterEngine, LoadedAdapter
from sgl_esft.lifecycle.failures import Failure, Failures
from sgl_esft.lifecycle.folders import DigestCache, Fingerprint, fingerprint
from sgl_esft.lifecycle.jobs import Job, JobKind
from sgl_esft.lifecycle.states import Action, Command, Situation, decide
from sgl_esft.lifecycle.usable import UsableNames

logger = logging.getLogger(__name__)

DEFAULT_ENSURE_TIMEOUT_S: Final = 120.0


class AdapterLibrary:
    """All adapters that are known, loaded or not.

    Commands return the job to wait for, None if nothing was left to do, and raise EsftError for
    what cannot be: AdapterNameError, AdapterPathError, UnknownAdapterError, AdapterExistsError,
    AdapterNotLoadedError, AdapterBusyError. A job's own error comes from waiting for it.
    """

    def __init__(
        self,
        engine: AdapterEngine,
        catalogue: Catalogue,
        digests: DigestCache | None = None,
        *,
        ensure_timeout_s: float = DEFAULT_ENSURE_TIMEOUT_S,
    ) -> None:
        self.engine = engine
        self.catalogue = catalogue
        self.digests = DigestCache() if digests is None else digests
        self._ensure_timeout_s = ensure_timeout_s
        self._jobs: dict[str, Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sources: dict[str, Source] = {}  # of what was loaded once; it may have been evicted
        self._failures = Failures()
        # Unloaded on purpose: no request brings it back until its folder changes or somebody asks.
        self._held: dict[str, Fingerprint | None] = {}

    @property
    def jobs(self) -> dict[str, Job]:
        """What goes on, by name."""
        return dict(self._jobs)

    def loaded(self) -> dict[str, LoadedAdapter]:
        """What the engine serves now, by name."""
        found = {each.name: each for each in self.engine.loaded()}
        for each in found.values():
            known = self._sources.get(each.name)
            if known is None or known.adapter_id != each.adapter_id:
                self._sources[each.name] = self.catalogue.source_of(each)
        return found

    def names(self) -> list[str]:
        """Every name that anything is known of."""
        known = (self.loaded(), self._sources, self._jobs, self._failures, self.catalogue.entries)
        return sorted({name for each in known for name in each})

    @property
    def usable(self) -> Collection[str]:
        """Names that a request may say: loaded, or loaded for it by `ensure`. Always as of now."""
        return UsableNames(self)

    def situation(self, name: str, loaded: Collection[str] | None = None) -> Situation:
        """Where the table of states.py finds a name; `loaded` for who asks of many at once."""
        job = self._jobs.get(name)
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
        if name in self._sources:
            return Situation.EVICTED
        known = (self._failures, self.catalogue.entries)
        return Situation.ON_DISK if any(name in each for each in known) else Situation.ABSENT

    def is_usable(self, name: str, loaded: Collection[str] | None = None) -> bool:
        """Whether `ensure` answers for a name, if only with the error of its load."""
        action = decide(Command.USE, self.situation(name, loaded))
        return action is not Action.UNKNOWN and not (action is Action.START and self.is_held(name))

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

    def _obstacle_of(self, name: str) -> EsftError | None:
        """Why loading it again would fail again: nothing has changed since."""
        entry, folder = self.catalogue.entries.get(name), self.folder_of(name)
        failure = self._failures.get(name)
        if failure is not None and failure.is_lasting and failure.folder == folder:
            return self.failure_of(name)
        return None if entry is None or entry.folder != folder else entry.error

    async def _look_again(self, name: str) -> None:
        """A folder that failed, and that nobody watches, may have changed since."""
        entry, failure = self.catalogue.entries.get(name), self._failures.get(name)
        if failure is None or (entry is not None and entry.folder == failure.folder):
            return
        seen = await asyncio.to_thread(fingerprint, failure.folder)
        if seen is not None and seen != failure.seen:
            self._failures.outdate(name, failure)

    def folder_of(self, name: str) -> Path | None:
        """Where a load without a path reads from."""
        job = self._jobs.get(name)
        return self.home_of(name) if job is None else job.folder

    def home_of(self, name: str) -> Path | None:
        """The folder of a name on which no work goes on.

        An evicted adapter comes back from where it came, whatever lies below the root by its name.
        """
        source, entry = self._sources.get(name), self.catalogue.entries.get(name)
        if source is not None and not source.is_own:
            return source.folder
        for known in (entry, source, self._failures.get(name)):
            if known is not None:
                return known.folder
        return None

    async def load(self, name: str, path: str | None = None, *, pinned: bool = False) -> Job | None:
        """Load a name; of what is loaded with this content already, at most pin it."""
        check_name(name)
        folder = await self._resolve(name, path)
        digest: str | None = None
        while decide(Command.LOAD, self.situation(name)) is Action.COMPARE and digest is None:
            digest = await self.digests.read(folder)
        action = decide(Command.LOAD, self.situation(name))
        if action is Action.START:
            return self._start(Job(JobKind.LOAD, name, folder, pinned))
        if action is not Action.COMPARE:
            return self._join(action, name, folder, pinned or None)
        if self.loaded()[name].digest != digest:
            raise AdapterExistsError(
                f"adapter {name!r} is loaded with other content: replace it by PATCH "
                f"/v1/adapters/{name}, or unload it first"
            )
        if pinned and not self.loaded()[name].pinned:
            await self._pin(name, True)
        return None

    async def replace(
        self, name: str, path: str | None = None, *, pinned: bool | None = None
    ) -> Job | None:
        """Load another version, or the folder as it is now, in place of what is loaded.

        What was evicted is loaded as that version: at once, so that a folder that is refused is
        heard of now, and the name goes on meaning the old one.
        """
        if decide(Command.REPLACE, self.situation(name)) in (Action.UNKNOWN, Action.NOT_LOADED):
            self._join(decide(Command.REPLACE, self.situation(name)), name)
        folder = await self._resolve(name, path)
        digest = await self.digests.read(folder)
        action = decide(Command.REPLACE, self.situation(name))
        if action is Action.BRING_BACK:
            return self._start(Job(JobKind.LOAD, name, folder, bool(pinned)))
        if action is not Action.START:
            return self._join(action, name, folder, pinned)
        old = self.loaded()[name]
        pinned = old.pinned if pinned is None else pinned
        if old.digest != digest:
            return self._start(Job(JobKind.REPLACE, name, folder, pinned))
        if pinned != old.pinned:
            await self._pin(name, pinned)
        return None

    async def set_pinned(self, name: str, pinned: bool) -> Job | None:
        """Pin or unpin a loaded adapter; one that was evicted is loaded for a pin."""
        action = decide(Command.PIN, self.situation(name))
        if action is Action.BRING_BACK:
            return self._bring_back(name) if pinned else None
        if action is not Action.START:
            self._join(action, name)
        if self.loaded()[name].pinned != pinned:
            await self._pin(name, pinned)
        return None

    def _bring_back(self, name: str) -> Job:
        folder = self.home_of(name) or self._sources[name].folder
        return self._start(Job(JobKind.LOAD, name, folder, pinned=True))

    async def _pin(self, name: str, pinned: bool) -> None:
        """Whoever asked may leave; the ranks must not be told by halves."""
        await asyncio.shield(self.engine.set_pinned(name, pinned))

    def unload(self, name: str) -> Job | None:
        """Let a name go. A load or a replacement that goes on ends first."""
        action = decide(Command.UNLOAD, self.situation(name))
        job = self._jobs.get(name)
        if action is Action.START:
            return self._start(Job(JobKind.UNLOAD, name, self.loaded()[name].folder))
        if action is Action.QUEUE and job is not None:
            job.unload_next = Job(JobKind.UNLOAD, name, job.folder)
            return job.unload_next
        if action is Action.JOIN and job is not None:
            return job.unload_next or job
        if action is Action.FORGET:
            return self._let_go(name)
        return self._join(action, name)

    def _let_go(self, name: str) -> Job | None:
        """Of what was evicted the engine may keep something."""
        source = self._sources.get(name)
        if source is not None:
            return self._start(Job(JobKind.UNLOAD, name, source.folder))
        self._forget(name)
        return None

    async def ensure(self, names: Iterable[str]) -> None:
        """Return once a request may use all of these.

        Loads what is on disk, each name once however many ask. Raises the load's error,
        UnknownAdapterError, or AdapterLoadTimeoutError when it takes too long.
        """
        wanted = sorted(set(names))
        for name in wanted:
            await self._look_again(name)
        jobs = [job for name in wanted if (job := self._use(name)) is not None]
        if jobs:
            await asyncio.gather(*(job.wait(self._ensure_timeout_s) for job in jobs))

    def _use(self, name: str) -> Job | None:
        action = decide(Command.USE, self.situation(name))
        if action is Action.NOTHING:
            return None
        if action is Action.JOIN:
            return self._jobs[name]
        if action is not Action.START or self.is_held(name):
            return self._join(Action.UNKNOWN, name)
        obstacle = self._obstacle_of(name)
        if obstacle is not None:
            raise obstacle.with_traceback(None)
        folder = self.folder_of(name)
        if folder is None:
            return self._join(Action.UNKNOWN, name)
        return self._start(Job(JobKind.LOAD, name, folder))

    async def _resolve(self, name: str, path: str | None) -> Path:
        """The real folder of a command. Raises AdapterPathError."""
        root = self.catalogue.root
        folder = self.home_of(name) if name in self.loaded() else self.folder_of(name)
        if path is None and folder is None:
            if root is None:
                raise AdapterPathError(
                    f'adapter {name!r}: say where it is, by "path"; only with --adapter-root is '
                    "there a folder to look in"
                )
            path = name
        return await asyncio.to_thread(resolve_adapter_path, path or str(folder), root)

    def _join(
        self, action: Action, name: str, folder: Path | None = None, pinned: bool | None = None
    ) -> Job:
        """The job to wait for; raises what the action stands for."""
        job = self._jobs.get(name)
        if action in (Action.JOIN, Action.JOIN_IF_SAME) and job is not None:
            is_same = job.folder == folder and pinned in (None, job.pinned)
            if action is Action.JOIN or is_same:
                return job
        if action is Action.UNKNOWN:
            raise UnknownAdapterError(f"adapter {name!r} is not known; loaded: {self._listed()}")
        situation = self.situation(name).value
        if action is Action.NOT_LOADED:
            raise AdapterNotLoadedError(
                f"adapter {name!r} is {situation}, not loaded: load it by POST /v1/adapters first"
            )
        raise AdapterBusyError(f"adapter {name!r} is {situation}: ask again when that has ended")

    def _listed(self) -> str:
        return ", ".join(sorted(self.loaded())[:20]) or "none"

    def _start(self, job: Job) -> Job:
        """Begin now: nothing may come between a decision and this."""
        self._jobs[job.name] = job
        self._held.pop(job.name, None)
        task = asyncio.create_task(self._run(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return job

    async def _run(self, job: Job) -> None:
        seen: Fingerprint | None = None
        try:
            seen = await asyncio.to_thread(fingerprint, job.folder)
            result = await self._work(job)
        except EsftError as error:
            self._settle(job, seen, error)
        except Exception as error:  # those who wait must hear of it
            logger.exception("the %s of adapter %s failed", job.kind.value, job.name)
            self._settle(job, seen, InternalError(f"{type(error).__name__}: {error}"))
        else:
            self._settle(job, seen, result)

    async def _work(self, job: Job) -> LoadedAdapter | None:
        if job.kind is JobKind.UNLOAD:
            with contextlib.suppress(UnknownAdapterError):  # it was evicted, and is gone
                await self.engine.unload(job.name)
            return None
        begin = self.engine.load if job.kind is JobKind.LOAD else self.engine.replace
        return await begin(job.name, job.folder, pinned=job.pinned, on_progress=job.note)

    def _settle(
        self, job: Job, seen: Fingerprint | None, result: LoadedAdapter | EsftError | None
    ) -> None:
        """The job has ended; what was asked for meanwhile begins in the same breath."""
        del self._jobs[job.name]
        if isinstance(result, EsftError):
            self._note_failure(job, seen, result)
            job.done.set_exception(result)
        else:
            self._note_success(job, seen, result)
            job.done.set_result(result)
        if job.unload_next is None:
            return
        if job.name in self.loaded() or job.name in self._sources:
            self._start(job.unload_next)
        else:
            self._forget(job.name)
            job.unload_next.done.set_result(None)

    def _note_success(
        self, job: Job, seen: Fingerprint | None, loaded: LoadedAdapter | None
    ) -> None:
        if loaded is None:
            self._forget(job.name)
            return
        self.loaded()  # notes its source while a link still leads where it was followed
        self._failures.forget(job.name)
        self.digests.put(job.folder, seen, loaded.digest)

    def _note_failure(self, job: Job, seen: Fingerprint | None, error: EsftError) -> None:
        shown = str(error).encode(errors="backslashreplace").decode()  # file names may be any bytes
        logger.warning("adapter %s: the %s failed: %s", job.name, job.kind.value, shown)
        failure = Failure(job.kind, job.folder, seen, error.with_traceback(None))
        self._failures.note(job.name, failure)

    def _forget(self, name: str) -> None:
        entry = self.catalogue.entries.get(name)
        self._sources.pop(name, None)
        self._failures.forget(name)
        self._held.pop(name, None)
        if entry is not None:
            self._held[name] = entry.seen
