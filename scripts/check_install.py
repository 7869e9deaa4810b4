"""The last step of `make setup`: what was installed is what a CPU should have.

.venv -> [check_install] -> exit status
Looks at metadata and torch's own build flag; imports nothing of SGLang, to stay quick.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys

import torch

from scripts.requirements_files import CPU_FILES, is_cuda_distribution, read_pins

# The one name that no folder of the checkout has: only a working editable install finds it.
INSTALLED_NAME = "sgl_esft_kernels"
PLUGIN_GROUPS = ("sglang.srt.platforms", "sglang.srt.plugins")


def problems() -> list[str]:
    """Everything that is wrong with this environment, in words."""
    return [*cuda_problems(), *pin_problems(), *own_problems()]


def cuda_problems() -> list[str]:
    """CUDA packages, or a torch built for CUDA."""
    names = {distribution.name for distribution in importlib.metadata.distributions()}
    found = [
        f"{name} is installed: a CUDA package"
        for name in sorted(names)
        if is_cuda_distribution(name)
    ]
    if torch.version.cuda is not None:
        found.append(f"torch {torch.__version__} is a CUDA build; the CPU build is wanted")
    return found


def pin_problems() -> list[str]:
    """Pins that another version took the place of."""
    found = []
    for name, pinned in read_pins(*CPU_FILES).items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "missing"
        if version.split("+")[0] != pinned.split("+")[0]:
            found.append(f"{name} is {version}, pinned is {pinned}")
    return found


def own_problems() -> list[str]:
    """Our packages importable, and our entry points visible to SGLang."""
    found = []
    if importlib.util.find_spec(INSTALLED_NAME) is None:
        found.append(f"{INSTALLED_NAME} cannot be imported: the editable install is not in place")
    for group in PLUGIN_GROUPS:
        values = [entry.value for entry in importlib.metadata.entry_points(group=group)]
        if not any(value.startswith("sgl_esft.") for value in values):
            found.append(f"no entry point of sgl_esft in the group {group}")
    return found


if __name__ == "__main__":
    found_problems = problems()
    for problem in found_problems:
        print(f"setup: {problem}", file=sys.stderr)
    sys.exit(1 if found_problems else 0)
