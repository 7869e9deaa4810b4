"""The zoo: small, really trained DeepSeek-V2 models and ESFT adapters for them.

Import this to find the committed checkpoints and their tasks; it imports neither torch
nor transformers. `python -m sgl_esft.zoo train` makes the checkpoints again.

`demo` is what is served where nothing else is named. `deep` has 12 MoE layers of 32 experts
instead of 3 of 16, so that experts can be predicted layers ahead.
"""

from __future__ import annotations

from pathlib import Path

from sgl_esft.zoo.taskset import TASKS, Example
from sgl_esft.zoo.taskset import held_out as _held_out

__all__ = ["MODELS", "Example", "adapter_paths", "base_path", "held_out", "tasks"]

MODELS = {
    "demo": Path(__file__).parent / "checkpoints",
    "deep": Path(__file__).parent / "deep",
}
"""Folders of what was trained, by the model's name."""


def base_path(model: str = "demo") -> Path:
    """The folder of the committed base model. Raises KeyError for an unknown one."""
    return MODELS[model] / "base"


def adapter_paths(model: str = "demo") -> dict[str, Path]:
    """The committed adapters' folders by name, sorted by name. Raises KeyError."""
    folders = (MODELS[model] / "adapters").glob("*/expert_cfg.json")
    return {file.parent.name: file.parent for file in sorted(folders)}


def tasks() -> tuple[str, ...]:
    """The names of the tasks, sorted. An adapter is called as its task; `demo` has all of them."""
    return tuple(sorted(TASKS))


def held_out(task: str, n: int) -> list[Example]:
    """`n` different examples of `task` that nothing was trained on, always the same ones.

    Raises KeyError for an unknown task, ValueError where it has too few.
    """
    return _held_out(TASKS[task], n)
