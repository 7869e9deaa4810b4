"""How much each key may use: sequences at once, tokens a minute.

    gate --enter--> [KeyLimits] --raises KeyLimitError(retry_after_s)--> 429
         --reserve, settle, leave-->

The clock is an argument everywhere. Tokens are reserved by what a request could use and settled by
what it did use, so that a key cannot go over its rate by asking at once, nor lose what it did not
use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from sgl_esft.access.keys import Caller
from sgl_esft.errors import BadBodyError, KeyLimitError

# When a place frees is not known; a client that comes back sooner only adds load.
BUSY_RETRY_S = 1.0
_ROUNDING_S = 1e-6


@dataclass
class TokenBucket:
    """Holds at most a minute's tokens and fills evenly. Its level may be below zero: a debt."""

    per_minute: int
    level: float = field(init=False)
    at: float  # seconds, the clock's, when `level` was right

    def __post_init__(self) -> None:
        self.level = float(self.per_minute)

    def wait_for(self, tokens: float, now: float) -> float:
        """Seconds until so many are there; 0 if they are. More than it holds: until it is full."""
        self._fill(now)
        missing = min(tokens, self.per_minute) - self.level
        seconds = missing * 60 / self.per_minute
        return seconds if seconds > _ROUNDING_S else 0.0

    def take(self, tokens: float, now: float) -> None:
        """Take tokens, or with a negative number give some back."""
        self._fill(now)
        self.level = min(self.level - tokens, float(self.per_minute))

    def _fill(self, now: float) -> None:
        gained = max(0.0, now - self.at) * self.per_minute / 60
        self.level = min(self.level + gained, float(self.per_minute))
        self.at = max(self.at, now)


@dataclass
class _Used:
    sequences: int = 0
    bucket: TokenBucket | None = None


class KeyLimits:
    """What every key uses now. One event loop's; nothing here waits."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._used: dict[str, _Used] = {}

    def enter(self, caller: Caller) -> Ticket:
        """A request begins, as one sequence. Raises KeyLimitError."""
        used = self._used_by(caller)
        if used.bucket is not None:
            # Whoever is in debt waits before the body is even read.
            _refuse_for(used.bucket.wait_for(1, self._clock()))
        ticket = Ticket(caller, used, self._clock)
        ticket.grow(1)
        return ticket

    def sequences(self, name: str) -> int:
        """Sequences of a key that run now."""
        return self._used[name].sequences if name in self._used else 0

    def _used_by(self, caller: Caller) -> _Used:
        used = self._used.get(caller.name)
        rate = caller.tokens_per_minute
        if used is None:
            bucket = None if rate is None else TokenBucket(rate, at=self._clock())
            used = self._used[caller.name] = _Used(bucket=bucket)
        elif rate != (None if used.bucket is None else used.bucket.per_minute):
            used.bucket = self._changed(used.bucket, rate)
        return used

    def _changed(self, bucket: TokenBucket | None, rate: int | None) -> TokenBucket | None:
        """The key has another rate now: its debt stays, and what it may have in advance shrinks."""
        if rate is None:
            return None
        changed = TokenBucket(rate, at=self._clock())
        if bucket is not None:
            bucket.take(0, self._clock())
            changed.level = min(changed.level, bucket.level)
        return changed


class Ticket:
    """One request's share of its key's limits, until `leave`."""

    def __init__(self, caller: Caller, used: _Used, clock: Callable[[], float]) -> None:
        self._caller = caller
        self._used = used
        self._clock = clock
        self._sequences = 0
        self._reserved = 0

    @property
    def is_metered(self) -> bool:
        """Whether it matters how many tokens the answer used."""
        return self._used.bucket is not None and self._reserved > 0

    def grow(self, sequences: int) -> None:
        """The request turns out to be so many sequences. Raises KeyLimitError, BadBodyError."""
        more = sequences - self._sequences
        limit = self._caller.max_concurrency
        if limit is not None:
            if sequences > limit:
                raise BadBodyError(
                    f"the request has {sequences} sequences, this key may have {limit} at once: "
                    "send fewer prompts, or a smaller n"
                )
            if self._used.sequences + more > limit:
                raise KeyLimitError(f"this key has {limit} sequences at once", BUSY_RETRY_S)
        self._used.sequences += more
        self._sequences = sequences

    def reserve(self, tokens: int) -> None:
        """The request may use so many tokens. Raises KeyLimitError."""
        bucket = self._used.bucket
        if bucket is None:
            return
        now = self._clock()
        _refuse_for(bucket.wait_for(tokens, now))
        bucket.take(tokens, now)
        self._reserved = tokens

    def leave(self, tokens_used: int | None = None) -> None:
        """The request has ended; None: what it used is not known, so what it reserved counts."""
        if self._used.bucket is not None and tokens_used is not None:
            self._used.bucket.take(tokens_used - self._reserved, self._clock())
        self._reserved = 0
        self._used.sequences -= self._sequences
        self._sequences = 0


def _refuse_for(seconds: float) -> None:
    if seconds > 0:
        raise KeyLimitError("this key's tokens of the minute are used up", math.ceil(seconds))
