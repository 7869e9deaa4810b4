"""Who is in which row of one layer: virtual slot -> row, row -> virtual slot. Pure.

    decisions.py --put/take--> [RowTable] --where--> rerouting, computing

A *virtual slot* is what the expert map names (the base's experts, then the adapters'); a *row* is
an index into the layer's device tensors, of which there are fewer.
"""

from __future__ import annotations

import numpy as np

from sgl_esft.errors import InvariantError
from sgl_esft.offload.routing import Ints

NOT_HERE = -2  # of `where`: in no row. Never -1, which is another rank's and passed over by kernels
EMPTY = -1  # of `slot_of`: nothing in this row


class RowTable:
    """One layer's rows.

    `where` [num_slots] int64: the row of each virtual slot, or NOT_HERE.
    `slot_of` [num_rows] int64: the slot in each row, or EMPTY. Each is the other's inverse.
    """

    def __init__(self, num_slots: int, num_rows: int) -> None:
        """All rows are empty. Raises InvariantError for fewer than one row or slot."""
        if num_slots < 1 or num_rows < 1:
            raise InvariantError(f"{num_slots} slots in {num_rows} rows")
        self.where: Ints = np.full(num_slots, NOT_HERE, dtype=np.int64)
        self.slot_of: Ints = np.full(num_rows, EMPTY, dtype=np.int64)

    @property
    def num_rows(self) -> int:
        return len(self.slot_of)

    def put(self, slot: int, row: int) -> int:
        """`slot` takes `row`; returns who was there, or EMPTY. Raises InvariantError if it is here.

        What the row holds is somebody else's to write before anybody reads it.
        """
        if self.where[slot] != NOT_HERE:
            raise InvariantError(f"slot {slot} is in row {self.where[slot]}, and asked into {row}")
        before = int(self.slot_of[row])
        if before != EMPTY:
            self.where[before] = NOT_HERE
        self.slot_of[row] = slot
        self.where[slot] = row
        return before

    def take(self, slot: int) -> int:
        """`slot` leaves its row, which is empty then. Returns the row, or NOT_HERE."""
        row = int(self.where[slot])
        if row != NOT_HERE:
            self.slot_of[row] = EMPTY
            self.where[slot] = NOT_HERE
        return row

    def residents(self) -> Ints:
        """[n] slots that are in rows, by row."""
        found: Ints = self.slot_of[self.slot_of != EMPTY]
        return found

    def empty_rows(self) -> Ints:
        """[n] rows with nothing in them, ascending."""
        found: Ints = np.flatnonzero(self.slot_of == EMPTY)
        return found

    def check_integrity(self) -> None:
        """Raises InvariantError when the two tables are not each other's inverse."""
        here = np.flatnonzero(self.where != NOT_HERE)
        if not np.array_equal(np.sort(self.residents()), here):
            raise InvariantError(f"rows hold {self.residents()}, slots {here} say they are here")
        if not np.array_equal(self.slot_of[self.where[here]], here):
            raise InvariantError("a slot's row holds another slot")
