"""What an adapter folder holds, told without reading its weights where that can be.

    folder --stat--> [fingerprint] --> did it change?
    folder --read--> [DigestCache] --> which content is it?

A fingerprint costs a few system calls; a digest reads every byte, in a thread, and once for each
fingerprint.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

import xxhash

from sgl_esft.errors import EsftError
from sgl_esft.formats.adapter_config import EXPERT_CONFIG_NAME, LORA_CONFIG_NAME
from sgl_esft.formats.adapter_paths import PICKLE_SUFFIXES
from sgl_esft.lifecycle.content import digest_of

_CHECKED_NAMES: Final = frozenset({EXPERT_CONFIG_NAME, LORA_CONFIG_NAME, "config.json"})
_CHECKED_SUFFIXES: Final = (".safetensors", ".safetensors.index.json")
_MAX_DIGESTS: Final = 1024

Fingerprint: TypeAlias = str
Digest: TypeAlias = Callable[[Path], str]


def fingerprint(folder: Path) -> Fingerprint | None:
    """Changes when the adapter's files do, by name, size, time or inode; None without a folder.

    Files that only decide whether the adapter is refused count too: once they are gone or mended,
    it is to be looked at again.
    """
    seen = xxhash.xxh3_128()
    try:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda each: each.name):
                if _is_checked(entry):
                    found = _stat(entry)
                    parts = (found.st_size, found.st_mtime_ns, found.st_ino)
                    seen.update(f"{entry.name}\0{parts}\0".encode("utf-8", "surrogateescape"))
    except OSError:
        return None
    return seen.hexdigest()


def _is_checked(entry: os.DirEntry[str]) -> bool:
    """Whether manifest.py or adapter_paths.py looks at the file."""
    name = entry.name
    is_named = name in _CHECKED_NAMES or name.endswith(_CHECKED_SUFFIXES)
    return is_named or Path(name).suffix.lower() in PICKLE_SUFFIXES or entry.is_symlink()


def _stat(entry: os.DirEntry[str]) -> os.stat_result:
    try:
        return entry.stat()
    except OSError:  # a link that leads nowhere
        return entry.stat(follow_symlinks=False)


class DigestCache:
    """Contents' digests by folder and fingerprint, the newest ones. Of one event loop."""

    def __init__(self, digest: Digest = digest_of) -> None:
        self._digest = digest
        self._known: OrderedDict[tuple[Path, Fingerprint], str] = OrderedDict()
        self._wanted: dict[Path, asyncio.Task[str | None]] = {}

    def put(self, folder: Path, seen: Fingerprint | None, digest: str) -> None:
        """What somebody else has read."""
        if seen is not None:
            self._known[folder, seen] = digest
            while len(self._known) > _MAX_DIGESTS:
                self._known.popitem(last=False)

    def get(self, folder: Path, seen: Fingerprint | None) -> str | None:
        """The digest, if it was read with this fingerprint."""
        return None if seen is None else self._known.get((folder, seen))

    async def read(self, folder: Path) -> str:
        """The digest of what the folder holds now. Raises as `digest_of`."""
        seen = await asyncio.to_thread(fingerprint, folder)
        known = self.get(folder, seen)
        if known is not None:
            return known
        digest = await asyncio.to_thread(self._digest, folder)
        self.put(folder, seen, digest)
        return digest

    def read_later(self, folder: Path) -> None:
        """Read it beside everything else; `get` will know."""
        if folder not in self._wanted:
            task = asyncio.create_task(self._read_quietly(folder))
            self._wanted[folder] = task
            task.add_done_callback(lambda _: self._wanted.pop(folder, None))

    async def _read_quietly(self, folder: Path) -> str | None:
        """A folder that cannot be read has no digest: whoever loads it gets the error."""
        try:
            return await self.read(folder)
        except (EsftError, OSError):
            return None
