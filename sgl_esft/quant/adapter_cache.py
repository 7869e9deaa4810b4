"""Quantised copies of adapters on disk: made by the first process that needs one, used by all.

    AdapterManifest, digest -> [quantised_copy] -> manifest of the copy -> weave/host_cache.py
      CACHE/<digest>-<scheme>-<version of the rounding>/   an ordinary adapter folder, quantised
      CACHE/.lock                                          held by the one process that writes

A folder under its final name is whole. Who reads one holds a shared lock of its expert_cfg.json;
who removes one needs that lock for itself, so what is read stays. Locks vanish with their process,
and what a killed one left half written is removed by the next that writes.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from sgl_esft.byte_size import gigabytes
from sgl_esft.errors import (
    AdapterFormatError,
    AdapterTooLargeError,
    EsftError,
    InvariantError,
    QuantisedCopyError,
)
from sgl_esft.formats.adapter_config import EXPERT_CONFIG_NAME
from sgl_esft.formats.checkpoint import new_folder
from sgl_esft.formats.expert_scheme import SCHEME_NAMES
from sgl_esft.formats.manifest import AdapterManifest, content_digest, read_manifest
from sgl_esft.formats.model_spec import MoeSpec
from sgl_esft.quant.adapter_copy import OnRead, quantised_bytes, sync, write_quantised

ROUNDING_VERSION: Final = 1
"""Goes up when rounding.py makes other bytes of the same weights: old copies are not found then."""

_LOCK_NAME: Final = ".lock"
_REMOVED_SUFFIX: Final = ".removed"
_POLL_S: Final = 0.05
_CONFIG_BYTES: Final = 64 << 10  # of expert_cfg.json, at most
# Nothing else in the folder is touched, whatever folder somebody names.
_COPY = re.compile(rf"[0-9a-f]+-({'|'.join(SCHEME_NAMES)})(-[0-9a-z]+)*-[0-9]+", re.ASCII)
_LEFT = re.compile(rf"\.{_COPY.pattern}(\.partial|\{_REMOVED_SUFFIX})", re.ASCII)


@contextmanager
def quantised_copy(
    manifest: AdapterManifest,
    spec: MoeSpec,
    digest: str,
    cache_dir: Path,
    on_read: OnRead = lambda num_bytes: None,
    *,
    max_bytes: int | None = None,
) -> Iterator[AdapterManifest]:
    """The manifest of an unquantised adapter's copy in the base's scheme, made if it is not there.

    The copy cannot be removed within the block; `path` is still the adapter's own folder. `digest`:
    `content_digest` of that. `on_read` is told of every piece of the adapter that is read to make
    the copy, and of 0 bytes while another process makes one; what it raises ends this and leaves
    nothing. `max_bytes`: of all copies; those used longest ago are removed for a new one.

    Raises AdapterNotFiniteError, and AdapterFormatError when the adapter changed since it was
    validated; AdapterTooLargeError if its copy alone is over `max_bytes`; QuantisedCopyError when
    others that are read leave no room, and where `cache_dir` cannot be written or is full.
    """
    if spec.scheme is None or manifest.scheme is not None:
        raise InvariantError("asked for a quantised copy of what needs none")
    _check_size(manifest, spec, max_bytes)
    copy = cache_dir / copy_name(digest, spec)
    with _named(cache_dir):
        lease = _lease(copy, spec)
        while lease is None:
            with _sole_writer(cache_dir, on_read):
                if not _is_sound(copy, spec):
                    _write(manifest, spec, digest, copy, on_read, max_bytes)
            lease = _lease(copy, spec)
    descriptor, found = lease
    try:
        yield replace(found, path=manifest.path)
    finally:
        os.close(descriptor)


def copy_name(digest: str, spec: MoeSpec) -> str:
    """Of the copy's folder: the content, the scheme with its numbers, the rounding."""
    if spec.scheme is None:
        raise InvariantError("an unquantised base has no copies")
    return f"{digest}-{spec.scheme.label}-{ROUNDING_VERSION}"


def bytes_to_quantise(
    manifest: AdapterManifest, spec: MoeSpec, digest: str, cache_dir: Path
) -> int:
    """What `on_read` of `quantised_copy` will have been told in the end: 0 if the copy is there.

    An estimate, for progress: others may make or remove the copy meanwhile.
    """
    return 0 if (cache_dir / copy_name(digest, spec)).exists() else manifest.num_bytes


def _check_size(manifest: AdapterManifest, spec: MoeSpec, max_bytes: int | None) -> None:
    num_bytes = _copy_bytes(manifest, spec)
    if max_bytes is not None and num_bytes > max_bytes:
        raise AdapterTooLargeError(
            f"the adapter's quantised copy takes up to {gigabytes(num_bytes)} of disk, and all "
            f"copies may take {gigabytes(max_bytes)}: raise --quantised-adapters-bytes, or store "
            "the adapter quantised (`sgl-esft quantise --adapter`)."
        )


