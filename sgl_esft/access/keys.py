"""API keys: where they come from, and whose key a request shows.

    keys file, --api-key, environment --> [KeyRing] <-- header of a request
                                             └--> Caller: name, adapters, limits

A key is kept as its SHA-256 only, so that nothing here can print it. Looking one up compares the
digest with every known one, in constant time each: how long it takes says nothing about the keys.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec

from sgl_esft.errors import ConfigError, EsftError
from sgl_esft.formats import strict_json
from sgl_esft.formats.adapter_paths import validate_adapter_name

MIN_KEY_LENGTH: Final = 16
MAX_KEY_LENGTH: Final = 256
_MAX_FILE_BYTES: Final = 1 << 20
_KEY = re.compile(rf"[\x21-\x7e]{{{MIN_KEY_LENGTH},{MAX_KEY_LENGTH}}}")
_GROUP_OR_OTHERS = stat.S_IRWXG | stat.S_IRWXO

_Name: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._-]{1,64}\Z")]
_Sha256: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_Limit: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]


@dataclass(frozen=True)
class Caller:
    """Who a request is from, and what they may do. None: not limited."""

    name: str
    is_admin: bool = False
    adapters: frozenset[str] | None = None
    base_model: bool = True  # whether the base may be asked without an adapter
    max_concurrency: int | None = None  # sequences at once
    tokens_per_minute: int | None = None

    @property
    def is_restricted(self) -> bool:
        """Whether it matters which adapter is asked for."""
        return self.adapters is not None or not self.base_model


@dataclass(frozen=True)
class KeyEntry:
    """One key, as a digest."""

    caller: Caller
    digest: bytes = field(repr=False)


class KeyRing:
    """All keys of a server."""

    def __init__(self, entries: Iterable[KeyEntry] = ()) -> None:
        self._entries = tuple(entries)
        _refuse_doubles(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"KeyRing({len(self)} keys)"

    @property
    def callers(self) -> tuple[Caller, ...]:
        """Whose keys there are, in their order."""
        return tuple(entry.caller for entry in self._entries)

    @property
    def has_admin(self) -> bool:
        return any(entry.caller.is_admin for entry in self._entries)

    @property
    def is_restricted(self) -> bool:
        """Whether some key may not use every adapter."""
        return any(entry.caller.is_restricted for entry in self._entries)

    def find(self, key: str) -> Caller | None:
        """Whose key this is; None for nobody's."""
        digest = digest_of(key)
        found: Caller | None = None
        for entry in self._entries:
            if hmac.compare_digest(entry.digest, digest):
                found = entry.caller
        return found


