"""`python -m sgl_elastic.instance.process`: one engine instance, unmodified SGLang with our hooks.

    manager --spec (JSON, stdin)--> [this process: SGLang's DataParallelController]
    spare_process.py --copy of it--^    '--> one scheduler process a rank

Ranks send what they compute to the one detokenizer of the process that serves HTTP, whichever
instance they belong to. When this process or a rank ends, all of them end.
"""

from __future__ import annotations

import importlib
import itertools
import json
import multiprocessing
import os
import select
import signal
import sys
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Any

import msgspec

import sgl_esft  # noqa: F401 - its __init__ must run before sglang, in spawned children too
from sgl_elastic.instance import engine_config
from sgl_esft import env
from sgl_esft.health import ending

_IMPORTED_LATE = (
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
    "sglang.srt.constrained.xgrammar_backend",
)


@dataclass(frozen=True)
class InstanceSpec:
    """What a supervisor needs to start its ranks."""

    engine: str  # EngineConfig as JSON
    sglang_argv: tuple[str, ...]
    tokenizer_ipc: str
    detokenizer_ipc: str
    input_ipc: str  # where this instance's requests come from

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> InstanceSpec:
        return msgspec.json.decode(text, type=cls)


def main() -> int:
    """Run until killed, or until a rank dies. Returns the exit status."""
    die_with(open_process(os.getppid()))
    return become(InstanceSpec.from_json(sys.stdin.readline()))


def become(spec: InstanceSpec) -> int:
    """As `main`, in a process that watches its parent already."""
    os.environ[engine_config.VARIABLE] = spec.engine
    engine_config.current.cache_clear()
    engine = engine_config.EngineConfig.from_json(spec.engine)
    os.environ[env.HEARTBEAT_TABLE] = f"{engine.directory}/{engine.instance}.beats"
    os.environ[env.LOAD_FILE] = f"{engine.directory}/{engine.instance}.loads"
    ending.track_apart()
    os.environ.update(engine_config.rank_environment(engine.backend, engine.device_ids, os.environ))
    ending.ignore_ends()  # a terminal's, a service manager's; the front says when to end
    return _run(spec, engine_config.start_method(engine.backend))


def open_process(pid: int) -> int:
    """A descriptor of a process, which can be read once that has ended. Exits if it has."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        sys.exit(f"the parent, process {pid}, is gone already")


def die_with(parent: int) -> None:
    """The process group, this process and its ranks, is killed when the parent (a pidfd) ends.

    Not by PR_SET_PDEATHSIG, which also fires when the parent's thread that started this process
    ends, and instances are started from threads that do.
    """

    def wait() -> None:
        select.select([parent], [], [])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def import_engine() -> None:
    """Import all that an instance will use, with the hooks in place, and bind nothing.

    What a rank imports late, it imports as well, if nobody has done so for it: model classes at
    its model, the grammar backend at its scheduler. In CPU time they are a sixth of all imports.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    for module in _IMPORTED_LATE:
        importlib.import_module(module)


def _run(spec: InstanceSpec, start_method: str) -> int:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.managers import data_parallel_controller
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs, prepare_server_args
    from sglang.srt.utils.common import configure_logger

    # Nobody serves HTTP here, but SGLang derives other ports from this one: instances that live
    # at the same time must not share it.
    own_port = ("--port", str(_free_port()))
    server_args = prepare_server_args([*spec.sglang_argv, *own_port])
    server_args.resolve_once()
    configure_logger(server_args)
    _set_envs_and_config(server_args)
    multiprocessing.set_start_method(start_method, force=True)
    signal.signal(signal.SIGQUIT, _rank_failed)  # sent by a rank that hit an exception
    server_args.check_server_args()
    publish(server_args, role="dp_controller")
    ports = InstancePorts(spec, PortArgs, server_args)
    data_parallel_controller.PortArgs = ports  # of which it asks `init_new`, and nothing else
    controller = data_parallel_controller.DataParallelController(
        server_args, ports.init_new(server_args), run_scheduler_process
    )
    if server_args.node_rank == 0:
        controller.event_loop()
    for process in controller.scheduler_procs:  # requests come by rank 0's controller
        process.join()
    return 3  # a rank has ended, which none does by itself


def _rank_failed(signum: int, frame: FrameType | None) -> None:
    os._exit(3)  # its children are killed with it


class InstancePorts:
    """In place of SGLang's PortArgs: outputs go to the front, everything else stays in here.

    With a supervisor for each rank, requests come from that of rank 0, at its node's address.
    """

    def __init__(self, spec: InstanceSpec, port_args: Any, server_args: Any) -> None:
        self._spec = spec
        self._port_args = port_args
        host, _, _ = (server_args.dist_init_addr or "").rpartition(":")
        self._host = host or "127.0.0.1"
        self._calls = itertools.count()  # SGLang asks once for the controller, then for each rank

    def init_new(
        self, server_args: Any, dp_rank: int | None = None, worker_ports: list[int] | None = None
    ) -> Any:
        """SGLang's PortArgs, as its own `init_new` gives them."""
        prefix = own_input = self._spec.input_ipc
        is_for_a_rank = next(self._calls) > 0
        if dp_rank is not None and worker_ports is not None:
            own_input = f"tcp://{self._host}:{worker_ports[dp_rank]}"
        elif is_for_a_rank:
            own_input = f"{prefix}.rank"
        return self._port_args(
            tokenizer_ipc_name=self._spec.tokenizer_ipc,
            scheduler_input_ipc_name=own_input,
            detokenizer_ipc_name=self._spec.detokenizer_ipc,
            nccl_port=_free_port(),
            rpc_ipc_name=f"{prefix}.rpc",
            metrics_ipc_name=f"{prefix}.metrics",
            tokenizer_worker_ipc_name=None,
            decoupled_spec_ipc_config=None,
            instance_id=json.loads(self._spec.engine)["instance"],
            load_collector_ipc_name=f"{prefix}.load",
        )


def _free_port() -> int:
    from sgl_esft.ports import pick_free_port

    return pick_free_port()


if __name__ == "__main__":
    sys.exit(main())
