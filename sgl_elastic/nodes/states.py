"""What an agent says of its node: plain values, which travel by Ray. Pure."""

from __future__ import annotations

ProcessState = tuple[int | None, bool]  # how it ended (None: it runs), whether it is stopped
BeatState = tuple[str, int, float, int]  # instance, rank, seconds since its loop turned, process id
NodeStates = tuple[dict[int, ProcessState], list[BeatState]]