def digest_of(key: str) -> bytes:
    """What is kept of a key. Header bytes that are not characters of a key differ from any key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def entry_for(caller: Caller, key: str, source: str) -> KeyEntry:
    """An entry for a key in plain text; `source` names it in errors. Raises ConfigError."""
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"{source}: a key has {MIN_KEY_LENGTH} to {MAX_KEY_LENGTH} printable ASCII characters "
            "and no space"
        )
    return KeyEntry(caller, digest_of(key))


def admin_from_environment(variable: str, environment: Mapping[str, str]) -> KeyEntry:
    """The admin key in an environment variable. Raises ConfigError."""
    key = environment.get(variable)
    if not key:
        raise ConfigError(f"--admin-key-env {variable}: the variable is not set")
    return entry_for(Caller("admin", is_admin=True), key, f"--admin-key-env {variable}")


class _Fields(msgspec.Struct):
    """One key as a keys file has it."""

    name: _Name
    key: str | None = None
    sha256: _Sha256 | None = None
    admin: bool = False
    adapters: frozenset[str] | None = None
    base_model: bool = True
    max_concurrency: _Limit | None = None
    tokens_per_minute: _Limit | None = None


_FIELDS: Final = frozenset(_Fields.__struct_fields__)


def read_keys_file(path: Path) -> tuple[KeyEntry, ...]:
    """The entries of a keys file. Raises ConfigError, which never holds a key."""
    document = strict_json.parse_object(_read_private(path), path.name, ConfigError)
    listed = document.get("keys")
    if set(document) != {"keys"} or not isinstance(listed, list) or not listed:
        raise ConfigError(f'{path.name}: write {{"keys": [...]}} with at least one key')
    places = [f"{path.name}, key {number}" for number in range(1, len(listed) + 1)]
    lines = [_parse(each, where) for each, where in zip(listed, places, strict=True)]
    secrets = [line.key for line in lines if line.key and len(line.key) >= MIN_KEY_LENGTH]
    for line, where in zip(lines, places, strict=True):
        # Names are told in errors, logs and metrics.
        names = (line.name, *(line.adapters or ()))
        if any(secret in name for name in names for secret in secrets):
            raise ConfigError(f"{where}: a name in it holds a key")
    return tuple(_entry(line, where) for line, where in zip(lines, places, strict=True))


def _read_private(path: Path) -> bytes:
    with strict_json.open_regular(path, ConfigError) as file:
        status = os.fstat(file.fileno())
        if status.st_mode & _GROUP_OR_OTHERS or status.st_uid not in (0, os.geteuid()):
            raise ConfigError(
                f"{path.name} must be yours and nobody else's to read or write: chmod 600"
            )
        raw = file.read(_MAX_FILE_BYTES + 1)
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path.name} has more than {_MAX_FILE_BYTES} bytes")
    return raw


def _parse(value: object, where: str) -> _Fields:
    # Not msgspec's own refusal of unknown fields, which repeats their names: one may be a key.
    if not isinstance(value, dict) or not set(value) <= _FIELDS:
        raise ConfigError(f"{where}: an object of {', '.join(sorted(_FIELDS))}")
    try:
        return msgspec.convert(value, _Fields)
    except msgspec.ValidationError as error:  # says what was expected, not what was there
        raise ConfigError(f"{where}: {error}") from error


def _entry(line: _Fields, where: str) -> KeyEntry:
    try:
        for name in line.adapters or ():
            validate_adapter_name(name)
    except EsftError as error:
        raise ConfigError(f"{where}: adapters: {error}") from error
    caller = Caller(
        line.name,
        line.admin,
        line.adapters,
        line.base_model,
        line.max_concurrency,
        line.tokens_per_minute,
    )
    if (line.key is None) == (line.sha256 is None):
        raise ConfigError(f"{where}: give either key, or sha256")
    if line.sha256 is not None:
        return KeyEntry(caller, bytes.fromhex(line.sha256))
    return entry_for(caller, line.key or "", where)


def _refuse_doubles(entries: Iterable[KeyEntry]) -> None:
    names: set[str] = set()
    digests: dict[bytes, str] = {}
    for entry in entries:
        name = entry.caller.name
        if name in names:
            raise ConfigError(f"two keys are named {name!r}")
        if entry.digest in digests:
            raise ConfigError(f"{digests[entry.digest]!r} and {name!r} have the same key")
        names.add(name)
        digests[entry.digest] = name


# The keys that hold now: those of the keys file are read again when it changes.
#
#     keys file --changed? at most once a second--> [WatchedKeys.current] --> KeyRing, for the gate
#                      └-- broken: the old keys stay, an error is logged once
#
# A key that is taken out of the file opens nothing from then on; requests that it has begun go on.

CHECK_EVERY_S: Final = 1.0
_LOG: Final = logging.getLogger(__name__)

# What differs when a file was changed or replaced; None before the first look.
_Stamp: TypeAlias = tuple[int, int, int, int] | None


class WatchedKeys:
    """A key ring that follows its file. `read` makes the ring anew and raises ConfigError."""

    def __init__(
        self, path: Path, ring: KeyRing, read: Callable[[], KeyRing], clock: Callable[[], float]
    ) -> None:
        self._path = path
        self._ring = ring
        self._read = read
        self._clock = clock
        # The ring is of some moment before this, so what it was made of is not known: the first
        # look reads the file again.
        self._stamp: _Stamp = None
        self._looked_at = -CHECK_EVERY_S

    def current(self) -> KeyRing:
        """The keys of now, at most `CHECK_EVERY_S` late."""
        now = self._clock()
        if now - self._looked_at >= CHECK_EVERY_S:
            self._looked_at = now
            self._follow()
        return self._ring

    def _follow(self) -> None:
        stamp = _stamp_of(self._path)
        if stamp == self._stamp:
            return
        is_first = self._stamp is None
        self._stamp = stamp
        try:
            self._ring = self._read()
        except ConfigError as error:
            _LOG.error("ConfigError: %s; the keys stay as they were", error)
        else:
            if not is_first:
                _LOG.warning("%s was read again: %d keys", self._path.name, len(self._ring))


def _stamp_of(path: Path) -> _Stamp:
    try:
        status = path.stat()
    except OSError:
        return (0, 0, 0, 0)
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
