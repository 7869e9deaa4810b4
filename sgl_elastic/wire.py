"""Messages between our own processes: length-checked, typed, with descriptors and deadlines.

    Struct --> [Channel.send] --> header | msgpack + descriptors --> [Channel.receive] --> Struct
                                   (Unix stream socket)

Nothing that arrives is run: payloads are msgpack that must fit a declared type. A message that our
own side would not write is a WireError; a peer that is slow, gone or cut off mid-message is an
error of the class that the caller chose. Either way the channel is closed: after half a message
there is no telling where the next one begins. Which message answers which is not said here: the
messages carry numbers for that (memory/messages.py, instance/rank_messages.py).
"""

from __future__ import annotations

import array
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import msgspec

from sgl_elastic.errors import ElasticConfigError, ElasticError, WireError

MAX_PAYLOAD_BYTES = 64 << 20
MAX_FDS = 250  # of one message; Linux itself stops at 253

_MAGIC = b"SGLE"
_VERSION = 1
_HEADER = struct.Struct("<4sHHI")  # magic, version, number of descriptors, bytes of payload
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_MAX_PATH_BYTES = 107  # sun_path without its final zero
_FD_BYTES = array.array("i").itemsize
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_FDS * _FD_BYTES)

Received = TypeVar("Received")


class ReceivedFds:
    """Descriptors that came with a message. What nobody takes is closed, at the latest with this.

    Use as a context: what was not taken by its end is closed there.
    """

    def __init__(self, fds: Sequence[int] = ()) -> None:
        self._fds: list[int] = list(fds)  # -1 = taken or closed

    def __len__(self) -> int:
        return len(self._fds)

    def take(self, index: int) -> int:
        """The descriptor at `index`, which the caller closes. Raises WireError if there is none."""
        if not 0 <= index < len(self._fds) or self._fds[index] < 0:
            raise WireError(f"the message has no descriptor {index} of {len(self._fds)} left")
        fd, self._fds[index] = self._fds[index], -1
        return fd

    def copy(self, index: int) -> int:
        """A duplicate of the descriptor at `index`; this one stays here. Raises WireError."""
        self._fds[index] = fd = self.take(index)
        return os.dup(fd)

    def close(self) -> None:
        """Close what was not taken."""
        fds, self._fds = self._fds, [-1] * len(self._fds)
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Channel(Generic[Received]):
    """One end of a connected Unix stream socket; used by one thread at a time.

    `decoder` says what may arrive, `peer` names the other end in errors, `failure` is the class of
    the error when that end does not answer. `timeout_s` bounds each send and each receive whole.
    """

    def __init__(
        self,
        sock: socket.socket,
        decoder: msgspec.msgpack.Decoder[Received],
        *,
        peer: str,
        failure: type[ElasticError],
        timeout_s: float,
    ) -> None:
        self._socket = sock
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()
        self._peer = peer
        self._failure = failure
        self._timeout_s = timeout_s

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, by `close` or by a failure."""
        return self._socket.fileno() < 0

    def fileno(self) -> int:
        """The socket's descriptor; -1 once closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket; harmless a second time."""
        self._socket.close()

    def send(
        self, message: msgspec.Struct, fds: Sequence[int] = (), timeout_s: float | None = None
    ) -> None:
        """Send a message and copies of `fds`. Raises WireError beyond a cap, or `failure`."""
        payload = self._encoder.encode(message)
        _check_caps(len(payload), len(fds))
        header = _HEADER.pack(_MAGIC, _VERSION, len(fds), len(payload))
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        with self._closed_on_failure("to take a message", limit_s):
            self._send_all(memoryview(header + payload), fds, time.monotonic() + limit_s)

    def receive(self, timeout_s: float | None = None) -> tuple[Received, ReceivedFds]:
        """The next message and its descriptors. Raises WireError, or `failure` at the end too."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        with self._closed_on_failure("to answer", limit_s):
            fds: list[int] = []
            try:
                num_bytes, num_fds = self._receive_header(fds, deadline)
                message = self._decode(self._receive_exactly(num_bytes, None, deadline))
                if len(fds) != num_fds:
                    raise WireError(
                        f"{self._peer} announced {num_fds} descriptors, {len(fds)} came"
                    )
            except (ElasticError, OSError):
                ReceivedFds(fds).close()
                raise
            return message, ReceivedFds(fds)

    def wait(self) -> None:
        """Wait, for ever, until something (its end, too) can be received."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll()

    def has_left(self) -> bool:
        """Whether the other end is closed, although what it sent before may still be unread."""
        poll = select.poll()
        poll.register(self._socket, 0)  # the end of both directions is always told
        return bool(poll.poll(0))

    @contextmanager
    def _closed_on_failure(self, doing: str, limit_s: float) -> Iterator[None]:
        """Failures close the channel and get the caller's class."""
        try:
            yield
        except TimeoutError as error:
            self.close()
            raise self._failure(f"{self._peer} took longer than {limit_s:g} s {doing}") from error
        except OSError as error:
            self.close()
            raise self._failure(f"the connection to {self._peer} is lost: {error}") from error
        except ElasticError:
            self.close()
            raise

    def _wait_until(self, deadline: float) -> None:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        self._socket.settimeout(remaining_s)  # 0 would mean: do not wait at all

    def _send_all(self, data: memoryview, fds: Sequence[int], deadline: float) -> None:
        # Descriptors travel with the first bytes, so that they are there when the header is.
        self._wait_until(deadline)
        sent = socket.send_fds(self._socket, [data], fds)
        while sent < len(data):
            self._wait_until(deadline)
            sent += self._socket.send(data[sent:])

    def _receive_header(self, fds: list[int], deadline: float) -> tuple[int, int]:
        """Bytes of payload and number of descriptors to come; appends those that came."""
        header = self._receive_exactly(_HEADER.size, fds, deadline)
        magic, version, num_fds, num_bytes = _HEADER.unpack(header)
        if magic != _MAGIC or version != _VERSION:
            raise WireError(
                f"{self._peer} sent {bytes(header[:6]).hex()}, not a message of version "
                f"{_VERSION}: start all processes from one version of this package"
            )
        _check_caps(num_bytes, num_fds)
        return num_bytes, num_fds

    def _receive_exactly(self, num_bytes: int, fds: list[int] | None, deadline: float) -> bytearray:
        """`num_bytes` bytes. Descriptors beside them go to `fds`; None = the kernel drops them."""
        data = bytearray(num_bytes)
        done = 0
        while done < num_bytes:
            self._wait_until(deadline)
            space = memoryview(data)[done:]
            if fds is None:
                received = self._socket.recv_into(space)
            else:
                received = self._receive_with_fds(space, fds)
            if received == 0:
                at = (
                    f"after {done} of {num_bytes} bytes of a message"
                    if done
                    else "between messages"
                )
                raise self._failure(f"{self._peer} closed the connection {at}")
            done += received
        return data

    def _receive_with_fds(self, space: memoryview, fds: list[int]) -> int:
        received, ancillary, flags, _ = self._socket.recvmsg_into(
            [space], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.extend(array.array("i", data[: len(data) - len(data) % _FD_BYTES]))
        if flags & socket.MSG_CTRUNC:
            raise WireError(
                f"descriptors from {self._peer} were cut off: raise `ulimit -n`, or the peer sent "
                f"more than {MAX_FDS}"
            )
        return received

    def _decode(self, payload: bytearray) -> Received:
        try:
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WireError(f"{self._peer} sent a message of no known type: {error}") from error


def make_private(directory: Path) -> None:
    """Make a directory for sockets, mode 0700. Raises ElasticConfigError if it has another."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = directory.stat()
    mode = stat.S_IMODE(info.st_mode)
    if mode != 0o700 or info.st_uid != os.geteuid():
        raise ElasticConfigError(
            f"{directory} has mode {mode:04o} and owner {info.st_uid}; sockets need 0700 and owner "
            f"{os.geteuid()}: chmod 700 it, or name another directory"
        )


def listen(path: Path, backlog: int = 64) -> socket.socket:
    """A listening socket at `path`, mode 0600, for this user alone.

    Its directory is made with mode 0700 if it is missing. Raises ElasticConfigError when it has
    another mode or owner, or when something is at `path` already.
    """
    _check_path(path)
    make_private(path.parent)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(path))
        path.chmod(0o600)  # nobody can connect before listen, so there is no moment in between
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        raise ElasticConfigError(
            f"cannot listen at {path}: {error}; end the process that does, or remove it"
        ) from error
    return sock


def connect(path: Path, failure: type[ElasticError], timeout_s: float) -> socket.socket:
    """A socket connected to a listener of this user's. Raises `failure`, or ElasticConfigError."""
    _check_path(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        sock.connect(str(path))
        check_peer(sock)
    except OSError as error:
        sock.close()
        raise failure(f"nobody answers at {path}: {error}") from error
    except WireError:
        sock.close()
        raise
    return sock


def check_peer(sock: socket.socket) -> None:
    """Raises WireError unless the process at the other end runs as this process's user."""
    data: Any = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    if uid != os.geteuid():
        raise WireError(
            f"the process {pid} at the other end runs as user {uid}, this one as {os.geteuid()}: "
            "start all processes as one user"
        )


def _check_caps(num_bytes: int, num_fds: int) -> None:
    if num_bytes > MAX_PAYLOAD_BYTES or num_fds > MAX_FDS:
        raise WireError(
            f"a message of {num_bytes} bytes and {num_fds} descriptors; at most "
            f"{MAX_PAYLOAD_BYTES} and {MAX_FDS} go through"
        )


def _check_path(path: Path) -> None:
    num_bytes = len(os.fsencode(path))
    if num_bytes > _MAX_PATH_BYTES:
        raise ElasticConfigError(
            f"the socket path {path} has {num_bytes} bytes, Unix sockets take {_MAX_PATH_BYTES}: "
            "choose a shorter directory"
        )
