"""Which experts are in host memory, between the checkpoint and a device's rows. Pure.

    device_rows.py --take(key)--> [HostTier] --> a seat: of the expert, or one to read it into
                   --filled, give_back-->        kept from now on; nobody uses it
                   --touch(key)-->               it left its row: as good as used

A *seat* holds one expert as a row does; all are of one size, so a bound in bytes is a number of
seats. Who was used longest ago leaves first. An expert in a row stays in its seat and is not
copied back when it leaves the row, so host memory should be larger than the rows.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from sgl_esft.errors import ConfigError, InvariantError


@dataclass(frozen=True)
class Taken:
    """A seat in use, until it is given back. `holds`: its expert is in it, and need not be read."""

    seat: int
    holds: bool


@dataclass(frozen=True)
class HostCounts:
    """Since the start: experts that came to a device's rows from host memory, and not storage."""

    num_experts: int = 0
    num_bytes: int = 0


class HostTier:
    """Seats 0..num_seats-1. Not for several threads at a time.

    A seat is free, being filled (by the one who took it) or held (by a key, for any number of
    users at a time). One that is in use is nobody else's to fill.
    """

    def __init__(self, num_seats: int, *, keeps: bool) -> None:
        """keeps: False = seats are only passed through. Raises InvariantError for no seat."""
        if num_seats < 1:
            raise InvariantError(f"{num_seats} seats for experts in host memory")
        self.num_seats = num_seats
        self.keeps = keeps
        self._free = list(range(num_seats))
        self._filling: dict[int, Hashable | None] = {}  # seat -> key; None: it will not be kept
        self._held: OrderedDict[Hashable, int] = OrderedDict()  # key -> seat, last used last
        self._users: Counter[int] = Counter()  # of held seats
        self.num_found = 0
        self.num_evicted = 0

    @property
    def held(self) -> tuple[Hashable, ...]:
        """Keys of experts that `take` finds, the one to leave first in front."""
        return tuple(self._held)

    def take(self, key: Hashable) -> Taken:
        """Use the expert's seat, or one that it is to be read into.

        An expert that somebody else is reading already is read a second time, and not kept.
        Raises InvariantError when every seat is in use.
        """
        seat = self._held.get(key)
        if seat is not None:
            self.num_found += 1
            self._users[seat] += 1
            self._held.move_to_end(key)
            return Taken(seat, True)
        is_kept = self.keeps and key not in self._filling.values()
        seat = self._free.pop() if self._free else self._evict()
        self._filling[seat] = key if is_kept else None
        return Taken(seat, False)

    def _evict(self) -> int:
        for key, seat in self._held.items():
            if not self._users[seat]:
                del self._held[key]
                self.num_evicted += 1
                return seat
        raise InvariantError(f"all of {self.num_seats} seats in host memory are in use")

    def filled(self, seat: int) -> None:
        """The expert was read whole: it is found from now on. Raises InvariantError."""
        if seat not in self._filling:
            raise InvariantError(f"seat {seat} was filled, and nobody had taken it to be")
        key = self._filling[seat]
        if key is not None:
            del self._filling[seat]
            self._held[key] = seat
            self._users[seat] = 1

    def give_back(self, seat: int) -> None:
        """Whoever took it has done with it; what was not read whole is nowhere.

        Raises InvariantError for a seat that is not in use.
        """
        if seat in self._filling:
            del self._filling[seat]
            self._free.append(seat)
        elif self._users[seat]:
            self._users[seat] -= 1
        else:
            raise InvariantError(f"seat {seat} was given back, and nobody has it")

    def touch(self, key: Hashable) -> None:
        """It was of use until now; nothing for one that is not here."""
        if key in self._held:
            self._held.move_to_end(key)

    def check_integrity(self) -> None:
        """Raises InvariantError for a seat that is two things at a time, or none."""
        seats = [*self._free, *self._filling, *self._held.values()]
        if sorted(seats) != list(range(self.num_seats)):
            raise InvariantError(f"{self.num_seats} seats: {sorted(seats)}")
        if used := {seat for seat, n in self._users.items() if n} - set(self._held.values()):
            raise InvariantError(f"seats {sorted(used)} are used and hold nothing")


def seats_within(host_bytes: int, seat_bytes: int, num_threads: int) -> int:
    """Seats in `host_bytes`; 0 bytes: a seat for each thread that reads, to pass through.

    Raises ConfigError where not every thread would have one.
    """
    if not host_bytes:
        return num_threads
    num_seats = host_bytes // seat_bytes
    if num_seats < num_threads:
        raise ConfigError(
            f"--expert-host-memory {host_bytes}B holds {num_seats} experts, and each of "
            f"{num_threads} threads reads into one: give {num_threads * seat_bytes}B or more, or 0"
        )
    return num_seats
