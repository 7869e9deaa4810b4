"""Commands of lifecycle/commands.py, carried out on one rank.

    lora_manager.py --Command--> [RankCommandHandler] -> staging.py (reader) -> adapter plane
                                            <-> the other ranks: one answer of all of them

All ranks get the same commands between the same two steps. What one of them cannot know of the
others (how far a reader is, whether pages were left) they tell each other before they decide.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from sgl_esft.errors import EsftError, InvariantError
from sgl_esft.lifecycle.commands import (
    RankCommand,
    RankReport,
    StageState,
    error_of,
    merge_states,
    named,
)
from sgl_esft.lifecycle.staging import Stager
from sgl_esft.weave.plane import AdapterPlane, AdapterSource
from sgl_esft.weave.shared_layer import SharedLayer


@dataclass(frozen=True)
class RankGroup:
    """The ranks that get the same messages between the same two steps."""

    rank: int
    gather: Callable[[bytes], list[bytes]]  # every rank's, by rank; all ranks must call it

    def gather_json(self, value: Any) -> list[Any]:
        return [json.loads(found) for found in self.gather(json.dumps(value).encode())]


ALONE = RankGroup(0, lambda payload: [payload])


class RankCommandHandler:
    """One rank's part of what sglang_engine.py asks for."""

    def __init__(self, plane: AdapterPlane, group: RankGroup) -> None:
        self._plane = plane
        self._group = group
        self._stager = Stager(plane.read)
        self._num_layers: dict[str, int] = {}  # to be placed, of each adapter not yet taken in

    def answer(self, command: RankCommand) -> Any:
        """The ranks' common reply. Raises InvariantError for an unknown verb."""
        match command.verb:
            case "stage":
                self._stager.start(AdapterSource(command.adapter_id, command.name, command.path))
                return {}
            case "poll":
                return asdict(self._merged(self._state_of(command.adapter_id)))
            case "place":
                return asdict(self._merged(self._place(command.adapter_id, command.pinned)))
            case "drop":
                self._drop(command.adapter_id)
                return {}
            case "report":
                return self._group.gather_json(asdict(self._report()))
        raise InvariantError(f"unknown command {command.verb!r}")

    def take_in(self, source: AdapterSource) -> None:
        """An adapter is published: what is missing of it now is done at once, by all ranks or none.

        Raises one of the Adapter* errors, or that there is no room; the same on every rank, since
        the process that serves HTTP hears of one of them only.
        """
        adapter_id = source.adapter_id
        is_new = adapter_id in self._num_layers or not self._plane.is_loaded(adapter_id)
        try:
            self._complete(source)
            failed = ""
        except EsftError as error:
            failed = named(error)
        failures = [found for found in self._group.gather_json(failed) if found]
        if not failures:
            self._num_layers.pop(adapter_id, None)
            return
        if is_new:
            self._drop(adapter_id)
        raise error_of(failures[0])

    def _complete(self, source: AdapterSource) -> None:
        adapter_id = source.adapter_id
        if self._plane.is_loaded(adapter_id):
            self._plane.finish(adapter_id)
            self._plane.set_pinned(adapter_id, source.pinned)
        elif self._stager.find(adapter_id) is not None:
            self._plane.admit(source, self._stager.take(adapter_id)[1])
        else:
            self._plane.load(source)

    def _state_of(self, adapter_id: str) -> StageState:
        stage = self._stager.find(adapter_id)
        if stage is None:
            return StageState(is_known=False)
        error = "" if stage.error is None else named(stage.error)
        is_read = stage.is_over.is_set() and stage.error is None
        return StageState(stage.num_bytes_read, stage.num_bytes, is_read, error=error)

    def _place(self, adapter_id: str, pinned: bool) -> StageState:
        """The next layer; a rank that fails tells the others, and none keeps the slot."""
        try:
            num_left = self._place_next(adapter_id, pinned)
            failed = ""
        except EsftError as error:
            num_left, failed = 0, named(error)
        if any(self._group.gather_json(failed)):
            failed = self._give_up(adapter_id, failed)
            num_left = 0
        num_layers = self._num_layers.get(adapter_id, 0)
        return StageState(
            is_read=True,
            layers_placed=num_layers - num_left,
            num_layers=num_layers,
            error=failed,
        )

    def _place_next(self, adapter_id: str, pinned: bool) -> int:
        """Layers left. Memory that a page source maps is not shown in pieces: nothing to do."""
        if self._plane.is_loaded(adapter_id):
            return self._plane.place_next(adapter_id)
        is_shared = any(isinstance(layer, SharedLayer) for layer in self._plane.layers.values())
        if is_shared or self._stager.find(adapter_id) is None:
            return 0
        staged, adapter = self._stager.take(adapter_id)
        source = AdapterSource(adapter_id, staged.name, staged.path, pinned)
        self._num_layers[adapter_id] = num_left = self._plane.begin(source, adapter)
        return num_left

    def _give_up(self, adapter_id: str, failed: str) -> str:
        """Some rank found no room. Returns the error; "" where the host is place enough."""
        if self._plane.is_resident or not self._plane.is_loaded(adapter_id):
            self._drop(adapter_id)
            return failed
        self._plane.stay_on_host(adapter_id)
        return ""

    def _drop(self, adapter_id: str) -> None:
        self._num_layers.pop(adapter_id, None)
        self._stager.drop(adapter_id)
        if self._plane.is_loaded(adapter_id):
            self._plane.unload(adapter_id)

    def _merged(self, own: StageState) -> StageState:
        return merge_states([StageState(**found) for found in self._group.gather_json(asdict(own))])

    def _report(self) -> RankReport:
        uses = self._plane.uses
        return RankReport(
            self._group.rank,
            self._plane.num_slots,
            self._plane.is_resident,
            self._plane.placements(),
            uses.num_hits,
            uses.num_misses,
            uses.num_evictions,
        )
