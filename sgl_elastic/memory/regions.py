"""What a worker knows of one region, and what it says of several.

device.py --> [RegionState] --> addresses (VirtualTensor), slots with pages, slots with content
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import sgl_vmm

from sgl_elastic.errors import MemoryWorkerError
from sgl_elastic.memory.runs import Runs, describe
from sgl_elastic.types import MemoryShape, Region


@dataclass
class RegionState:
    """A region's addresses, and which of its slots have pages and valid content."""

    region: Region
    tensor: sgl_vmm.VirtualTensor
    mapped: Runs = ()
    loaded: Runs = ()  # always within `mapped`


def check_shape(shape: MemoryShape, page_bytes: int) -> None:
    """Raises MemoryWorkerError for a shape that these pages cannot hold."""
    names = [region.name for region in shape.regions]
    sizes = [min(region.num_slots, region.slot_bytes) for region in shape.regions]
    if shape.page_bytes != page_bytes or len(set(names)) != len(names) or min(sizes, default=1) < 1:
        raise MemoryWorkerError(
            f"not a shape for pages of {page_bytes} bytes: it has pages of {shape.page_bytes}, "
            "and regions need different names, slots and bytes"
        )


def describe_all(slots: Sequence[tuple[RegionState, Runs]]) -> str:
    """For error messages: the first three regions."""
    parts = [f"{state.region.name} {describe(runs)}" for state, runs in slots if runs]
    more = ", .." if len(parts) > 3 else ""
    return "; ".join(itertools.islice(parts, 3)) + more if parts else "nothing"


def changed(slots: Sequence[tuple[RegionState, Runs]]) -> dict[str, Runs]:
    """By name, those that are any."""
    return {state.region.name: runs for state, runs in slots if runs}
