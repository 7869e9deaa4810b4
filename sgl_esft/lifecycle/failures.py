"""The last work on each adapter that failed, and whether trying again may help.

library.py --note, outdate--> [Failures] --get--> what is shown, what refuses a request
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from sgl_esft.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    AdapterNameError,
    AdapterPathError,
    AdapterTooLargeError,
    DeviceMemoryError,
    EsftError,
    UnsupportedAdapterError,
)
from sgl_esft.lifecycle.folders import Fingerprint
from sgl_esft.lifecycle.jobs import JobKind

_MAX_FAILURES: Final = 256  # the newest are kept
# What is wrong with a name, a folder, or what lies in it, and stays so until it changes.
_OF_CONTENT: Final = (
    AdapterFormatError,
    AdapterMismatchError,
    AdapterNameError,
    AdapterPathError,
    AdapterTooLargeError,
    DeviceMemoryError,
    UnsupportedAdapterError,
)


@dataclass(frozen=True)
class Failure:
    """Work that failed, and the folder as it was when the work began."""

    kind: JobKind
    folder: Path
    seen: Fingerprint | None
    error: EsftError
    is_outdated: bool = False  # the folder was looked at since, and has changed

    @property
    def is_lasting(self) -> bool:
        """Whether to load the same content again would fail again.

        Not for want of room, nor because of a defect, of ranks that did not answer, or of what
        others did with the name meanwhile.
        """
        return self.kind is JobKind.LOAD and isinstance(self.error, _OF_CONTENT)


class Failures:
    """Failures by adapter name."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, Failure] = OrderedDict()

    def __iter__(self) -> Iterator[str]:
        return iter(self._failures)

    def __contains__(self, name: object) -> bool:
        return name in self._failures

    def get(self, name: str) -> Failure | None:
        """The last work on the name, if it failed."""
        return self._failures.get(name)

    def note(self, name: str, failure: Failure) -> None:
        """It is the name's last work now."""
        self._failures[name] = failure
        self._failures.move_to_end(name)
        while len(self._failures) > _MAX_FAILURES:
            self._failures.popitem(last=False)

    def outdate(self, name: str, failure: Failure) -> None:
        """The failure's folder has changed."""
        if self._failures.get(name) is failure:
            self._failures[name] = replace(failure, is_outdated=True)

    def forget(self, name: str) -> None:
        """The name's last work did not fail."""
        self._failures.pop(name, None)
