"""The names that a request may say, as a set that is never made: there may be many.

library.py --> [UsableNames] --> http_adapters.py: is this name in it?
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol


class Names(Protocol):
    """What is known of names: the adapter library."""

    def names(self) -> Sequence[str]:
        """All of them."""

    def loaded(self) -> Collection[str]:
        """Those that the engine serves now."""

    def is_usable(self, name: str, loaded: Collection[str] | None = None) -> bool:
        """Whether a request may say it; `loaded` for who asks of many at once."""


class UsableNames(Collection[str]):
    """Looked up one by one, always as of now."""

    def __init__(self, names: Names) -> None:
        self._names = names

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._names.is_usable(name)

    def __iter__(self) -> Iterator[str]:
        loaded = self._names.loaded()
        return (name for name in self._names.names() if self._names.is_usable(name, loaded))

    def __len__(self) -> int:
        return sum(1 for _ in self)
