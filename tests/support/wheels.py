"""Wheels of this project, built from a copy of what git knows, by this environment's tools."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.repo.tree import ROOT, project_files


def copy_of_the_project(folder: Path) -> Path:
    for path in project_files():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)
    return folder


def build_wheel(project: Path, out: Path, **environment: str) -> Path:
    """As `make wheel` does. Raises RuntimeError with the end of what was said."""
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "--wheel-dir", str(out), "."],
        cwd=project,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"no wheel:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return next(out.glob("*.whl"))
