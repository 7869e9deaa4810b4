"""The ranks, as the process that serves HTTP reaches them: loads, unloads, commands.

sglang_engine.py --> [Ranks] --SGLang's load and unload messages--> every rank
                             <--one answer a DP rank--
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from sgl_esft import errors, sglang_api
from sgl_esft.errors import EsftError, InvariantError, RequestTimeoutError
from sgl_esft.lifecycle import commands
from sgl_esft.lifecycle.commands import Command, RankReport, StageState

# Messages wait while an elastic server scales. A load that was not staged reads from disk.
COMMAND_TIMEOUT_S: Final = 120.0
CHANGE_TIMEOUT_S: Final = 600.0


class Ranks:
    """Sends to all ranks and waits for the answers. Messages go out in the order of the calls."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    async def admit(self, ref: Any) -> None:
        """Every rank takes the adapter in: what it has staged, else read now.

        For an adapter that is loaded: pin or unpin it. Raises what the ranks raise.
        """
        self._check(await self._send(sglang_api.make_load_request(ref), CHANGE_TIMEOUT_S))

    async def unload(self, ref: Any) -> None:
        """Every rank forgets the adapter."""
        self._check(await self._send(sglang_api.make_unload_request(ref), CHANGE_TIMEOUT_S))

    async def stage(self, ref: Any) -> None:
        """Every rank begins to read the adapter, in the background."""
        await self._command(
            Command("stage", ref.lora_id, name=ref.lora_name or "", path=ref.lora_path or "")
        )

    async def poll(self, adapter_id: str) -> StageState:
        """How far the ranks are with reading."""
        return StageState(**await self._command(Command("poll", adapter_id)))

    async def place(self, ref: Any) -> StageState:
        """Copy the next piece of a staged adapter into its slot, if it has one."""
        return StageState(
            **await self._command(Command("place", ref.lora_id, pinned=bool(ref.pinned)))
        )

    async def drop(self, adapter_id: str) -> None:
        """Every rank forgets what it has of an adapter that was not admitted."""
        await self._command(Command("drop", adapter_id))

    async def report(self) -> list[RankReport]:
        """By rank."""
        found = await self._command(Command("report"))
        return [RankReport(**report) for report in found]

    async def _command(self, command: Command) -> Any:
        """The first DP rank's reply: the ranks have put theirs together."""
        message = sglang_api.make_command_request(command.encode())
        answers = await self._send(message, COMMAND_TIMEOUT_S)
        return commands.read_reply(answers[0].loaded_adapters)

    def _check(self, answers: list[Any]) -> None:
        """An answer that comes too late must not be taken for the next message's."""
        if any(commands.is_reply(answer.loaded_adapters) for answer in answers):
            raise InvariantError("a rank answered a command late: ask for the change again")

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
            raise error_of(failed[0])
        return answers


def error_of(text: str) -> EsftError:
    """The error that a rank reported as "NameError: message"."""
    name, colon, message = text.partition(": ")
    kind = getattr(errors, name, None)
    if colon and isinstance(kind, type) and issubclass(kind, EsftError):
        return kind(message)
    return InvariantError(f"a rank failed: {text}")
