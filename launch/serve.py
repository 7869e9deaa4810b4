"""Start SGLang's server as planned, with the adapter routes in front of it."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from sgl_esft import hook_ledger, platform, support
from sgl_esft.dashboard import pages
from sgl_esft.errors import EsftError
from sgl_esft.fields.rules import ModelBounds
from sgl_esft.health import process
from sgl_esft.health.engine import Engine
from sgl_esft.health.heartbeat import HeartbeatTable
from sgl_esft.hook_ledger import Hook
from sgl_esft.http import time_limit
from sgl_esft.http.adapter_names import ROUTES_OVER_ALL_SLOTS, KnownNames
from sgl_esft.http.request_ids import IdBook
from sgl_esft.http.routes import add_routes
from sgl_esft.plugin import request_hooks
from sgl_esft_launch import (
    access,
    adapters,
    console,
    flags,
    health,
    http_stack,
    models,
    observe,
    plan,
    resolved,
    summary,
    tiers,
    tokenizer,
)
from sgl_esft_launch.observe import tokenizer_manager
from sgl_esft_launch.plan import LaunchPlan


def serve(launch: LaunchPlan) -> int:
    """Serve until stopped. Returns the exit status."""
    progress = console.Progress()
    heartbeats = prepare_environment(launch)
    if support.TRIED:
        progress.stage(f"trying what was not shown on CUDA: {', '.join(sorted(support.TRIED))}")
    progress.stage(f"1/3 loading SGLang for {launch.model_path}")
    from sglang.srt.plugins import load_plugins

    load_plugins()
    try:
        hook_ledger.verify_required()
        server_args = resolve(launch)
        progress.stage("2/3 starting the engine")
        return run(launch, server_args, progress, heartbeats)
    except EsftError as error:
        progress.end()
        return console.refuse(error)


def resolve(launch: LaunchPlan, also: tuple[resolved.Needed, ...] = ()) -> object:
    """SGLang's arguments, resolved by SGLang and checked. Raises ConfigError."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    argv = [*access.argv_of(launch.access), *launch.sglang_argv]
    _check_values(ServerArgs, argv)
    server_args = prepare_server_args(argv)
    needed = (*also, *_needed(launch))
    resolved.check_given(server_args, needed)
    if launch.config is not None:
        resolved.check_given(server_args, resolved.of_adapters(launch.config, launch.all_adapters))
        resolved.check_names(server_args, launch.config)
    _choose_graphs(server_args, launch)
    server_args.resolve_once()
    view = resolving_view(server_args)
    resolved.check_resolved(view, needed)
    access.check_keys(view, launch.access)
    return server_args


def _choose_graphs(server_args: Any, launch: LaunchPlan) -> None:
    """Where the user has not."""
    if launch.config is not None and launch.config.tiers is not None:
        backend = tiers.decode_backend(server_args, launch.device)
        if backend is not None:
            server_args.cuda_graph_backend_decode = backend


def _check_values(server_args: Any, argv: list[str]) -> None:
    """As SGLang's parser, which would print all its flags. Raises ConfigError."""
    parser = flags.Parser(prog="sglang", add_help=False)
    server_args.add_cli_args(parser)
    logging.disable(logging.WARNING)  # of old flags; said when SGLang parses them
    try:
        parser.parse_args(argv)
    finally:
        logging.disable(logging.NOTSET)


def _needed(launch: LaunchPlan) -> tuple[resolved.Needed, ...]:
    needed = resolved.SERVER + access.needed(launch.host)
    if launch.config is not None:
        has_tiers = launch.config.tiers is not None
        needed += resolved.of_device(launch.device)
        records = launch.config.record is not None
        needed += resolved.weaving(launch.device, has_tiers=has_tiers, records=records)
        needed += resolved.of_base(launch.scheme)
        if launch.config.expert_memory == "virtual":
            needed += resolved.VIRTUAL
        if has_tiers:
            needed += resolved.TIERS
        if not plan.has_dp_attention(launch.sglang_argv):
            needed += resolved.NO_DP_ATTENTION
    return needed + (resolved.CPU if platform.is_active() else ())


