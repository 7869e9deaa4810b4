"""A spare without SGLang: the real process, its socket, its copies, which tell what they are.

`python -m tests.support.light_spare`; LIGHT_SPARE says what else is different.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import threading
import time
from pathlib import Path

from sgl_elastic.instance import process, spare_process
from sgl_elastic.instance.process import InstanceSpec


def become(spec: InstanceSpec) -> int:
    """Tell what a supervisor would find, then run for as long as its engine says."""
    told = {
        "environment": dict(os.environ),
        "stdin": sys.stdin.read(),
        "group": os.getpgid(0),
        "title": Path("/proc/self/cmdline").read_text().strip("\0"),
        "threads": sorted(thread.name for thread in threading.enumerate()),
    }
    path = Path(spec.input_ipc)
    path.with_suffix(".part").write_text(json.dumps(told))
    path.with_suffix(".part").rename(path)
    time.sleep(float(os.environ["LIGHT_SECONDS"]))
    return 3


def start_a_thread() -> None:
    """Which a copy would not have."""
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


def import_engine() -> None:
    """As LIGHT_SPARE says."""
    match os.environ.get("LIGHT_SPARE"):
        case "fails":
            sys.exit("a hook is not in place")
        case "numpy":
            importlib.import_module("numpy")
        case "threads":
            start_a_thread()
        case "threads later":
            gc.freeze = start_a_thread
        case "imports long":
            time.sleep(60)


if __name__ == "__main__":
    process.become, process.import_engine = become, import_engine
    sys.exit(spare_process.main())
