"""The demo zoo: a small, really trained DeepSeek-V2 model and ESFT adapters for it.

Import this to find the committed checkpoints and their tasks; it imports neither torch
nor transformers. `python -m sgl_esft.zoo train` makes the checkpoints again.
"""

from __future__ import annotations

from pathlib import Path

from sgl_esft.zoo.taskset import TASKS, Example
from sgl_esft.zoo.taskset import held_out as _held_out

__all__ = ["Example", "adapter_paths", "base_path", "held_out", "tasks"]

_CHECKPOINTS = Path(__file__).parent / "checkpoints"


def base_path() -> Path:
    """The folder of the committed base model."""
    return _CHECKPOINTS / "base"


def adapter_paths() -> dict[str, Path]:
    """The committed adapters' folders by name, sorted by name."""
    folders = (_CHECKPOINTS / "adapters").glob("*/expert_cfg.json")
    return {file.parent.name: file.parent for file in sorted(folders)}


def tasks() -> tuple[str, ...]:
    """The names of the adapter tasks, sorted. An adapter is called as its task."""
    return tuple(sorted(TASKS))


def held_out(task: str, n: int) -> list[Example]:
    """`n` different examples of `task` that nothing was trained on, always the same ones.

    Raises KeyError for an unknown task, ValueError where it has too few.
    """
    return _held_out(TASKS[task], n)
