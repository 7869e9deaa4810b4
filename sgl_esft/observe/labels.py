"""How many values of a label are told apart: series must not grow for as long as a server runs.

a name, a type of error -> [BoundedLabel] -> the label's value at /metrics
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

# Adapters' names. prometheus_client's files keep a series until the server ends, so no name can be
# forgotten for another. A name has about 100 series, most of them buckets: with 256 a scrape is a
# few MB.
MAX_ADAPTERS: Final = 256


class BoundedLabel:
    """The values that came first have series of their own; all others share one."""

    def __init__(self, limit: int, rest: str, always: Iterable[str] = ()) -> None:
        """rest: what the others are called; always: values that do not count."""
        self._rest = rest
        self._known = {*always}
        self._num_left = limit

    def of(self, value: str) -> str:
        """What stands at /metrics for a value."""
        if value in self._known:
            return value
        if self._num_left == 0:
            return self._rest
        self._num_left -= 1
        self._known.add(value)
        return value
