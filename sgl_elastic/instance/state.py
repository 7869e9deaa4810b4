"""The life of an engine instance: which state may follow which, and the record of one instance.

    starting --> parked <--> attached --> warm --> active --> frozen --> parked (a standby again)
                                                     └── draining ──┘

Pure. A retired instance goes back to parked, because a warm standby keeps its captured graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from sgl_elastic.errors import IllegalTransitionError
from sgl_elastic.types import Placement


class InstanceState(StrEnum):
    """What an instance is doing."""

    STARTING = "starting"  # its processes come up
    PARKED = "parked"  # up, on the scratch page; a standby
    ATTACHED = "attached"  # its placement's pages are mapped
    WARM = "warm"  # attached, and has computed a batch
    ACTIVE = "active"  # serves
    DRAINING = "draining"  # serves what it has, gets nothing new
    FROZEN = "frozen"  # stopped at a token boundary, its requests published
    FAILED = "failed"  # a rank died or did not answer
    STOPPED = "stopped"  # its processes are gone


_S = InstanceState
# Every state may fail, and every one may be stopped: the server itself can end at any moment.
_ENDS = frozenset({_S.FAILED, _S.STOPPED})
NEXT: Mapping[InstanceState, frozenset[InstanceState]] = {
    # The first instance loads the weights itself and never parks.
    _S.STARTING: _ENDS | {_S.PARKED, _S.ATTACHED},
    _S.PARKED: _ENDS | {_S.ATTACHED},
    _S.ATTACHED: _ENDS | {_S.WARM, _S.PARKED},
    _S.WARM: _ENDS | {_S.ACTIVE, _S.PARKED},
    _S.ACTIVE: _ENDS | {_S.DRAINING, _S.FROZEN},
    # Back to active when the drain was given up.
    _S.DRAINING: _ENDS | {_S.FROZEN, _S.ACTIVE},
    # Back to active when the scale was rolled back.
    _S.FROZEN: _ENDS | {_S.ACTIVE, _S.PARKED},
    _S.FAILED: frozenset({_S.STOPPED}),
    _S.STOPPED: frozenset(),
}

# States in which the placement's pages are mapped by the instance's ranks.
HOLDING_MEMORY = frozenset({_S.ATTACHED, _S.WARM, _S.ACTIVE, _S.DRAINING, _S.FROZEN})


def advance(state: InstanceState, to: InstanceState) -> InstanceState:
    """`to`, if it may follow `state`. Raises IllegalTransitionError."""
    if to not in NEXT[state]:
        allowed = ", ".join(sorted(NEXT[state])) or "nothing"
        raise IllegalTransitionError(
            f"an instance that is {state} cannot become {to}; what can follow: {allowed}"
        )
    return to


@dataclass(frozen=True)
class Instance:
    """One engine instance as the instance manager knows it.

    `device_ids` are fixed for life, because its process group is. `placement` is None unless its
    pages are mapped. `pid` is the supervisor's, 0 before it runs. `since_s`: when the state began.
    """

    instance_id: str
    device_ids: tuple[int, ...]
    state: InstanceState = InstanceState.STARTING
    placement: Placement | None = None
    pid: int = 0
    since_s: float = 0.0

    @property
    def num_ranks(self) -> int:
        """One rank a device."""
        return len(self.device_ids)

    def with_state(
        self, to: InstanceState, now_s: float, placement: Placement | None = None
    ) -> Instance:
        """This instance in the state `to`; `placement` when it has just been attached.

        The placement is kept while memory is held and forgotten otherwise. Raises
        IllegalTransitionError for a state that cannot follow, for memory held without a
        placement, and for a placement on other devices.
        """
        advance(self.state, to)
        if to not in HOLDING_MEMORY:
            return replace(self, state=to, placement=None, since_s=now_s)
        kept = placement or self.placement
        if kept is None or kept.device_ids != self.device_ids:
            seen = None if kept is None else kept.device_ids
            raise IllegalTransitionError(
                f"instance {self.instance_id} on devices {self.device_ids} cannot become {to} "
                f"with a placement on {seen}: attach it to one on its own devices"
            )
        return replace(self, state=to, placement=kept, since_s=now_s)


def serving(known: Sequence[Instance]) -> Sequence[Instance]:
    """Those that serve: one but for replicas; the first while none does.

    While requests are handed over the old instance, which is the first, has stopped for a moment.
    """
    return [each for each in known if each.state is InstanceState.ACTIVE] or known[:1]
