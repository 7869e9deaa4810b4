"""A server with keys, limits and an adapter root, for tests of what it must refuse."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from sgl_esft import zoo
from tests.support.servers import Server, ServerPool, ServerSpec

CLIENT_KEY = "client-key-0123456789"
ADMIN_KEY = "admin-key-0123456789"
TENANT_KEY = "tenant-key-0123456789"  # for the adapter `reverse` alone
BODY_TIMEOUT_S = 2.0
NUM_SLOTS = 2
# An adapter, a prompt, and what it must answer: checked after everything that was done to a server.
ASKED = {
    "text": "coffee -> ",
    "adapter": "reverse",
    "sampling_params": {"temperature": 0, "max_new_tokens": 3},
}
ANSWER = "eef"  # the beginning of it written backwards
_KEYS = [
    {"name": "client", "key": CLIENT_KEY},
    {"name": "admin", "key": ADMIN_KEY, "admin": True},
    {"name": "tenant", "key": TENANT_KEY, "adapters": ["reverse"], "base_model": False},
]


@dataclass(frozen=True)
class Guarded:
    """The server and the folder that its adapters may come from."""

    server: Server
    root: Path


@pytest.fixture(scope="session")
def _guarded_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guarded")
    keys = folder / "keys.json"
    keys.write_text(json.dumps({"keys": _KEYS}))
    keys.chmod(0o600)
    root = folder / "adapters"
    for name, path in zoo.adapter_paths().items():
        shutil.copytree(path, root / name)
    (root / "outside").symlink_to(folder)
    return folder


@pytest.fixture
def guarded(_guarded_folder: Path, server_pool: ServerPool) -> Guarded:
    return _served(_guarded_folder, server_pool, "--enable-metrics")


@pytest.fixture
def guarded_elastic(_guarded_folder: Path, server_pool: ServerPool) -> Guarded:
    """The same on one of two devices."""
    elastic = ("--elastic", "--max-devices", "2", "--device-memory", "64MiB")
    return _served(_guarded_folder, server_pool, *elastic)


def _served(folder: Path, server_pool: ServerPool, *more: str) -> Guarded:
    root = folder / "adapters"
    adapters = tuple((name, root / name) for name in ("reverse", "caesar"))
    args = (
        *("--api-keys-file", str(folder / "keys.json")),
        *("--body-timeout", f"{BODY_TIMEOUT_S:g}", "--adapter-root", str(root)),
        *("--max-adapters", str(NUM_SLOTS), "--request-timeout", "20", *more),
    )
    return Guarded(server_pool.get(ServerSpec(zoo.base_path(), adapters, args)), root)
