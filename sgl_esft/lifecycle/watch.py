"""Notices that something below --adapter-root has changed.

    file system --event--> [Watcher, a thread] --> Catalogue.refresh

Events come from the kernel where it has them (not on NFS and its like), so the thread also looks by
itself every POLL_S. Both together keep a listing within two seconds of the disk.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

POLL_S: Final = 1.0
_DEBOUNCE_MS: Final = 400  # a copy is many events


class Watcher:
    """Calls `refresh` in a thread of its own until it is stopped."""

    def __init__(self, root: Path, refresh: Callable[[], None]) -> None:
        self._root = root
        self._refresh = refresh
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="adapter-root", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        for _ in self._wakes():
            try:
                self._refresh()
            except Exception:  # a defect: what it met may be gone the next time
                logger.exception("what lies below --adapter-root cannot be listed now")

    def _wakes(self) -> Iterator[None]:
        """Once for each change, and every POLL_S."""
        from watchfiles import watch

        try:
            for _ in watch(
                self._root,
                watch_filter=None,
                debounce=_DEBOUNCE_MS,
                step=50,
                stop_event=self._stop,
                rust_timeout=int(POLL_S * 1000),
                yield_on_timeout=True,
                raise_interrupt=False,
            ):
                yield
        except (OSError, RuntimeError) as error:  # no events here: look by ourselves
            logger.warning("--adapter-root is polled, its events cannot be had: %s", error)
        while not self._stop.wait(POLL_S):
            yield
