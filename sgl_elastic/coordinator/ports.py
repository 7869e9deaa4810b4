"""What a scale needs of memory, instances and the front door; real ones and fakes alike.

    scale.py --> [Memory, Instances, Front] <-- memory/control.py, instance/manager.py, ..

    Instances.freeze --FrozenInstance--> Instances.activate --HandedOver--> Front.switch

Every call blocks until it is done and raises StepFailedError (or a subclass) when it cannot be;
then it has undone its own half. Calls come from one thread, that of the scale, and none calls
another port.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from sgl_elastic.errors import ElasticError
from sgl_elastic.instance.handover import FrozenInstance, HandedOver
from sgl_elastic.types import AdapterEntry, MemoryShape, Placement, Step


class Memory(Protocol):
    """The memory of all devices (the HMM)."""

    def shape(self) -> MemoryShape:
        """What the model's memory looks like on any device."""

    def adapters(self) -> tuple[AdapterEntry, ...]:
        """The adapters whose experts are in memory now."""

    def budget_pages(self, device_id: int) -> int:
        """The most pages a device can give; devices that have not been added yet included."""

    def require(self, device_ids: Iterable[int]) -> None:
        """Raises MemoryLostError when the memory of one of these devices is gone."""

    def lost(self, device_ids: Iterable[int]) -> tuple[int, ...]:
        """Those of these devices whose memory is gone, ascending."""

    def forget(self, device_ids: Iterable[int]) -> None:
        """Clear up after devices whose memory is gone, so that they may be added again."""

    def held(self, device_ids: Iterable[int]) -> Mapping[int, frozenset[tuple[int, int]]]:
        """Device -> (layer id, expert id) that it has with content, the adapters' with it."""

    def drop_changed_adapters(self, expert_ids: Iterable[int]) -> bool:
        """Adapters that replace some of these experts, and cannot be read again, are unloaded.

        Returns whether there was one.
        """

    def keep_only(self, placement: Placement) -> None:
        """On its devices no expert stays but the placement's. Of others no rank may be attached."""

    def drop_partial_adapters(self, placement: Placement, *, keeps_copies: bool = False) -> None:
        """A rank was lost, perhaps in an adapter's change: only whole adapters stay.

        `keeps_copies`: of these also what is on a device that is not its home.
        """

    def execute(self, step: Step) -> int:
        """Do a step that is memory's: all kinds but SHRINK_KV and GROW_KV.

        Returns the bytes that were copied, counted where they were.
        """

    def undo(self, step: Step) -> None:
        """Take an executed step back; harmless for one that was not executed."""

    def commit(self) -> None:
        """What was executed stands: a later undo of the same steps takes nothing back."""


class Instances(Protocol):
    """The engines (the IMM). An instance id is a string."""

    def serving(self) -> tuple[str, Placement]:
        """The instance that serves, and its placement."""

    def drain_messages(self, timeout_s: float) -> None:
        """What the serving instance's ranks have said is known, unless they hang."""

    def prepare(self, placement: Placement, reads: Sequence[Step] = ()) -> str:
        """An instance attached to `placement`'s memory and warm: a parked standby, or a new one.

        Its ranks do `reads`, steps of READS; `num_read` says what came of them.
        """

    def num_read(self, instance: str, device_id: int) -> int:
        """Bytes that the rank on this device read from disk in `prepare`."""

    def cancel(self, instance: str) -> None:
        """Take `prepare` back: detach and park."""

    def freeze(self, instance: str) -> FrozenInstance:
        """Stop at a token boundary. Returns what was published: KV directory and requests.

        Of an instance that is lost, or hangs and so is lost now: what the front knows of them.
        """

    def resume(self, instance: str) -> None:
        """Take `freeze` back: the instance goes on with its own requests."""

    def drain(self, instance: str, timeout_s: float) -> None:
        """Wait until no request runs. Raises EngineFailedError at the time-out."""

    def activate(
        self, instance: str, frozen: FrozenInstance, kv_moves: Mapping[int, int]
    ) -> HandedOver:
        """Import the frozen instance's KV and requests; `start_serving` follows the switch.

        Returns which rank each request went to.
        """

    def start_serving(self, instance: str) -> None:
        """An attached instance runs: the requests it took over have been sent. Repeatable."""

    def retire(self, instance: str) -> None:
        """After the switch: detach, and park as a standby or stop."""

    def resize_kv(self, device_id: int, num_tokens: int) -> None:
        """Change the serving rank's KV capacity, live, with its pages."""


class Front(Protocol):
    """Where requests wait or go."""

    def defer_adapter_changes(self, timeout_s: float) -> bool:
        """Adapters stay as they are from now on, until the operation has ended.

        Returns whether they have changed lately. Raises BusyError when a change does not end.
        """

    def scaling(self, is_running: bool) -> None:
        """Whether adapters are to stay as they are."""

    def hold(self) -> None:
        """From now on new requests queue."""

    def switch(self, instance: str, placement: Placement, handover: HandedOver) -> None:
        """One assignment: requests go there, those that were handed over first. Repeatable."""

    def release(self) -> None:
        """Queued requests go to whatever the table says; harmless when nothing is held."""


class Wire(Protocol):
    """SGLang's messages and sockets; sglang_wire.py is the real one. For the router."""

    def open(self, address: str) -> Any: ...
    def close(self, socket: Any) -> None: ...
    def send(self, socket: Any, message: Any) -> None: ...
    def expect_answers(self, message: Any) -> None: ...
    def is_waiting(self, message: Any) -> bool: ...
    def is_changing_adapters(self) -> bool: ...
    def is_request(self, message: Any) -> bool: ...
    def is_adapter_change(self, message: Any) -> bool: ...
    def singles(self, message: Any) -> Sequence[Any]: ...
    def with_rank(self, request: Any, rank: int) -> Any: ...
    def pause(self) -> Any: ...
    def warm_up(self, rid: str, rank: int) -> Any: ...
    def answer_at(self, address: str) -> None: ...
    def fail(self, rid: str, error: ElasticError) -> None: ...
