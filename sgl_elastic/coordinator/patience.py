"""How long the coordinator waits, and how often it tries."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from sgl_elastic.errors import ElasticError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patience:
    """How often what cannot be taken back is tried, and how long a drain may take."""

    attempts: int = 4
    first_pause_s: float = 0.1  # doubled after each attempt
    drain_timeout_s: float = 30.0
    settle_s: float = 5.0  # for an adapter's change that is on its way to the ranks
    hear_s: float = 1.0  # for what the ranks have said

    def insist(self, act: Callable[[], None], sleep: Callable[[float], None]) -> None:
        """Try an action that is harmless to repeat. Raises the last attempt's error."""
        for attempt in range(self.attempts - 1):
            try:
                return act()
            except ElasticError as error:
                logger.warning("Attempt %d failed: %s", attempt + 1, error)
            sleep(self.first_pause_s * 2**attempt)
        return act()
