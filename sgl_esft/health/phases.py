"""How a server lives and ends: a table. Values in, values out.

starting --> serving --> draining --> stopping          exit 0, or 1 if requests were cut
    '-----------'------------'-----> failed             exit 70
a signal while it starts, a second one at any time: exit 130 (SIGINT) or 143 (SIGTERM)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

EXIT_CUT = 1  # requests were ended by --drain-timeout
EXIT_FAILED = 70  # a process of the engine died or hung; EX_SOFTWARE of sysexits.h


class Phase(StrEnum):
    """Where a server is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"  # answers what it has, takes nothing new
    STOPPING = "stopping"  # its processes end
    FAILED = "failed"  # they end because one of them died or hung


class Event(StrEnum):
    """What happens to it."""

    STARTED = "started"
    SIGNAL = "signal"  # SIGTERM or SIGINT
    DRAIN = "drain"  # POST /v1/drain
    IDLE = "idle"  # no request is in flight
    TIMED_OUT = "timed out"  # the drain's time is up
    FAULT = "fault"


class Act(StrEnum):
    """What is to be done about it."""

    NOTHING = "nothing"
    DRAIN = "drain"  # begin to drain, or give it another deadline
    STOP = "stop"  # end the engine, then the server
    CUT = "cut"  # end what is in flight with an error, then stop
    FAIL = "fail"  # the same, at once
    FORCE = "force"  # kill everything and exit


_P, _E, _A = Phase, Event, Act
_FAILED = {_E.FAULT: (_P.FAILED, _A.FAIL)}
# What is not in the table changes nothing.
TABLE: Mapping[Phase, Mapping[Event, tuple[Phase, Act]]] = {
    _P.STARTING: {
        **_FAILED,
        _E.STARTED: (_P.SERVING, _A.NOTHING),
        # Only the warm-up can be in flight, and SGLang kills the process if that is refused or cut.
        # So there is no drain yet, and a signal does not wait.
        _E.SIGNAL: (_P.STOPPING, _A.FORCE),
    },
    _P.SERVING: {
        **_FAILED,
        _E.SIGNAL: (_P.DRAINING, _A.DRAIN),
        _E.DRAIN: (_P.DRAINING, _A.DRAIN),
    },
    _P.DRAINING: {
        **_FAILED,
        # A first signal after POST /v1/drain, as Kubernetes sends it after a preStop hook, changes
        # nothing.
        _E.DRAIN: (_P.DRAINING, _A.DRAIN),
        _E.IDLE: (_P.STOPPING, _A.STOP),
        _E.TIMED_OUT: (_P.STOPPING, _A.CUT),
    },
    _P.STOPPING: {},
    _P.FAILED: {},
}


@dataclass(frozen=True)
class Life:
    """The phase, and what the exit status will depend on."""

    phase: Phase = Phase.STARTING
    num_signals: int = 0
    has_cut: bool = False

    @property
    def exit_status(self) -> int:
        """What the process ends with, unless it is forced."""
        if self.phase is Phase.FAILED:
            return EXIT_FAILED
        return EXIT_CUT if self.has_cut else 0


def advance(life: Life, event: Event) -> tuple[Life, Act]:
    """The life after the event, and what is to be done."""
    if event is Event.SIGNAL:
        life = replace(life, num_signals=life.num_signals + 1)
        if life.num_signals > 1:
            return life, Act.FORCE
    phase, act = TABLE[life.phase].get(event, (life.phase, Act.NOTHING))
    return replace(life, phase=phase, has_cut=life.has_cut or act is Act.CUT), act
