"""A planned elastic launch, from the runtime to the end of the server.

ElasticPlan -> [serve] -> runtime -> SGLang's own HTTP server, hooked
"""

from __future__ import annotations

import os
from collections.abc import Callable

from sgl_elastic.errors import ElasticError
from sgl_elastic.front.readiness import ElasticEngine
from sgl_elastic.runtime import Runtime
from sgl_esft import hook_ledger
from sgl_esft.errors import EsftError
from sgl_esft.memory import metrics
from sgl_esft_launch import console, observe, plan, resolved
from sgl_esft_launch import serve as plain
from sgl_esft_launch.elastic import PROGRAM, ElasticPlan, add_scale_routes

# The shared experts are whole on every rank: their shape must not depend on the number of ranks.
_ENGINE_ENVIRONMENT = {"SGLANG_SHARED_EXPERT_TP1": "1"}
_SET_PER_INSTANCE = ("OMP_NUM_THREADS", "SGLANG_CPU_OMP_THREADS_BIND")


def serve(planned: ElasticPlan) -> int:
    """Serve until stopped. Returns the exit status."""
    progress = console.Progress()
    launch = planned.launch
    heartbeats = plain.prepare_environment(launch)
    for name in _SET_PER_INSTANCE:
        os.environ.pop(name, None)
    os.environ["OMP_NUM_THREADS"] = "1"
    progress.stage(f"1/3 loading SGLang for {launch.model_path}")
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sgl_elastic import front_hooks
    from sgl_elastic.front.sglang_wire import SglangWire

    try:
        server_args = plain.resolve(launch, resolved.ELASTIC)
        runtime = Runtime(
            planned.options,
            SglangWire(),
            sglang_argv=planned.engine_argv,
            first_argv=planned.first_argv,
            first_adapters=planned.first_adapters,
            adapter_reserve_bytes=planned.adapter_reserve_bytes,
            environment=lambda n: {**plan.platform_environment(n), **_ENGINE_ENVIRONMENT},
            page_bytes=planned.page_bytes,
            backend=planned.backend,
        )
    except (EsftError, ElasticError) as error:
        progress.end()
        return console.refuse(error, PROGRAM)
    try:
        front_hooks.use(runtime)
        hook_ledger.install(front_hooks.FRONT_HOOKS)
        hook_ledger.verify_required()
        progress.stage(
            f"2/3 starting {planned.options.dp_size} of {planned.options.max_devices} devices"
        )
        engine = ElasticEngine(runtime.directory, runtime, runtime.close, observe.tokenizer_manager)
        return plain.run(
            launch,
            server_args,
            progress,
            heartbeats,
            lambda: _ready(runtime),
            engine,
            lambda: (
                f"{planned.options.dp_size} of {planned.options.max_devices}; "
                "POST /v1/scale changes how many"
            ),
            front_hooks.FRONT_OVERRIDES,
        )
    except (EsftError, ElasticError) as error:
        progress.end()
        return console.refuse(error, PROGRAM)
    finally:
        runtime.close()


def _ready(runtime: Runtime) -> None:
    """HTTP is up: our routes, standbys, the autoscaler."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils.auth import AuthLevel, auth_level

    manager = http_server._global_state.tokenizer_manager
    protect = auth_level(AuthLevel.ADMIN_OPTIONAL)
    coordinator = runtime.parts.coordinator
    set_num_ranks = manager.update_control_communicator_fan_out
    set_num_ranks(coordinator.serving[1].dp_size)  # SGLang's front was made for one
    listed = (runtime.instances, protect, runtime.spares.seen)
    add_scale_routes(http_server.app, coordinator, *listed)
    runtime.serve(set_num_ranks, _zero_departed_ranks())


def _zero_departed_ranks() -> Callable[[int], None]:
    """Told how many ranks serve, it sets what /metrics says of the others' memory to 0."""
    from sgl_esft import sglang_api

    if not sglang_api.has_metrics():
        return lambda _: None
    gauges = metrics.MemoryMetrics()
    return lambda num_ranks: gauges.zero_from(num_ranks, metrics.published_gauges())
