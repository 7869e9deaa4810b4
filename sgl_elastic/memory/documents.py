"""Small things that a device's worker keeps beside its pages.

engine --put--> [Documents] --get--> the next engine on the same device
"""

from __future__ import annotations

from sgl_elastic.errors import MemoryWorkerError
from sgl_elastic.memory.messages import MAX_DOCUMENT_BYTES, MAX_DOCUMENTS


class Documents:
    """Bytes by name that outlive the engine that wrote them: KV directories, requests' states."""

    def __init__(self) -> None:
        self._documents: dict[str, bytes] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all documents."""
        return sum(len(data) for data in self._documents.values())

    def put(self, name: str, data: bytes) -> None:
        """Keep `data` in place of what is there. Raises MemoryWorkerError beyond a cap."""
        if len(data) > MAX_DOCUMENT_BYTES:
            raise MemoryWorkerError(
                f"document {name!r} has {len(data)} bytes, at most {MAX_DOCUMENT_BYTES} are kept: "
                "split it"
            )
        if name not in self._documents and len(self._documents) >= MAX_DOCUMENTS:
            raise MemoryWorkerError(
                f"there are {MAX_DOCUMENTS} documents already: delete some before {name!r}"
            )
        self._documents[name] = data

    def get(self, name: str) -> bytes:
        """The document. Raises MemoryWorkerError if there is none."""
        if name not in self._documents:
            raise MemoryWorkerError(f"there is no document {name!r}; there are {self.names()}")
        return self._documents[name]

    def delete(self, name: str) -> None:
        """Forget it; harmless when there is none."""
        self._documents.pop(name, None)

    def names(self) -> tuple[str, ...]:
        """All names, ascending."""
        return tuple(sorted(self._documents))
