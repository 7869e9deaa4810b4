"""May the server get work? Values in, values out.

phase, trouble, beats of the ranks and of the detokenizer, now --> [judge] --> Readiness
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_esft.health.heartbeat import Beat
from sgl_esft.health.phases import Phase

# Why a server in this phase gets no work; the others may.
_PHASES: Mapping[Phase, str] = {
    Phase.STARTING: "the server is starting",
    Phase.DRAINING: "the server is draining",
    Phase.STOPPING: "the server is stopping",
}


@dataclass(frozen=True)
class Loop:
    """A loop that should turn. `beat` is None before its first turn."""

    name: str
    beat: Beat | None

    def silent_s(self, now_ns: int) -> float | None:
        """Seconds since it turned; None if it never has."""
        return None if self.beat is None else self.beat.age_s(now_ns)


@dataclass(frozen=True)
class Readiness:
    """The answer of GET /readyz. `reason` is None when the server is ready."""

    phase: Phase
    reason: str | None
    age_s: tuple[float | None, ...]  # of each rank: since its loop turned
    detokenizer_age_s: float | None

    @property
    def is_ready(self) -> bool:
        return self.reason is None

    def to_json(self) -> dict[str, Any]:
        """As JSON; ages in seconds, None for a rank that has not begun."""
        return {
            "ready": self.is_ready,
            "reason": self.reason,
            "state": str(self.phase),
            "ranks": [
                {"rank": rank, "age_s": _rounded(age_s)} for rank, age_s in enumerate(self.age_s)
            ],
            "detokenizer": {"age_s": _rounded(self.detokenizer_age_s)},
        }


def judge(
    phase: Phase,
    trouble: str | None,
    ranks: Sequence[Loop],
    detokenizer: Loop,
    now_ns: int,
    timeout_s: float,
) -> Readiness:
    """Ready means: serving, no trouble, and every loop has turned within `timeout_s`."""
    late = (_lateness(loop, now_ns, timeout_s) for loop in (*ranks, detokenizer))
    reason = _PHASES.get(phase) or trouble or next((text for text in late if text), None)
    return Readiness(
        phase,
        reason,
        tuple(rank.silent_s(now_ns) for rank in ranks),
        detokenizer.silent_s(now_ns),
    )


def _lateness(loop: Loop, now_ns: int, timeout_s: float) -> str | None:
    silent_s = loop.silent_s(now_ns)
    if silent_s is None:
        return f"{loop.name} has not begun"
    if silent_s > timeout_s:
        return f"{loop.name} has given no sign of life for {silent_s:.1f} s"
    return None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
