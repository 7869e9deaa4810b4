"""The ranks, as the process that serves HTTP reaches them: loads, unloads, commands.

sglang_engine.py --> [Ranks] --SGLang's load and unload messages--> every rank
                             <--one answer a DP rank--
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import replace
from typing import Any, Final

from sgl_esft import sglang_api
from sgl_esft.errors import (
    RequestTimeoutError,
    UnknownAdapterError,
)
from sgl_esft.lifecycle import commands
from sgl_esft.lifecycle.commands import RankCommand, RankReport, StageState

logger = logging.getLogger(__name__)

# Messages wait while an elastic server scales. A load that was not staged reads from disk.
COMMAND_TIMEOUT_S: Final = 120.0
CHANGE_TIMEOUT_S: Final = 600.0
UNLOAD_TRIES: Final = 3
UNLOAD_PAUSE_S: Final = 1.0  # a late answer comes in it, and is taken for no other


class Ranks:
    """Sends to all ranks and waits for the answers. Messages go out in the order of the calls."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._numbers = itertools.count(1)

    async def admit(self, ref: Any) -> None:
        """Every rank takes the adapter in: what it has staged, else read now.

        For an adapter that is loaded: pin or unpin it. Raises what the ranks raise.
        """
        self._check(await self._send(sglang_api.make_load_request(ref), CHANGE_TIMEOUT_S))

    async def unload(self, ref: Any) -> None:
        """Every rank forgets the adapter. Asks again if no answer comes.

        What a rank kept would take memory and a slot that nobody counts.
        """
        for num_tries in range(1, UNLOAD_TRIES + 1):
            try:
                self._check(await self._send(sglang_api.make_unload_request(ref), CHANGE_TIMEOUT_S))
            except RequestTimeoutError as error:
                if num_tries == UNLOAD_TRIES:
                    raise
                logger.warning("adapter %s is unloaded once more: %s", ref.lora_name, error)
            except UnknownAdapterError:
                if num_tries == 1:
                    raise
                return  # by a message whose answer was lost
            else:
                return
            await asyncio.sleep(UNLOAD_PAUSE_S)

    async def stage(self, ref: Any) -> None:
        """Every rank begins to read the adapter, in the background."""
        await self._command(
            RankCommand("stage", ref.lora_id, name=ref.lora_name or "", path=ref.lora_path or "")
        )

    async def poll(self, adapter_id: str) -> StageState:
        """How far the ranks are with reading."""
        return StageState(**await self._command(RankCommand("poll", adapter_id)))

    async def place(self, ref: Any) -> StageState:
        """Copy the next piece of a staged adapter into its slot, if it has one."""
        return StageState(
            **await self._command(RankCommand("place", ref.lora_id, pinned=bool(ref.pinned)))
        )

    async def drop(self, adapter_id: str) -> None:
        """Every rank forgets what it has of an adapter that was not admitted."""
        await self._command(RankCommand("drop", adapter_id))

    async def report(self) -> list[RankReport]:
        """By rank."""
        found = await self._command(RankCommand("report"))
        return [RankReport(**report) for report in found]

    async def _command(self, command: RankCommand) -> Any:
        """The first DP rank's reply: the ranks have put theirs together."""
        numbered = replace(command, number=next(self._numbers))
        message = sglang_api.make_command_request(numbered.encode())
        answers = await self._send(message, COMMAND_TIMEOUT_S)
        return commands.read_reply(answers[0].loaded_adapters, numbered.number)

    def _check(self, answers: list[Any]) -> None:
        """An answer that comes too late must not be taken for the next message's."""
        if any(commands.is_reply(answer.loaded_adapters) for answer in answers):
            raise RequestTimeoutError("a rank answered a command late: ask for the change again")

    async def _send(self, message: Any, timeout_s: float) -> list[Any]:
        """Raises what a rank raised, or RequestTimeoutError: its engine may have been lost."""
        self._manager.auto_create_handle_loop()
        asking = self._manager.update_lora_adapter_communicator(message)
        try:
            answers: list[Any] = await asyncio.wait_for(asking, timeout_s)
        except TimeoutError:
            raise RequestTimeoutError(
                f"the ranks have not answered within {timeout_s:.0f} s: look at the log, ask again"
            ) from None
        failed = [answer.error_message or "" for answer in answers if not answer.success]
        if failed:
            raise commands.error_of(failed[0])
        return answers
