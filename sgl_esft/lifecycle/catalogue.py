"""The adapters that lie below --adapter-root, whether or not they are loaded.

    root --scan, in a thread--> [Catalogue] --> library.py: what a request may be loaded for
      `--event--> [Watcher, a thread] --refresh-->'

Each direct sub-folder with an expert_cfg.json and a legal name is an adapter; on a server that
takes LoRA adapters, one with an adapter_config.json too. A folder is checked (headers only) when it
is new or has changed, and what is wrong with it is kept beside its name.
A snapshot is one frozen value, so a thread may replace it while others read.

Events come from the kernel where it has them (not on NFS and its like), so the watcher also looks
by itself every POLL_S. Both together keep a listing within two seconds of the disk.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

from sgl_esft.errors import AdapterNameError, EsftError
from sgl_esft.formats.adapter_config import EXPERT_CONFIG_NAME, AdapterKind
from sgl_esft.formats.adapter_paths import resolve_adapter_path, validate_adapter_name
from sgl_esft.formats.lora_manifest import AnyManifest, LoraManifest
from sgl_esft.http.adapter_names import BASE_ALIASES
from sgl_esft.lifecycle.adapter_engine import LoadedAdapter
from sgl_esft.lifecycle.folders import Fingerprint, fingerprint

logger = logging.getLogger(__name__)

POLL_S: Final = 1.0
_DEBOUNCE_MS: Final = 400  # a copy is many events

# A folder -> what it holds. Raises one of the Adapter* errors.
Check: TypeAlias = Callable[[Path], AnyManifest]
_ESFT_ONLY: Final = (EXPERT_CONFIG_NAME,)


@dataclass(frozen=True)
class FolderEntry:
    """One adapter on disk."""

    name: str
    folder: Path
    seen: Fingerprint | None
    num_experts: int | None = None
    num_bytes: int | None = None
    error: EsftError | None = None  # why it cannot be loaded
    kind: AdapterKind | None = None  # None = cannot be told


@dataclass(frozen=True)
class Source:
    """Where the version came from that a name means, or meant when it was evicted."""

    adapter_id: str
    folder: Path
    is_own: bool  # the name's own folder below the root; a link there may lead elsewhere by now


def check_name(name: object) -> str:
    """The name, if an adapter may have it. Raises AdapterNameError."""
    checked = validate_adapter_name(name)
    if checked in BASE_ALIASES:
        raise AdapterNameError(f"adapter name {checked!r} means the base model: choose another one")
    return checked


Snapshot: TypeAlias = Mapping[str, FolderEntry]
EMPTY: Snapshot = MappingProxyType({})


def scan(
    root: Path, check: Check, previous: Snapshot = EMPTY, files: Collection[str] = _ESFT_ONLY
) -> Snapshot:
    """Every adapter below the root; what has not changed since `previous` is not checked again.

    files: one of them makes a folder an adapter. Raises OSError if the root itself cannot be read.
    """
    return MappingProxyType(
        {name: _entry(root, name, check, previous.get(name)) for name in names_below(root, files)}
    )


def names_below(root: Path, files: Collection[str] = _ESFT_ONLY) -> list[str]:
    """What the adapters below the root are called, whole or not. Raises OSError as `scan` does."""
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if _may_be_adapter(entry, files))


def _may_be_adapter(entry: os.DirEntry[str], files: Collection[str]) -> bool:
    try:
        validate_adapter_name(entry.name)
    except AdapterNameError:
        return False
    # By lexists: a link that leads out of the root, or nowhere, is listed with what is wrong.
    return any(os.path.lexists(os.path.join(entry.path, file)) for file in files)  # noqa: PTH118


def _entry(root: Path, name: str, check: Check, previous: FolderEntry | None) -> FolderEntry:
    folder = root / name
    seen = fingerprint(folder)
    if previous is not None and previous.seen == seen and seen is not None:
        return previous
    try:
        check_name(name)
        folder = resolve_adapter_path(name, root)
        manifest = check(folder)
    except EsftError as error:
        return FolderEntry(name, folder, seen, error=error.with_traceback(None))
    except OSError as error:  # it vanished or was cut off meanwhile; the next scan will tell
        logger.info("adapter folder %s cannot be read now: %s", name, error)
        return FolderEntry(name, folder, None, error=None)
    kind: AdapterKind = "lora" if isinstance(manifest, LoraManifest) else "esft"
    return FolderEntry(name, folder, seen, manifest.num_experts, manifest.num_bytes, kind=kind)


class Catalogue:
    """The newest snapshot. `refresh` may be called by any thread."""

    def __init__(
        self, root: Path | None, check: Check, files: Collection[str] = _ESFT_ONLY
    ) -> None:
        self.root = root
        self._files = files
        self._check = check
        self._snapshot: Snapshot = EMPTY
        self._is_lost = False  # the root could not be read, the last time
        self._lock = threading.Lock()

    @property
    def entries(self) -> Snapshot:
        """Adapter name -> its folder, as it was seen last."""
        return self._snapshot

    def source_of(self, loaded: LoadedAdapter) -> Source:
        """Where an adapter came from that has just been loaded."""
        own = None if self.root is None else os.path.realpath(self.root / loaded.name)
        return Source(loaded.adapter_id, loaded.folder, is_own=str(loaded.folder) == own)

    def refresh(self) -> None:
        """Scan again. A root that cannot be read leaves what was seen before."""
        if self.root is None:
            return
        with self._lock:
            try:
                found = scan(self.root, self._check, self._snapshot, self._files)
            except OSError as error:
                if not self._is_lost:  # said once, though it is looked at every second
                    logger.warning("--adapter-root cannot be read: %s", error)
                self._is_lost = True
                return
            self._is_lost = False
            _log_changes(self._snapshot, found)
            self._snapshot = found


def _log_changes(before: Snapshot, after: Snapshot) -> None:
    for name in sorted(before.keys() - after.keys()):
        logger.info("adapter folder %s is gone", name)
    for name, entry in after.items():
        if _says_the_same(before.get(name), entry):
            continue
        if entry.error is None:
            logger.info("adapter folder %s: %s experts", name, entry.num_experts)
        else:
            logger.warning("adapter folder %s: %s", name, entry.error)


def _says_the_same(before: FolderEntry | None, after: FolderEntry) -> bool:
    """A folder that cannot be looked into is checked at every scan, and not logged again."""
    if before is None:
        return False
    return before is after or (before.seen, str(before.error)) == (after.seen, str(after.error))


class Watcher:
    """Calls `refresh` in a thread of its own until it is stopped."""

    def __init__(self, root: Path, refresh: Callable[[], None]) -> None:
        self._root = root
        self._refresh = refresh
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="adapter-root", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        for _ in self._wakes():
            try:
                self._refresh()
            except Exception:  # a defect: what it met may be gone the next time
                logger.exception("what lies below --adapter-root cannot be listed now")

    def _wakes(self) -> Iterator[None]:
        """Once for each change, and every POLL_S."""
        from watchfiles import watch

        try:
            for _ in watch(
                self._root,
                watch_filter=None,
                debounce=_DEBOUNCE_MS,
                step=50,
                stop_event=self._stop,
                rust_timeout=int(POLL_S * 1000),
                yield_on_timeout=True,
                raise_interrupt=False,
            ):
                yield
        except (OSError, RuntimeError) as error:  # no events here: look by ourselves
            logger.warning("--adapter-root is polled, its events cannot be had: %s", error)
        while not self._stop.wait(POLL_S):
            yield
