"""Adapters on their way from disk to host memory, while the rank goes on stepping.

    stage --> [reader thread: validate, read in pieces] --> state, asked by poll
                                                        --> take: the adapter, or its error

The thread is the machine's last: its niceness lets steps go first where they share a core, it
holds Python's lock for the moments between two pieces only, and it uses none of torch's threads.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from sgl_esft.errors import EsftError, InvariantError
from sgl_esft.weave.host_cache import HostAdapter, OnRead
from sgl_esft.weave.plane import AdapterSource

logger = logging.getLogger(__name__)

_READER_NICENESS = 19

# (source, set number of bytes, on_read) -> the adapter; raises one of the Adapter* errors
Read = Callable[[AdapterSource, Callable[[int], None], OnRead], HostAdapter]


class _AbandonedError(Exception):
    """Nobody wants what is being read any more."""


@dataclass
class Stage:
    """One adapter being read. Written by its reader, read by the rank."""

    source: AdapterSource
    num_bytes: int = 0  # to read; 0 until the folder is validated
    num_bytes_read: int = 0
    adapter: HostAdapter | None = None
    error: EsftError | None = None
    is_abandoned: bool = False
    is_over: threading.Event = field(default_factory=threading.Event)

    def expect(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def note(self, num_bytes: int) -> None:
        if self.is_abandoned:
            raise _AbandonedError
        self.num_bytes_read += num_bytes


class Stager:
    """The stages of one rank; at most one is being read, by the front's order."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._stages: dict[str, Stage] = {}

    def start(self, source: AdapterSource) -> None:
        """Begin to read. What was staged before and never taken is dropped."""
        for adapter_id in list(self._stages):
            self.drop(adapter_id)
        stage = self._stages[source.adapter_id] = Stage(source)
        threading.Thread(
            target=self._run, args=(stage,), name=f"esft-reader-{source.name}", daemon=True
        ).start()

    def find(self, adapter_id: str) -> Stage | None:
        return self._stages.get(adapter_id)

    def take(self, adapter_id: str) -> tuple[AdapterSource, HostAdapter]:
        """The adapter, waiting for its reader; it is staged no longer. Raises its error."""
        stage = self._stages.pop(adapter_id)
        stage.is_over.wait()
        if stage.error is not None:
            raise stage.error
        if stage.adapter is None:
            raise InvariantError(f"the reader of adapter {stage.source.name!r} left nothing")
        return stage.source, stage.adapter

    def drop(self, adapter_id: str) -> None:
        """Forget the adapter, if it is staged; its reader ends at the next piece."""
        stage = self._stages.pop(adapter_id, None)
        if stage is not None:
            stage.is_abandoned = True

    def _run(self, stage: Stage) -> None:
        try:
            _yield_to_others()
            stage.adapter = self._read(stage.source, stage.expect, stage.note)
        except _AbandonedError:
            logger.info("adapter %s: reading was given up", stage.source.name)
        except EsftError as error:
            stage.error = error
        except BaseException as error:  # also MemoryError: the load fails, the rank does not
            logger.exception("adapter %s: the reader failed", stage.source.name)
            stage.error = InvariantError(
                f"adapter {stage.source.name!r} could not be read: {type(error).__name__}: {error}"
            )
        finally:
            stage.is_over.set()


def _yield_to_others() -> None:
    """On Linux a thread has a niceness of its own; elsewhere the reader is like any thread."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _READER_NICENESS)
    except OSError as error:
        logger.warning("the reader thread keeps its priority: %s", error)