def run(
    launch: LaunchPlan,
    server_args: object,
    progress: console.Progress,
    heartbeats: HeartbeatTable,
    when_ready: Callable[[], None] = lambda: None,
    engine: Engine | None = None,
    devices: Callable[[], str] = lambda: "",
    overrides: tuple[Hook, ...] = (),
) -> int:
    """SGLang's HTTP server with our routes, until it is stopped. Returns the exit status.

    `when_ready` is called as soon as requests can be served. `engine` None: SGLang's own ranks.
    `overrides` are more than ours, of SGLang's TokenizerManager.
    Raises UndeclaredRouteError, HookError.
    """
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils import kill_process_tree

    from sgl_esft.health.engine_processes import run_beating_detokenizer, run_scheduler

    manager = tokenizer.manager_class(overrides)
    request_hooks.use(IdBook(isolates_prefix_cache=launch.access.isolates_prefix_cache))
    time_limit.start(launch.access.text_timeout_s)
    app = http_server.app
    holder: adapters.LibraryHolder | None = None
    if launch.config is not None:
        holder = adapters.install(app, launch, launch.config, tokenizer_manager)
        add_routes(app, observe.ROUTES)
    names = _base_only if holder is None else holder.known_names
    add_routes(app, (*models.routes_of(names), observe.VERSION))
    pages.add_routes(app)
    service = health.install(app, launch.health, heartbeats, tokenizer_manager, engine)
    pads = launch.config is None or (
        launch.config.expert_memory != "virtual" and launch.config.tiers is None
    )
    http_stack.install(
        app,
        http_stack.Parts(
            observer=partial(
                observe.observer,
                log_format=launch.log_format,
                weave=holder is not None,
                is_ready=lambda: service.readiness().is_ready,
            ),
            access=launch.access,
            bounds=_bounds,
            control=service,
            names=None if holder is None else holder.known_names,
            ensure=None if holder is None else holder.ensure,
            refused_routes=frozenset() if pads else ROUTES_OVER_ALL_SLOTS,
        ),
    )

    def ready() -> None:
        tokenizer.check_is(tokenizer_manager(), manager)
        if launch.access.inner_key is not None:
            launch.access.inner_key.close()
        if holder is not None:
            holder.watch()
        when_ready()
        gc.collect()
        gc.freeze()  # of what the start has made: to look at it again stops all streams for 0.4 s
        service.started()
        progress.ready(summary.lines(launch, _kv_tokens(), devices()))

    process.hear_ends()
    try:
        http_server.launch_server(
            server_args,
            init_tokenizer_manager_func=tokenizer.initializer(manager),
            run_scheduler_process_func=run_scheduler,
            run_detokenizer_process_func=run_beating_detokenizer,
            launch_callback=ready,
        )
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return service.life.exit_status


def _base_only() -> KnownNames:
    return KnownNames(frozenset(), adapters.base_names(tokenizer_manager()))


def _kv_tokens() -> int | None:
    """Of the first rank, as SGLang has sized it."""
    from sglang.srt.entrypoints import http_server

    info = getattr(http_server._global_state, "scheduler_info", None) or {}
    return info.get("max_total_num_tokens")


def _bounds() -> ModelBounds:
    model = tokenizer_manager().model_config
    return ModelBounds(vocab_size=model.vocab_size, context_length=model.context_len)


def prepare_environment(launch: LaunchPlan) -> HeartbeatTable:
    """What SGLang and its children read from the environment. Returns the heartbeat table."""
    for name, value in launch.environment.items():
        os.environ.setdefault(name, value)
    os.environ.update(launch.device_environment)
    access.forget(launch.access)
    if launch.config is not None:
        launch.config.export()
    return health.prepare()
