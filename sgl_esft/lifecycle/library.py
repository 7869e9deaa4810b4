"""The adapters of one server: every change and every question goes through one object.

    /v1/adapters, /load_lora_adapter --command--> [AdapterLibrary] --job--> AdapterEngine -> ranks
    a request that names an adapter --ensure---->      |
                                                  KnownAdapters: what is known of names

It lives in one event loop. Between two awaits its view does not change, so each command is decided
by the table in states.py and begun without an await in between. A name has one job at a time; many
may wait for it, and none of them can cancel it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
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
from sgl_esft.lifecycle.adapter_engine import AdapterEngine, LoadedAdapter
from sgl_esft.lifecycle.catalogue import Catalogue, check_name
from sgl_esft.lifecycle.folders import DigestCache, Fingerprint, fingerprint
from sgl_esft.lifecycle.jobs import Job, JobKind
from sgl_esft.lifecycle.known import KnownAdapters
from sgl_esft.lifecycle.states import Action, Command

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
        *,
        ensure_timeout_s: float = DEFAULT_ENSURE_TIMEOUT_S,
    ) -> None:
        self.engine = engine
        self.known = KnownAdapters(engine, catalogue)
        self.digests = DigestCache()
        self._ensure_timeout_s = ensure_timeout_s
        self._tasks: set[asyncio.Task[None]] = set()

    async def load(self, name: str, path: str | None = None, *, pinned: bool = False) -> Job | None:
        """Load a name; of what is loaded with this content already, at most pin it."""
        check_name(name)
        folder = await self._resolve(name, path)
        digest: str | None = None
        while self.known.action(Command.LOAD, name) is Action.COMPARE and digest is None:
            digest = await self.digests.read(folder)
        action = self.known.action(Command.LOAD, name)
        if action is Action.START:
            return self._start(Job(JobKind.LOAD, name, folder, pinned))
        if action is not Action.COMPARE:
            return self._join(action, name, folder, pinned or None)
        if self.known.loaded()[name].digest != digest:
            raise AdapterExistsError(
                f"adapter {name!r} is loaded with other content: replace it by PATCH "
                f"/v1/adapters/{name}, or unload it first"
            )
        if pinned and not self.known.loaded()[name].pinned:
            await self._pin(name, True)
        return None

    async def replace(
        self, name: str, path: str | None = None, *, pinned: bool | None = None
    ) -> Job | None:
        """Load another version, or the folder as it is now, in place of what is loaded.

        What was evicted is loaded as that version: at once, so that a folder that is refused is
        heard of now, and the name goes on meaning the old one.
        """
        if self.known.action(Command.REPLACE, name) in (Action.UNKNOWN, Action.NOT_LOADED):
            self._join(self.known.action(Command.REPLACE, name), name)
        folder = await self._resolve(name, path)
        digest = await self.digests.read(folder)
        action = self.known.action(Command.REPLACE, name)
        if action is Action.BRING_BACK:
            return self._start(Job(JobKind.LOAD, name, folder, bool(pinned)))
        if action is not Action.START:
            return self._join(action, name, folder, pinned)
        old = self.known.loaded()[name]
        pinned = old.pinned if pinned is None else pinned
        if old.digest != digest:
            return self._start(Job(JobKind.REPLACE, name, folder, pinned))
        if pinned != old.pinned:
            await self._pin(name, pinned)
        return None

    async def set_pinned(self, name: str, pinned: bool) -> Job | None:
        """Pin or unpin a loaded adapter; one that was evicted is loaded for a pin."""
        action = self.known.action(Command.PIN, name)
        folder = self.known.home_of(name)
        if action is Action.BRING_BACK and folder is not None:
            return self._start(Job(JobKind.LOAD, name, folder, pinned=True)) if pinned else None
        if action is not Action.START:
            self._join(action, name)
        if self.known.loaded()[name].pinned != pinned:
            await self._pin(name, pinned)
        return None

    async def _pin(self, name: str, pinned: bool) -> None:
        """Whoever asked may leave; the ranks must not be told by halves."""
        await asyncio.shield(self.engine.set_pinned(name, pinned))

    def unload(self, name: str) -> Job | None:
        """Let a name go. A load or a replacement that goes on ends first."""
        action = self.known.action(Command.UNLOAD, name)
        job = self.known.jobs.get(name)
        if action is Action.START:
            return self._start(Job(JobKind.UNLOAD, name, self.known.loaded()[name].folder))
        if action is Action.QUEUE and job is not None:
            job.unload_next = Job(JobKind.UNLOAD, name, job.folder)
            return job.unload_next
        if action is Action.JOIN and job is not None:
            return job.unload_next or job
        if action is not Action.FORGET:
            return self._join(action, name)
        source = self.known.sources.get(name)
        if source is not None:  # of what was evicted the engine may keep something
            return self._start(Job(JobKind.UNLOAD, name, source.folder))
        self.known.forget(name)
        return None

    async def ensure(self, names: Iterable[str]) -> None:
        """Return once a request may use all of these.

        Loads what is on disk, each name once however many ask. Raises the load's error,
        UnknownAdapterError, or AdapterLoadTimeoutError when it takes too long.
        """
        wanted = sorted(set(names))
        for name in wanted:
            await self.known.look_again(name)
        jobs = [job for name in wanted if (job := self._use(name)) is not None]
        if jobs:
            await asyncio.gather(*(job.wait(self._ensure_timeout_s) for job in jobs))

    def _use(self, name: str) -> Job | None:
        action = self.known.action(Command.USE, name)
        if action is Action.NOTHING:
            return None
        if action is Action.JOIN:
            return self.known.jobs[name]
        if action is not Action.START or self.known.is_held(name):
            return self._join(Action.UNKNOWN, name)
        obstacle = self.known.obstacle_of(name)
        if obstacle is not None:
            raise obstacle.with_traceback(None)
        folder = self.known.folder_of(name)
        if folder is None:
            return self._join(Action.UNKNOWN, name)
        return self._start(Job(JobKind.LOAD, name, folder))

    async def _resolve(self, name: str, path: str | None) -> Path:
        """The real folder of a command. Raises AdapterPathError."""
        root = self.known.catalogue.root
        folder = (
            self.known.home_of(name) if name in self.known.loaded() else self.known.folder_of(name)
        )
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
        job = self.known.jobs.get(name)
        if action in (Action.JOIN, Action.JOIN_IF_SAME) and job is not None:
            is_same = job.folder == folder and pinned in (None, job.pinned)
            if action is Action.JOIN or is_same:
                return job
        if action is Action.UNKNOWN:
            # Without others' names: a request's client may not be one to know them.
            raise UnknownAdapterError(
                f"adapter {name!r} is not known; GET /v1/adapters lists those that are"
            )
        situation = self.known.situation(name).value
        if action is Action.NOT_LOADED:
            raise AdapterNotLoadedError(
                f"adapter {name!r} is {situation}, not loaded: load it by POST /v1/adapters first"
            )
        raise AdapterBusyError(f"adapter {name!r} is {situation}: ask again when that has ended")

    def _start(self, job: Job) -> Job:
        """Begin now: nothing may come between a decision and this."""
        self.known.begin(job)
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
            self._finish(job, seen, error)
        except Exception as error:  # those who wait must hear of it
            logger.exception("the %s of adapter %s failed", job.kind.value, job.name)
            self._finish(job, seen, InternalError(f"{type(error).__name__}: {error}"))
        else:
            self._finish(job, seen, result)

    async def _work(self, job: Job) -> LoadedAdapter | None:
        if job.kind is JobKind.UNLOAD:
            with contextlib.suppress(UnknownAdapterError):  # it was evicted, and is gone
                await self.engine.unload(job.name)
            return None
        begin = self.engine.load if job.kind is JobKind.LOAD else self.engine.replace
        return await begin(job.name, job.folder, pinned=job.pinned, on_progress=job.note)

    def _finish(
        self, job: Job, seen: Fingerprint | None, result: LoadedAdapter | EsftError | None
    ) -> None:
        """The job has ended; what was asked for meanwhile begins in the same breath."""
        del self.known.jobs[job.name]
        if isinstance(result, EsftError):
            self.known.note_failure(job, seen, result)
            job.done.set_exception(result)
        else:
            if result is None:
                self.known.forget(job.name)
            else:
                self.known.note_loaded(job.name)
                self.digests.put(job.folder, seen, result.digest)
            job.done.set_result(result)
        if job.unload_next is None:
            return
        if job.name in self.known.loaded() or job.name in self.known.sources:
            self._start(job.unload_next)
        else:
            self.known.forget(job.name)
            job.unload_next.done.set_result(None)
