"""Start SGLang's server as planned, with the adapter routes in front of it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial

from sgl_esft import env, hook_ledger, platform, zoo
from sgl_esft.dashboard import pages
from sgl_esft.errors import EsftError
from sgl_esft.fields.rules import ModelBounds
from sgl_esft.health import process
from sgl_esft.health.engine import Engine
from sgl_esft.health.heartbeat import HeartbeatTable
from sgl_esft.hook_ledger import Hook
from sgl_esft.http.adapter_names import ROUTES_OVER_ALL_SLOTS, KnownNames
from sgl_esft.http.request_ids import IdBook
from sgl_esft.http.routes import add_routes
from sgl_esft.plugin import request_hooks
from sgl_esft_launch import (
    access,
    adapters,
    health,
    http_stack,
    models,
    observe,
    plan,
    resolved,
    tokenizer,
)
from sgl_esft_launch.observe import tokenizer_manager
from sgl_esft_launch.plan import LaunchPlan


def serve(launch: LaunchPlan) -> int:
    """Serve until stopped. Returns the exit status."""
    started = time.monotonic()
    heartbeats = prepare_environment(launch)
    say(f"1/3 loading SGLang for {launch.model_path}")
    from sglang.srt.plugins import load_plugins

    load_plugins()
    try:
        hook_ledger.verify_required()
        server_args = resolve(launch)
        say(f"2/3 starting the engine{_described(launch)}")
        return run(launch, server_args, started, heartbeats)
    except EsftError as error:
        print(f"sgl_esft: {type(error).__name__}: {error}", file=sys.stderr)
        return 2


def resolve(launch: LaunchPlan, also: tuple[resolved.Needed, ...] = ()) -> object:
    """SGLang's arguments, resolved by SGLang and checked. Raises ConfigError."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args([*access.argv_of(launch.access), *launch.sglang_argv])
    needed = (*also, *_needed(launch))
    resolved.check_given(server_args, needed)
    if launch.config is not None:
        resolved.check_given(server_args, resolved.of_adapters(launch.config, launch.adapters))
    server_args.resolve_once()
    view = resolving_view(server_args)
    resolved.check_resolved(view, needed)
    access.check_keys(view, launch.access)
    return server_args


def _needed(launch: LaunchPlan) -> tuple[resolved.Needed, ...]:
    needed = resolved.SERVER + access.needed(launch.host)
    if launch.config is not None:
        needed += resolved.of_device(launch.device) + resolved.WEAVING
        if launch.config.expert_memory == "virtual":
            needed += resolved.VIRTUAL
        if not plan.has_dp_attention(launch.sglang_argv):
            needed += resolved.NO_DP_ATTENTION
    return needed + (resolved.CPU if platform.is_active() else ())


def run(
    launch: LaunchPlan,
    server_args: object,
    started: float,
    heartbeats: HeartbeatTable,
    when_ready: Callable[[], None] = lambda: None,
    engine: Engine | None = None,
    overrides: tuple[Hook, ...] = (),
) -> int:
    """SGLang's HTTP server with our routes, until it is stopped. Returns the exit status.

    `when_ready` is called as soon as requests can be served. `engine` None: SGLang's own ranks.
    `overrides` are more than ours, of SGLang's TokenizerManager.
    Raises UndeclaredRouteError, HookError.
    """
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils import kill_process_tree

    from sgl_esft.health.detokenizer import run_beating_detokenizer

    manager = tokenizer.manager_class(overrides)
    request_hooks.use(IdBook(isolates_prefix_cache=launch.access.isolates_prefix_cache))
    app = http_server.app
    holder: adapters.LibraryHolder | None = None
    if launch.config is not None:
        holder = adapters.install(app, launch, launch.config, tokenizer_manager)
        add_routes(app, observe.ROUTES)
    names = _base_only if holder is None else holder.known_names
    add_routes(app, (*models.routes_of(names), observe.VERSION))
    pages.add_routes(app)
    service = health.install(app, launch.health, heartbeats, tokenizer_manager, engine)
    pads = launch.config is None or launch.config.expert_memory != "virtual"
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
        service.started()
        _announce(launch, time.monotonic() - started)

    process.hear_ends()
    try:
        http_server.launch_server(
            server_args,
            init_tokenizer_manager_func=tokenizer.initializer(manager),
            run_detokenizer_process_func=run_beating_detokenizer,
            launch_callback=ready,
        )
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return service.life.exit_status


def _base_only() -> KnownNames:
    return KnownNames(frozenset(), adapters.base_names(tokenizer_manager()))


def _bounds() -> ModelBounds:
    model = tokenizer_manager().model_config
    return ModelBounds(vocab_size=model.vocab_size, context_length=model.context_len)


def prepare_environment(launch: LaunchPlan) -> HeartbeatTable:
    """What SGLang and its children read from the environment. Returns the heartbeat table."""
    for name, value in launch.environment.items():
        os.environ.setdefault(name, value)
    os.environ.update(launch.device_environment)
    access.forget(launch.access)
    os.environ[env.LOG_FORMAT] = launch.log_format
    if launch.config is not None:
        launch.config.export()
    return health.prepare()


def _described(launch: LaunchPlan) -> str:
    if launch.config is None:
        return ", weaving off"
    names = ", ".join(launch.adapters) or "none yet"
    return (
        f", {launch.config.max_adapters} adapter slots of "
        f"{launch.config.max_experts_per_adapter} experts a layer; adapters: {names}"
    )


def _announce(launch: LaunchPlan, seconds: float) -> None:
    url = f"http://{launch.host}:{launch.port}"
    say(f"3/3 ready after {seconds:.0f} s at {url}; try:")
    body: dict[str, object] = {"text": "Hello", "sampling_params": {"max_new_tokens": 16}}
    if launch.model_path == str(zoo.base_path()):
        body = {"text": "coffee -> ", "sampling_params": {"temperature": 0, "stop": "\n"}}
    if launch.adapters:
        body["adapter"] = next(iter(launch.adapters))
    headers = "-H 'Content-Type: application/json'"
    if launch.access.policy.keys:
        headers += ' -H "Authorization: Bearer $KEY"'
    print(f"  curl {url}/generate {headers} -d '{json.dumps(body)}'", flush=True)


def say(line: str) -> None:
    """A line of progress."""
    print(f"[sgl-esft] {line}", flush=True)
