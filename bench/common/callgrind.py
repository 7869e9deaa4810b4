"""Instructions of native code, counted: the same on every run, whatever else the machine does.

executable, arguments -> valgrind --tool=callgrind -> instructions of the whole run
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

VALGRIND = shutil.which("valgrind")


def instructions(executable: Path, *arguments: object) -> int:
    """Raises RuntimeError with what valgrind said when it counted nothing."""
    command = [str(VALGRIND), "--tool=callgrind", "--callgrind-out-file=/dev/null"]
    command += [str(executable), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or found is None:
        raise RuntimeError(f"{executable.name} under valgrind: {done.stderr[-2000:]}")
    return int(found.group(1))


def per_call(executable: Path, *arguments: object, num_calls: int = 10) -> float:
    """Of one more call: `executable` takes the number of calls as its last argument."""
    few, many = (instructions(executable, *arguments, n) for n in (1, 1 + num_calls))
    return (many - few) / num_calls
