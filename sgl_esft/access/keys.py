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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from sgl_esft.errors import ConfigError, EsftError
from sgl_esft.formats import strict_json
from sgl_esft.formats.adapter_paths import validate_adapter_name

MIN_KEY_LENGTH: Final = 16
MAX_KEY_LENGTH: Final = 256
_MAX_FILE_BYTES: Final = 1 << 20
_KEY = re.compile(rf"[\x21-\x7e]{{{MIN_KEY_LENGTH},{MAX_KEY_LENGTH}}}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FIELDS = {
    "name",
    "key",
    "sha256",
    "admin",
    "adapters",
    "base_model",
    "max_concurrency",
    "tokens_per_minute",
}
_GROUP_OR_OTHERS = stat.S_IRWXG | stat.S_IRWXO


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


def read_keys_file(path: Path) -> tuple[KeyEntry, ...]:
    """The entries of a keys file. Raises ConfigError, which never holds a key."""
    raw = _read_private(path)
    document = strict_json.parse_object(raw, path.name, ConfigError)
    listed = document.get("keys")
    if set(document) != {"keys"} or not isinstance(listed, list) or not listed:
        raise ConfigError(f'{path.name}: write {{"keys": [...]}} with at least one key')
    _refuse_shown_keys(listed, path.name)
    return tuple(
        _entry(each, f"{path.name}, key {number}") for number, each in enumerate(listed, 1)
    )


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


def _refuse_shown_keys(listed: Sequence[object], where: str) -> None:
    """Names are told in errors, logs and metrics."""
    keys = [each.get("key") for each in listed if isinstance(each, dict)]
    secrets = [key for key in keys if isinstance(key, str) and len(key) >= MIN_KEY_LENGTH]
    for number, each in enumerate(listed, 1):
        if any(secret in name for name in _names_in(each) for secret in secrets):
            raise ConfigError(f"{where}, key {number}: a name in it holds a key")


def _names_in(fields: object) -> Iterator[str]:
    if not isinstance(fields, dict):
        return
    adapters = fields.get("adapters")
    for name in (fields.get("name"), *(adapters if isinstance(adapters, list) else ())):
        if isinstance(name, str):
            yield name


def _entry(fields: object, where: str) -> KeyEntry:
    if not isinstance(fields, dict) or not set(fields) <= _FIELDS:
        raise ConfigError(f"{where}: an object of {', '.join(sorted(_FIELDS))}")
    name = fields.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: name is 1 to 64 of A-Z a-z 0-9 . _ -")
    caller = Caller(
        name,
        is_admin=_flag(fields, "admin", where, default=False),
        adapters=_adapters(fields.get("adapters"), where),
        base_model=_flag(fields, "base_model", where, default=True),
        max_concurrency=_limit(fields, "max_concurrency", where),
        tokens_per_minute=_limit(fields, "tokens_per_minute", where),
    )
    return _with_secret(caller, fields, where)


def _with_secret(caller: Caller, fields: Mapping[str, object], where: str) -> KeyEntry:
    key, digest = fields.get("key"), fields.get("sha256")
    if isinstance(key, str) and digest is None:
        return entry_for(caller, key, where)
    if isinstance(digest, str) and key is None and _SHA256.fullmatch(digest):
        return KeyEntry(caller, bytes.fromhex(digest))
    raise ConfigError(f"{where}: give either key, or sha256 as 64 of 0-9 a-f")


def _flag(fields: Mapping[str, object], name: str, where: str, *, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: {name} is a boolean")
    return value


def _limit(fields: Mapping[str, object], name: str, where: str) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 31:
        raise ConfigError(f"{where}: {name} is an integer from 1")
    return value


def _adapters(value: object, where: str) -> frozenset[str] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise ConfigError(f"{where}: adapters is a list of strings")
    for name in value:
        if not isinstance(name, str):
            raise ConfigError(f"{where}: adapters is a list of strings")
        try:
            validate_adapter_name(name)
        except EsftError as error:
            raise ConfigError(f"{where}: adapters: {error}") from error
    return frozenset(value)


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
