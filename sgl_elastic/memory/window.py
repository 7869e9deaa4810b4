"""A peer's pages, mapped for as long as a copy takes.

imported handles --> [PageWindow] --> addresses to copy from; nothing is left behind
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import sgl_vmm

from sgl_elastic.errors import StepFailedError

PageSpans = Sequence[tuple[int, Sequence[sgl_vmm.Handle]]]  # (first page position, its handles)


class PageWindow:
    """Pages of somebody else, mapped for a moment, each at its position's distance from the others.

    A context; at its end nothing is mapped, so that the handles can be destroyed. Positions may be
    anywhere: only the addresses between the first and the last are reserved.
    """

    def __init__(self, backend: sgl_vmm.Backend, page_bytes: int, spans: PageSpans) -> None:
        self._base = min((first for first, _ in spans), default=0)
        end = max((first + len(handles) for first, handles in spans), default=1)
        self._num_pages = end - self._base
        self._page_bytes = page_bytes
        self._spans = spans
        self._range = sgl_vmm.AddressRange(
            backend, self._num_pages * page_bytes, page_bytes=page_bytes
        )

    def address_of(self, offset: int) -> int:
        """Where the byte with this offset into the region lies now; may be outside the window."""
        return self._range.address + offset - self._base * self._page_bytes

    def __enter__(self) -> Self:
        try:
            for first, handles in self._spans:
                self._range.map(first - self._base, list(handles))
        except sgl_vmm.VmmError:
            self._range.unmap(0, self._num_pages)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._range.unmap(0, self._num_pages)


@contextmanager
def vmm_errors(who: str, doing: str, error_class: type[StepFailedError]) -> Iterator[None]:
    """Native errors get a class of ours, and say who failed at what."""
    try:
        yield
    except sgl_vmm.PoolExhaustedError as error:
        raise error_class(
            f"{who} has no memory for {doing}: {error}; free some, or give it a larger budget"
        ) from error
    except sgl_vmm.VmmError as error:
        raise error_class(f"{who} failed at {doing}: {error}") from error
