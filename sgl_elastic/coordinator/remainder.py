"""What follows a switch: it must happen, and is tried until it does.

coordinator.py --> [Remainder] --tasks, in order--> done, or kept for the next operation
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from sgl_elastic.coordinator.progress import Progress


@dataclass(frozen=True)
class Task:
    """Something that must happen after the switch; harmless to repeat."""

    phase: str
    act: Callable[[], None]


@dataclass
class Remainder:
    """What an operation still has to do after its switch."""

    progress: Progress
    tasks: deque[Task]
