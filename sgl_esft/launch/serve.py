"""Start SGLang's server as planned, with the adapter routes in front of it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from sgl_esft import platform, plugin, zoo
from sgl_esft.access.bodies import ModelBounds
from sgl_esft.errors import EsftError
from sgl_esft.http_adapters import ROUTES_OVER_ALL_SLOTS, AdapterMiddleware, KnownNames
from sgl_esft.launch import access, resolved
from sgl_esft.launch.plan import LaunchPlan


def serve(launch: LaunchPlan) -> int:
    """Serve until stopped. Returns the exit status."""
    started = time.monotonic()
    prepare_environment(launch)
    say(f"1/3 loading SGLang for {launch.model_path}")
    from sglang.srt.plugins import load_plugins

    load_plugins()
    try:
        plugin.verify()
        server_args = resolve(launch)
        say(f"2/3 starting the engine{_described(launch)}")
        return run(launch, server_args, started)
    except EsftError as error:
        print(f"sgl_esft: {type(error).__name__}: {error}", file=sys.stderr)
        return 2


def resolve(launch: LaunchPlan) -> object:
    """SGLang's arguments, resolved by SGLang and checked. Raises ConfigError."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import prepare_server_args

    gate = launch.access
    keys = access.argv_of(gate) if gate else ()
    server_args = prepare_server_args([*keys, *launch.sglang_argv])
    server_args.resolve_once()
    needed = resolved.SERVER + (access.needed(launch.host) if gate else ())
    if launch.config is not None:
        needed += resolved.WEAVING
        if launch.config.expert_memory == "virtual":
            needed += resolved.VIRTUAL
    if platform.is_active():
        needed += resolved.CPU
    view = resolving_view(server_args)
    resolved.check_resolved(view, needed)
    if gate:
        access.check_keys(view, gate)
    return server_args


def run(
    launch: LaunchPlan,
    server_args: object,
    started: float,
    when_ready: Callable[[], None] = lambda: None,
) -> int:
    """SGLang's HTTP server with our routes, until it is stopped. Returns the exit status.

    `when_ready` is called as soon as requests can be served. Raises UndeclaredRouteError.
    """
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils import kill_process_tree

    if launch.config is not None:
        refused = ROUTES_OVER_ALL_SLOTS if launch.config.expert_memory == "virtual" else frozenset()
        http_server.app.add_middleware(
            AdapterMiddleware, known_names=_known_names, refused_routes=refused
        )
        http_server.app.add_api_route(
            "/v1/memory",
            _memory,
            methods=["GET"],
            summary="Expert memory of every device: reserved, mapped, shared; who has which slots",
        )

    if launch.access:
        access.install(http_server.app, launch.access, _bounds, _known_names)

    def ready() -> None:
        if launch.access and launch.access.inner_key is not None:
            launch.access.inner_key.close()
        when_ready()
        _announce(launch, time.monotonic() - started)

    try:
        http_server.launch_server(server_args, launch_callback=ready)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


async def _memory() -> dict[str, object]:
    """The memory report; `sgl-esft memory` shows it as a table or a picture."""
    from sgl_esft import memory_hooks

    return (await memory_hooks.fetch_report(_tokenizer_manager())).to_json()


def _tokenizer_manager() -> Any:
    from sglang.srt.entrypoints import http_server

    return http_server._global_state.tokenizer_manager


def _bounds() -> ModelBounds:
    model = _tokenizer_manager().model_config
    return ModelBounds(vocab_size=model.vocab_size, context_length=model.context_len)


def _known_names() -> KnownNames:
    """What requests may name now, from SGLang's own registry in this process."""
    manager = _tokenizer_manager()
    loaded = manager.lora_registry.get_all_adapters()
    return KnownNames(
        # lora_ref_cache holds adapters that were evicted; SGLang loads them again on demand.
        adapters=frozenset(loaded) | frozenset(manager.lora_ref_cache),
        base_models=frozenset({manager.served_model_name, manager.model_path}),
    )


def prepare_environment(launch: LaunchPlan) -> None:
    """What SGLang and its children read from the environment."""
    for name, value in launch.environment.items():
        os.environ.setdefault(name, value)
    os.environ.update(launch.device_environment)
    if launch.access:
        access.forget(launch.access)
    if launch.config is not None:
        launch.config.export()


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
    if launch.access and launch.access.policy.keys:
        headers += ' -H "Authorization: Bearer $KEY"'
    print(f"  curl {url}/generate {headers} -d '{json.dumps(body)}'", flush=True)


def say(line: str) -> None:
    """A line of progress."""
    print(f"[sgl-esft] {line}", flush=True)
