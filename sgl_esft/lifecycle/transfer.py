"""One adapter's way onto the ranks, step by step, while they serve.

    stage --> poll ... poll (reading, in the background) --> place ... place --> admit
      '- [Reading.begin], while there is no room yet

Between two of these messages the ranks step on. A layer at a time is placed, so no step waits for
more than that. If anything fails, no rank keeps anything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from sgl_esft.errors import EsftError, RequestTimeoutError, UnknownAdapterError
from sgl_esft.lifecycle.adapter_engine import LoadPhase, OnProgress
from sgl_esft.lifecycle.commands import StageState, error_of
from sgl_esft.lifecycle.ranks import Ranks

logger = logging.getLogger(__name__)

_FIRST_POLL_S = 0.005
_LAST_POLL_S = 0.1
STALLED_S = 120.0  # loads come one after another, so one that hangs holds up all


@dataclass
class Reading:
    """The ranks' reading of one adapter. It may begin before there is room to place it."""

    ranks: Ranks
    ref: Any
    _has_begun: bool = False

    async def begin(self) -> None:
        """Once; the ranks read in the background."""
        if not self._has_begun:
            self._has_begun = True  # also where no answer comes
            await self.ranks.stage(self.ref)

    def end(self) -> None:
        """The ranks have taken in what they have read."""
        self._has_begun = False

    async def give_up(self) -> None:
        """The ranks forget what they have read, where it was not taken in."""
        if self._has_begun:
            self.end()
            await _logged(self.ranks.drop(self.ref.lora_id), self.ref)


@asynccontextmanager
async def reading_of(ranks: Ranks, ref: Any) -> AsyncIterator[Reading]:
    """The ranks keep nothing of what they have read and not taken in by the end of the context."""
    reading = Reading(ranks, ref)
    try:
        yield reading
    finally:
        await reading.give_up()


async def transfer(
    reading: Reading, on_progress: OnProgress, check_unchanged: Callable[[], None]
) -> None:
    """Every rank holds the adapter afterwards, or none does.

    check_unchanged: called when all is read; raises when that is not what was validated.
    Raises one of the Adapter* errors, or that there is no room.
    """
    ranks, ref = reading.ranks, reading.ref
    try:
        await _read(reading, on_progress)
        check_unchanged()
        await _place(ranks, ref, on_progress)
        await ranks.admit(ref)
        check_unchanged()
        reading.end()
    except BaseException:
        await _clean_up(reading)
        raise
    on_progress(LoadPhase.PLACING, 1.0)


async def _read(reading: Reading, on_progress: OnProgress) -> None:
    ranks, ref = reading.ranks, reading.ref
    on_progress(LoadPhase.READING, 0.0)
    await reading.begin()
    interval_s = _FIRST_POLL_S
    before, went_on_s = StageState(), time.monotonic()
    while not (state := _checked(await ranks.poll(ref.lora_id))).is_read:
        if not state.is_known:
            return  # other ranks serve since: they will read it when it is admitted
        if state != before:
            before, went_on_s = state, time.monotonic()
        elif time.monotonic() - went_on_s > STALLED_S:
            raise RequestTimeoutError(
                f"adapter {ref.lora_name!r}: not a byte of its files has come for "
                f"{STALLED_S:.0f} s: look at its file system, ask again"
            )
        if state.num_bytes:
            on_progress(LoadPhase.READING, min(state.num_bytes_read / state.num_bytes, 1.0))
        await asyncio.sleep(interval_s)
        interval_s = min(2 * interval_s, _LAST_POLL_S)
    on_progress(LoadPhase.READING, 1.0)


async def _place(ranks: Ranks, ref: Any, on_progress: OnProgress) -> None:
    on_progress(LoadPhase.PLACING, 0.0)
    while (state := _checked(await ranks.place(ref))).layers_placed < state.num_layers:
        on_progress(LoadPhase.PLACING, state.layers_placed / state.num_layers)


def _checked(state: StageState) -> StageState:
    if state.error:
        raise error_of(state.error)
    return state


async def _clean_up(reading: Reading) -> None:
    """On ranks that had admitted it already, it is unloaded as it was loaded."""
    await _logged(reading.ranks.unload(reading.ref), reading.ref)
    await reading.give_up()


async def _logged(clean_up: Awaitable[None], ref: Any) -> None:
    """The caller hears why the load failed; that its clean-up failed too is in the log."""
    try:
        await clean_up
    except UnknownAdapterError:
        pass  # they hold nothing of it
    except EsftError as error:
        logger.error("the ranks may keep memory of adapter %s: %s", ref.lora_name, error)
