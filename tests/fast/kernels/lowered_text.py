"""Counts over the Linalg text of a lowered kernel.

text -> operations() -> how often each operation occurs, and in what types
"""

from __future__ import annotations

import math
import re
from collections import Counter

OPERATION = re.compile(r"^\s*(?:%[\w:]+ = )?\"?([a-z]\w*\.[a-z][\w.]*)", re.MULTILINE)
BODY = re.compile(r"linalg\.generic \{(.*?)\}.*?\{\n(.*?)\n\s*\}", re.DOTALL)

RESULT = re.compile(r"(?:= (?:linalg\.fill|func\.call) .*|\}) -> tensor<(.*)>$", re.MULTILINE)
ALLOCATION = re.compile(r"memref\.alloc\(\) : memref<(.*)>")
BITS = {"i1": 1, "i32": 32, "f32": 32, "i64": 64}

# One element at a time, between vectors or memory and a scalar.
SCALAR_ACCESS = ("tensor.extract", "tensor.insert", "memref.load", "memref.store")


def operations(text: str) -> Counter[str]:
    """How often each operation occurs, such as `memref.copy`."""
    return Counter(OPERATION.findall(text))


def scalar_accesses(text: str) -> dict[str, int]:
    """Those operations that touch one element, with the compiler's own mark of such loops."""
    found = operations(text)
    counts = {name: found[name] for name in SCALAR_ACCESS}
    counts["ExtractedLoadOrStore"] = text.count("ExtractedLoadOrStore")
    return {name: count for name, count in counts.items() if count}


def vector_bodies(text: str) -> list[str]:
    """`operation : type` of each line that is done once for every lane."""
    bodies = [body for _, body in BODY.findall(text)]
    lines = re.findall(r"= (arith\.\w+(?: \w+(?=,))?).*?: (.*)$", "\n".join(bodies), re.MULTILINE)
    return [f"{operation} : {types}" for operation, types in lines]


def iterators(text: str) -> set[str]:
    """The kinds of iteration of all vector operations: `parallel`, `reduction`."""
    return set(re.findall(r"iterator_types = \[(.*?)\]", text))


def scalar_loops(text: str) -> list[str]:
    """Each loop over elements, as the compiler marks them."""
    return re.findall(
        r"scf\.for [^\n]*\n(?:(?!scf\.for).)*?\{ExtractedLoadOrStore\}", text, re.DOTALL
    )


def allocations(text: str) -> set[str]:
    """Types of the buffers that loads from global memory fill, such as `1024xi32`."""
    return set(ALLOCATION.findall(text))


def bytes_if_nothing_is_shared(text: str) -> int:
    """Bytes of all values together, those loaded from global memory twice."""
    types = RESULT.findall(text) + 2 * ALLOCATION.findall(text)
    return sum(map(_bits, types)) // 8


def _bits(shaped: str) -> int:
    """`1024xi32` -> 32768."""
    *sizes, element = shaped.split("x")
    return math.prod(map(int, sizes)) * BITS[element]
