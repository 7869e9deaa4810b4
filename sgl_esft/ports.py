"""TCP ports on this machine: is one free, which one is.

launch/plan.py (may we listen there?)   zoo/serving.py, tests (where shall we listen?)
SGLang, by a hook (where will its ranks meet?)
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import socket
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import psutil

from sgl_esft.errors import ConfigError

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 20000
# SGLang derives further ports from the one it serves on: neighbours would collide.
_STEP = 37
_MAX_DERIVED = 300  # how far from its own they are, at most
_ANY_HOST = "0.0.0.0"  # where ranks listen
_MAX_COMMAND = 120  # characters of a command line in a message
_turn = itertools.count(os.getpid())
# Descriptors of the locked files of ports that this process has chosen, the newest last. When so
# many more have been chosen, something listens at the oldest, or never will.
_claims: deque[int] = deque()
_MAX_CLAIMS = 32
_CLAIM_FLAGS = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def check_port_free(host: str, port: int) -> None:
    """Raises ConfigError if nothing could listen there."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error}; stop {_holder(port)} or choose "
            "another --port"
        ) from error


def _holder(port: int) -> str:
    """Who listens at a port, where this user may see it."""
    with contextlib.suppress(psutil.Error, OSError):
        for found in psutil.net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid:
                command = " ".join(psutil.Process(found.pid).cmdline())[:_MAX_COMMAND]
                return f"process {found.pid} ({command}), which listens there,"
    return "what listens there"


def pick_free_port(host: str = "127.0.0.1", beside: int | None = None) -> int:
    """A port that is free now, and that neither others who ask here nor the kernel give away.

    `beside`: the port of a server, which will listen there and near it; none of those is chosen.
    The port is kept while this process lives and has not chosen many more.

    Asking the kernel for any free port is not enough: it takes it from the range from which
    it also numbers outgoing connections, and one of those may take it before the server does.
    Raises ConfigError if there is none.
    """
    candidates = range(_LOWEST, _first_ephemeral(), _STEP)
    for _ in candidates:
        port = candidates[next(_turn) % len(candidates)]
        if beside is not None and abs(port - beside) <= _MAX_DERIVED:
            continue
        try:
            check_port_free(host, port)
        except ConfigError:
            continue
        if _claim(port):
            return port
    raise ConfigError(f"no free port on {host} from {_LOWEST} to {candidates.stop - 1}")


def choose_rendezvous(
    port_args: Any, server_args: Any, dp_rank: int | None = None, worker_ports: Any = None
) -> None:
    """After SGLang's `PortArgs.init_new`: where ranks meet, unless the user has said it.

    They meet there only when each has imported SGLang, half a minute later on a busy machine.
    Raises ConfigError if no port is free.
    """
    if server_args.nccl_port is None:
        port_args.nccl_port = pick_free_port(_ANY_HOST, beside=server_args.port)


def _claim(port: int) -> bool:
    """Whether the port is ours: a server listens only some seconds after its port was chosen.

    Where claims cannot be written, for whatever reason, every free port is.
    """
    try:
        folder = Path(tempfile.gettempdir()) / f"sgl-esft-ports-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        claim = os.open(folder / str(port), _CLAIM_FLAGS, 0o600)
    except OSError:
        return True
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(claim)
        return False
    _claims.append(claim)
    if len(_claims) > _MAX_CLAIMS:
        os.close(_claims.popleft())
    return True


def _first_ephemeral() -> int:
    try:
        return max(int(_EPHEMERAL.read_text().split()[0]), _LOWEST + 100 * _STEP)
    except OSError:  # not Linux
        return 32768
