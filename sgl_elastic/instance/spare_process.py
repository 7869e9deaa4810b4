"""`python -m sgl_elastic.instance.spare_process`: a process that has imported all an engine needs.

    front --Become(spec)--> [this process] --fork--> an instance's supervisor --fork--> its ranks
          <--Born(pid)-----                          (process.py, from after its imports)

Imports are five sixths of what an instance's start costs on a CPU, and the same for all instances.
So they are done once, nothing is bound (no device, process group, port, configuration), and every
instance begins as a copy of this process: any size, any devices, as many as are asked for. Copies
share its memory until they write to it.

A copy of a process has only the thread that made it, and locks that other threads held stay locked
in it. So this process has one thread whenever it is copied, which it checks: pools of OpenMP and of
torch start with their first work, and imports do none; that of numpy's OpenBLAS would start at its
import, and has one thread here. It has no device either: a process that has opened an accelerator
cannot go on in a copy, which is why only the CPU platform has spares.

Its end of a socket pair is its standard input, so nobody but the front can talk to it; at the
front's end it ends. What it has started outlives it, and ends with the front.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import sgl_esft  # noqa: F401 - its __init__ must run before sglang
from sgl_elastic.errors import EngineFailedError
from sgl_elastic.instance import process
from sgl_elastic.instance.engine_config import EngineConfig
from sgl_elastic.instance.spare_messages import (
    Become,
    Born,
    Ended,
    Ready,
    Refused,
    SpareChannel,
    ToSpare,
    WaitFor,
    spare_channel,
)
from sgl_esft.health import ending

_SPARE, _INSTANCE = "sgl_elastic.instance.spare_process", "sgl_elastic.instance.process"


def main() -> int:
    """Serve the front until it ends. Returns the exit status."""
    parent = process.open_process(os.getppid())
    if _is_cut_off():
        return 0  # the front ended first, and `parent` is somebody else
    _take_title(_SPARE)  # the first time, which must be before the environment changes
    ending.ignore_ends()
    with _ending_with(parent):
        process.import_engine()
    if reason := _why_not():
        sys.exit(f"no spare: {reason}")
    gc.collect()
    gc.freeze()  # a collection in a copy would write to all these pages, and own them then
    channel = spare_channel(sys.stdin.fileno(), ToSpare, "the front")
    channel.send(Ready())
    try:
        while True:
            channel.wait()
            _answer(channel, parent)
    except EngineFailedError:
        return 0  # the front has ended, or has given this process up


def _answer(channel: SpareChannel[ToSpare], parent: int) -> None:
    message, fds = channel.receive()
    fds.close()
    if isinstance(message, WaitFor):
        channel.send(Ended(_wait_for(message.pid)))
        return
    if reason := _why_not():
        channel.send(Refused(reason))
        return
    pid = os.fork()
    if pid == 0:
        _go_on(message, parent)
    os.setpgid(pid, pid)  # as the copy does: whoever is first
    pidfd = os.pidfd_open(pid)
    try:
        channel.send(Born(pid), [pidfd])
    finally:
        os.close(pidfd)


def _is_cut_off() -> bool:
    """Whether the front's end of the socket pair is closed."""
    poll = select.poll()
    poll.register(sys.stdin.fileno(), 0)  # the end of both directions is always told
    return bool(poll.poll(0))


def _why_not() -> str:
    """Why this process must not be copied; "" if it may."""
    num_threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    return "" if num_threads == 1 else f"it has {num_threads} threads, and a copy would have one"


def _wait_for(pid: int) -> int:
    """How a copy has ended, as subprocess says it. The front knows that it has."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # it is asked a second time
        return -1


def _go_on(message: Become, parent: int) -> NoReturn:
    """In the copy: become the instance."""
    try:
        os.setpgid(0, 0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, sys.stdin.fileno())  # the channel is this process's parent's
        os.close(nothing)
        process.die_with(parent)
        os.environ.clear()
        os.environ.update(message.environment)
        spec = process.InstanceSpec.from_json(message.spec)
        _take_title(f"{_INSTANCE} {EngineConfig.from_json(spec.engine).instance}")
        ending.leave_after(lambda: process.become(spec))
    except BaseException:  # noqa: BLE001 - whatever it is, this is no second spare
        traceback.print_exc()
    os._exit(1)


def _take_title(title: str) -> None:
    """What `ps` shows, as of a process that was started by this name."""
    import setproctitle

    setproctitle.setproctitle(f"{sys.executable} -m {title}")


@contextmanager
def _ending_with(parent: int) -> Iterator[None]:
    """While nobody reads the channel, a thread ends this process with the parent."""
    readable, writable = os.pipe()

    def wait() -> None:
        if parent in select.select([parent, readable], [], [])[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    thread = threading.Thread(target=wait, name="parent-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(writable)
        thread.join()
        while Path(f"/proc/self/task/{thread.native_id}").exists():
            time.sleep(0.001)  # to Python a thread has ended a moment before it has
        os.close(readable)


if __name__ == "__main__":
    sys.exit(main())
