"""Supervisor processes as their parent sees them: how one is started, and how all of it ends.

manager.py --start--> `python -m sgl_elastic.instance.process` (its own process group)
           --kill--> that group: the supervisor and its ranks; its sockets are removed

With several machines the ranks of an instance have a supervisor each (nodes/engines.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from sgl_elastic.errors import EngineFailedError
from sgl_elastic.instance.engine_config import EngineConfig
from sgl_elastic.instance.process import InstanceSpec
from sgl_elastic.processes import LocalProcess, Process

# How the processes of an instance are started: its name, devices and further flags. Raises
# EngineFailedError.
StartInstance: TypeAlias = Callable[
    ["EngineSettings", str, tuple[int, ...], tuple[str, ...]], Process
]


@dataclass(frozen=True)
class EngineSettings:
    """The same for every instance."""

    directory: Path
    sglang_argv: tuple[str, ...]  # without sizes, ports and addresses
    tokenizer_ipc: str
    detokenizer_ipc: str
    backend: str
    page_bytes: int
    max_kv_tokens: int
    parked_kv_tokens: int  # what an instance is started with, before it is attached
    num_sources: int = 1  # EngineConfig's
    first_argv: tuple[str, ...] = ()  # more, for the one that loads from disk
    environment: Callable[[int], Mapping[str, str]] = lambda num_ranks: {}
    start: StartInstance | None = None  # None: on this machine
    clean: Callable[[str], None] | None = None  # what an instance left elsewhere than here

    def input_ipc(self, instance: str) -> str:
        """Where an instance's requests come from."""
        return f"ipc://{self.directory}/{instance}.in"


def spec_of(
    settings: EngineSettings, name: str, device_ids: tuple[int, ...], more_argv: tuple[str, ...]
) -> InstanceSpec:
    """What the supervisor of instance `name` is told."""
    engine = EngineConfig(
        instance=name,
        directory=str(settings.directory),
        device_ids=device_ids,
        backend=settings.backend,
        page_bytes=settings.page_bytes,
        max_kv_tokens=settings.max_kv_tokens,
        num_sources=settings.num_sources,
    )
    sizes = size_argv(len(device_ids), settings.parked_kv_tokens)
    return InstanceSpec(
        engine=engine.to_json(),
        sglang_argv=(*settings.sglang_argv, *more_argv, *sizes),
        tokenizer_ipc=settings.tokenizer_ipc,
        detokenizer_ipc=settings.detokenizer_ipc,
        input_ipc=settings.input_ipc(name),
    )


def size_argv(num_ranks: int, parked_kv_tokens: int) -> list[str]:
    """SGLang's flags for DP = EP = `num_ranks`, TP 1."""
    size = str(num_ranks)
    argv = ["--tp-size", size, "--attn-dp-size", size, "--max-total-tokens", str(parked_kv_tokens)]
    if num_ranks > 1:
        argv += ["--enable-dp-lm-head", "--moe-dense-tp-size", "1"]
    return argv


def start_instance(
    settings: EngineSettings, name: str, device_ids: tuple[int, ...], more_argv: tuple[str, ...]
) -> Process:
    """All processes of an instance. Raises EngineFailedError."""
    if settings.start is not None:
        return settings.start(settings, name, device_ids, more_argv)
    spec = spec_of(settings, name, device_ids, more_argv)
    return start(spec, settings.environment(len(device_ids)))


def start(spec: InstanceSpec, environment: Mapping[str, str]) -> Process:
    """Start a supervisor, the leader of a process group. Raises EngineFailedError."""
    process = LocalProcess(
        [sys.executable, "-m", "sgl_elastic.instance.process"],
        stdin=subprocess.PIPE,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    if process.stdin is None:
        raise EngineFailedError("a supervisor has no standard input")
    process.stdin.write(spec.to_json().encode() + b"\n")
    process.stdin.close()
    return process


def clean(settings: EngineSettings, instance: str) -> None:
    """Remove what an instance that has ended leaves in file systems."""
    remove_sockets(settings.directory, instance)
    if settings.clean is not None:
        settings.clean(instance)


def remove_sockets(directory: Path, instance: str) -> None:
    """What an instance's sockets, its ranks' heartbeats and loads leave in the file system."""
    files = (directory / f"{instance}.{what}" for what in ("beats", "loads"))
    for path in (*directory.glob(f"{instance}.in*"), *files):
        path.unlink(missing_ok=True)