def _copy_bytes(manifest: AdapterManifest, spec: MoeSpec) -> int:
    return quantised_bytes(manifest, spec) + _CONFIG_BYTES


def _lease(copy: Path, spec: MoeSpec) -> tuple[int, AdapterManifest] | None:
    """A descriptor that keeps the copy until it is closed; None: there is none, or it is spoilt."""
    config = copy / EXPERT_CONFIG_NAME
    try:
        descriptor = os.open(config, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    manifest = None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # never long: for itself it is held to remove alone
        if _is_at(descriptor, config):
            with suppress(OSError):  # in a folder of somebody else's
                os.utime(descriptor)
            manifest = _read(copy, spec)
    finally:
        if manifest is None:
            os.close(descriptor)
    return None if manifest is None else (descriptor, manifest)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still what lies there."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _read(copy: Path, spec: MoeSpec) -> AdapterManifest | None:
    """None for a copy that something else has spoilt: it is made anew."""
    try:
        found = read_manifest(copy, spec)
    except EsftError:
        return None
    return found if found.scheme == spec.scheme else None


def _is_sound(copy: Path, spec: MoeSpec) -> bool:
    return copy.exists() and _read(copy, spec) is not None


@contextmanager
def _sole_writer(cache_dir: Path, on_read: OnRead) -> Iterator[None]:
    """Waits for other writers, telling `on_read` so."""
    cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(cache_dir / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not _lock_alone(descriptor):
            on_read(0)
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _lock_alone(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(
    manifest: AdapterManifest,
    spec: MoeSpec,
    digest: str,
    copy: Path,
    on_read: OnRead,
    max_bytes: int | None,
) -> None:
    """Make the copy; only while nobody else writes."""
    cache_dir = copy.parent
    for left in cache_dir.iterdir():
        if _LEFT.fullmatch(left.name):
            shutil.rmtree(left)
    if copy.exists():  # spoilt
        _remove(copy)
    if max_bytes is not None:
        _make_room(cache_dir, _copy_bytes(manifest, spec), max_bytes)
    with new_folder(copy) as folder:
        write_quantised(manifest, spec, folder, on_read)
        # Else a folder that was overwritten meanwhile would be served under its old content's name.
        if content_digest(manifest.path, lambda: on_read(0)) != digest:
            raise AdapterFormatError(
                f"{manifest.path.name} changed while it was quantised: load it again."
            )
    sync(cache_dir)
    read_manifest(copy, spec)


def _make_room(cache_dir: Path, num_bytes: int, max_bytes: int) -> None:
    """Remove copies, the one used longest ago first, until there is room for so many bytes."""
    copies = {c: _num_bytes(c) for c in cache_dir.iterdir() if _COPY.fullmatch(c.name)}
    num_held = sum(copies.values())
    for copy in sorted(copies, key=_last_used):
        if num_held + num_bytes <= max_bytes:
            return
        if _remove_unused(copy):
            num_held -= copies[copy]
    if num_held + num_bytes > max_bytes:
        raise QuantisedCopyError(
            f"a quantised copy of {gigabytes(num_bytes)} has no room beside "
            f"{gigabytes(num_held)} of others that are read now, or are somebody else's: raise "
            f"--quantised-adapters-bytes, which is {gigabytes(max_bytes)}, or wait."
        )


def _num_bytes(copy: Path) -> int:
    return sum(file.stat().st_size for file in copy.iterdir())


def _last_used(copy: Path) -> float:
    try:
        return (copy / EXPERT_CONFIG_NAME).stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _remove_unused(copy: Path) -> bool:
    """Whether the copy was removed: it was not, if somebody reads it."""
    try:
        descriptor = os.open(copy / EXPERT_CONFIG_NAME, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        _remove(copy)
        return True
    except PermissionError:  # somebody else's
        return False
    try:
        is_unused = _lock_alone(descriptor)
        if is_unused:
            _remove(copy)
    finally:
        os.close(descriptor)
    return is_unused


def _remove(copy: Path) -> None:
    """In one step for all who look for it, whatever happens after."""
    removed = copy.with_name(f".{copy.name}{_REMOVED_SUFFIX}")
    copy.rename(removed)
    shutil.rmtree(removed)


@contextmanager
def _named(cache_dir: Path) -> Iterator[None]:
    """What the system says of the cache's folder, as an error that says which folder."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # what `on_read` raises may be a TimeoutError
            raise
        raise QuantisedCopyError(
            f"{cache_dir} cannot hold the adapter's quantised copy: {error.strerror or error}. "
            "Name a folder that can be written, with room, by --quantised-adapters."
        ) from error
