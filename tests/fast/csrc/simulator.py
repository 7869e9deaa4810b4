"""The controls of a vendor's contract simulator (csrc/tests/simulators), from Python."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import sgl_vmm


@dataclass(frozen=True)
class Calls:
    """What a vendor calls things."""

    create: str
    destroy: str
    map: str
    unmap: str
    out_of_memory: int
    broken: int


CALLS = {
    "cuda": Calls("cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap", 2, 1),
    "acl": Calls(
        "aclrtMallocPhysical", "aclrtFreePhysical", "aclrtMapMem", "aclrtUnmapMem", 207001, 507000
    ),
}


class Simulator:
    """One simulator; a process has one of each vendor, shared with the backends over it."""

    def __init__(self, vendor: str, library: Path) -> None:
        self.vendor = vendor
        self.calls = CALLS[vendor]
        self._path = str(library)
        self._library = ctypes.CDLL(self._path)
        self._library.sim_set_granularity.argtypes = [ctypes.c_size_t]
        self._library.sim_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]

    def reset(self, granularity: int) -> None:
        """Forget everything; only while none of its backends is open."""
        self._library.sim_reset()
        self._library.sim_set_granularity(granularity)

    def open(self) -> sgl_vmm.Backend:
        return sgl_vmm.open_backend(self.vendor, library=self._path)

    def fail(self, call: str, nth: int, code: int) -> None:
        """Let the nth next call do nothing and return `code`; 1 is the very next."""
        self._library.sim_fail(call.encode(), nth, code)

    def live(self) -> tuple[int, int, int]:
        """Handles, mappings and reservations that are there now."""
        names = ("sim_live_handles", "sim_live_mappings", "sim_live_reservations")
        handles, mappings, reservations = (int(getattr(self._library, name)()) for name in names)
        return handles, mappings, reservations
