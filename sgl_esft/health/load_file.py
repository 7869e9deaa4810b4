"""The file in which ranks write their load, for GET /v1/loads and SGLang's DP controller.

    front, supervisor --ESFT_LOAD_FILE--> [path_for] --> SGLang's readers and writers

SGLang has one in /dev/shm, named by the server, and nobody removes it.
"""

from __future__ import annotations

import os

from sgl_esft import env
from sgl_esft.errors import InvariantError


def create() -> str:
    """A new file without a name, by a path for this process and its children.

    It is gone when its last user is, however they end: this process keeps it open.
    """
    fd = os.memfd_create("sgl_esft-loads", os.MFD_CLOEXEC)
    return f"/proc/{os.getpid()}/fd/{fd}"


def path_for(ipc_name: str) -> str:
    """In place of SGLang's."""
    path = env.load_file()
    if path is None:
        raise InvariantError(f"{env.LOAD_FILE} is not set, and there is a hook that needs it")
    return str(path)
