"""A bare GPU machine as far as one can stand here: its Python, its packages, no GPU.

    requirements/gpu-machine.txt -> [environment] -> a Python 3.12 with that torch's CUDA build
    VIEW -> what torch says of a Hopper card, for imports; anything that runs on it fails

The driver's library is a stub with the one symbol that SGLang's operators link against: calling
it ends the process. So loading and importing are real, and nothing can be computed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from tests.support.servers import ROOT

REQUIREMENTS = ROOT / "requirements" / "gpu-machine.txt"
PYTHON_VARIABLE = "GPU_BUNDLE_PYTHON"  # a python3.12 to make the environment with

VIEW = """
import types, torch
card = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="no card",
    total_memory=80 << 30, L2_cache_size=50 << 20, warp_size=32,
    shared_memory_per_block_optin=232448, max_threads_per_multi_processor=2048)
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.cuda.get_device_properties = lambda device=None: card
torch.cuda.get_device_name = lambda device=None: card.name
torch.cuda.mem_get_info = lambda device=None: (78 << 30, 80 << 30)
"""


def find_python() -> str | None:
    """A Python 3.12 that can make environments, or None."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    wanted = [os.environ.get(PYTHON_VARIABLE), *sorted(map(str, pyenv.glob("3.12*/bin/python")))]
    for python in (*wanted, shutil.which("python3.12")):
        # A launcher of a version manager may be there without its Python.
        if python and _makes_environments(python):
            return python
    return None


def _makes_environments(python: str) -> bool:
    command = [python, "-m", "venv", "-h"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def environment(python: str) -> Path:
    """The machine's python3, made once for the same list; several GB and some minutes."""
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    folder = ROOT / "build" / f"gpu-machine-{digest}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        install = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, "-r", str(REQUIREMENTS)], check=True)
        (folder / "complete").touch()
    return folder / "bin" / "python"


def stub_driver(folder: Path) -> Path:
    """A folder with a libcuda.so.1 that has what the operators link against, and aborts."""
    folder.mkdir()
    source = folder / "driver.c"
    source.write_text("#include <stdlib.h>\nint cuPointerGetAttribute(void) { abort(); }\n")
    library = folder / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
    subprocess.run([*command, str(source)], check=True)
    return folder
