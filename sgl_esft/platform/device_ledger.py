"""Which process uses how much of which device: a file that servers share, as they share a GPU.

    device_memory.py -- own bytes --> [DeviceLedger: FILE, flock'd] -- the others' bytes -->

A head and records of one size, each written by one call, so that a process killed at any moment
leaves a readable file. The record of a process that has ended counts for nothing, and the next
newcomer takes its place.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

from sgl_esft.errors import ConfigError

_HEAD = b"ESFTDEV1"
_RECORD = struct.Struct("<5Q")  # the fields of Record
_FREE = bytes(_RECORD.size)
_MAX_RECORDS = 4096
_MAX_PID = 1 << 22  # the kernel's own limit
_MAX_BYTES = 1 << 56


@dataclass(frozen=True)
class Record:
    """What one process uses."""

    pid: int
    start_time: int  # of the process, in the kernel's ticks: a pid alone may be another's later
    device_id: int
    num_bytes: int
    budget_bytes: int  # of the device, as this process was told

    def is_alive(self) -> bool:
        return start_time_of(self.pid) == self.start_time


class DeviceLedger:
    """The file at `path`, made when missing. Every method raises ConfigError for a bad one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self, budget_bytes: int) -> None:
        """The file is a ledger, and its devices are of this size."""
        with self._locked() as file:
            self._check_budget(list(_living(self._read(file)).values()), budget_bytes)

    def record(self, device_id: int, num_bytes: int, budget_bytes: int) -> int:
        """Write down what this process uses; returns what others use on the device.

        Who writes first was there first: two newcomers cannot both find the same bytes free.
        """
        pid = os.getpid()
        own = Record(pid, start_time_of(pid) or 0, device_id, num_bytes, budget_bytes)
        with self._locked() as file:
            living = _living(self._read(file))
            mine = next((i for i, r in living.items() if r.pid == own.pid), None)
            if mine is None and num_bytes:
                mine = next(i for i in range(len(living) + 1) if i not in living)
            if mine is not None:
                living[mine] = own
                os.pwrite(file, _RECORD.pack(*astuple(own)), len(_HEAD) + mine * _RECORD.size)
        others = [r for r in living.values() if r.pid != own.pid]
        self._check_budget(others, budget_bytes)
        return sum(r.num_bytes for r in others if r.device_id == device_id)

    def _check_budget(self, records: list[Record], budget_bytes: int) -> None:
        for record in records:
            if record.budget_bytes != budget_bytes:
                raise ConfigError(
                    f"--device-memory {budget_bytes}B: process {record.pid} shares the devices of "
                    f"{self.path} and was given {record.budget_bytes}B; use the same size"
                )

    @contextmanager
    def _locked(self) -> Iterator[int]:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            file = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise ConfigError(f"--device-ledger {self.path}: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise self._corrupt("it is not a regular file")
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)  # which unlocks it

    def _read(self, file: int) -> dict[int, Record]:
        """Place in the file -> record; free places are left out."""
        content = os.pread(file, len(_HEAD) + _MAX_RECORDS * _RECORD.size + 1, 0)
        if not content:
            os.pwrite(file, _HEAD, 0)
            return {}
        body = content[len(_HEAD) :]
        if not content.startswith(_HEAD):
            raise self._corrupt("it begins with something else")
        if len(body) % _RECORD.size or len(body) > _MAX_RECORDS * _RECORD.size:
            raise self._corrupt(f"{len(content)} bytes are not a whole number of records")
        packed = (body[at : at + _RECORD.size] for at in range(0, len(body), _RECORD.size))
        return {i: self._unpack(data) for i, data in enumerate(packed) if data != _FREE}

    def _unpack(self, data: bytes) -> Record:
        record = Record(*_RECORD.unpack(data))
        sizes = (record.num_bytes, record.budget_bytes)
        if not 0 < record.pid <= _MAX_PID or max(sizes) > _MAX_BYTES:
            raise self._corrupt(f"{record} cannot be")
        return record

    def _corrupt(self, reason: str) -> ConfigError:
        return ConfigError(
            f"--device-ledger {self.path} is not a ledger: {reason}; name another file, or remove "
            "this one when no server uses it"
        )


def _living(records: dict[int, Record]) -> dict[int, Record]:
    return {place: record for place, record in records.items() if record.is_alive()}


def start_time_of(pid: int) -> int | None:
    """When the process started, in the kernel's ticks; None when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    has_ended = fields[0] in (b"Z", b"X")  # nobody has asked for its exit status yet
    return None if has_ended else int(fields[19])
