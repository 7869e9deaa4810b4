"""Another device's worker, as a copy needs it: its pages are imported for a moment only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sgl_elastic.errors import MemoryWorkerError, PeerCopyError
from sgl_elastic.memory.client import DeviceClient

PEER_TIMEOUT_S = 30.0  # for each of its answers


@contextmanager
def peer_at(socket_path: str) -> Iterator[DeviceClient]:
    """The worker behind this socket. Raises PeerCopyError if it is gone, slow or refuses."""
    try:
        peer = DeviceClient(socket_path, PEER_TIMEOUT_S)
        try:
            yield peer
        finally:
            peer.forget_pages()
            peer.close()
    except MemoryWorkerError as error:
        raise PeerCopyError(f"a copy from {socket_path} failed: {error}") from error
