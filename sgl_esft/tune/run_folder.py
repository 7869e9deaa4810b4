"""The folder of one training: what was asked, and its checkpoints, from which `--resume` goes on.

OUT.training/run.json           base, data, experts and settings: a resumed run has the same
OUT.training/checkpoint-N/      trained experts, optimiser, random numbers after step N
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from sgl_esft.errors import ConfigError
from sgl_esft.formats.strict_json import read_object

_RECORD: Final = "run.json"
_LAST_WRITTEN: Final = "trainer_state.json"  # of a checkpoint: without it, the run ended meanwhile


@dataclass(frozen=True)
class Settings:
    """How to train. What one step sees: `batch_size` x `accumulate` rows."""

    epochs: float = 3.0
    learning_rate: float = 1e-4
    batch_size: int = 4
    accumulate: int = 1
    max_length: int = 4096
    seed: int = 0
    save_steps: int = 100
    recompute: bool = False  # activations, in the backward pass

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name not in ("seed", "recompute") and not 0 < value < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} is {value}: give more than 0.")


def training_folder(out: Path) -> Path:
    """Beside the adapter folder to make."""
    return out.parent / f"{out.name}.training"


def describe_run(
    base: Path, data: Path, experts: Mapping[int, tuple[int, ...]], settings: Settings
) -> dict[str, object]:
    """What must be the same for a checkpoint to be of this run."""
    return {
        "base_config": _digest(base / "config.json"),
        "base_bytes": sum(file.stat().st_size for file in sorted(base.glob("*.safetensors"))),
        "data": _digest(data),
        "experts": {str(layer): list(ids) for layer, ids in experts.items()},
        **asdict(settings),
    }


def open_run(folder: Path, run: Mapping[str, object], *, resume: bool) -> Path | None:
    """The checkpoint to go on from, None for the start. Raises ConfigError."""
    if not resume:
        if folder.exists():
            raise ConfigError(
                f"{folder} exists: an earlier run did not end. Add --resume, or remove it."
            )
        folder.mkdir(parents=True)
        (folder / _RECORD).write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
        return None
    if not (folder / _RECORD).exists():
        raise ConfigError(f"{folder} holds no run to resume: leave --resume out.")
    before = read_object(folder / _RECORD, ConfigError)
    changed = sorted(key for key in run if before.get(key) != run[key])
    if changed:
        was = ", ".join(f"{key} (then {_short(before.get(key))})" for key in changed)
        raise ConfigError(f"{folder} is of a run with another {was}: resume with the same.")
    return _last_checkpoint(folder)


def _last_checkpoint(folder: Path) -> Path | None:
    whole = [path for path in folder.glob("checkpoint-*") if (path / _LAST_WRITTEN).exists()]
    return max(whole, key=lambda path: int(path.name.partition("-")[2]), default=None)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 20 else f"{text[:16]}..."
