"""Every route of the server and who may call it.

    the application's routes --> [check_routes] --> all declared, or no server
    a request's method, path --> [RouteTable.find] --> its class, or 404, or 405

A route that is not in the table does not exist. `off` routes exist only when they are named by
--enable-route, and are for admins then. The paths are those of SGLang 0.5.23, of this package and
of the elastic runtime.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

from sgl_esft.dashboard.pages import FILES as DASHBOARD_FILES
from sgl_esft.errors import UndeclaredRouteError, UnknownMethodError, UnknownRouteError


class RouteClass(Enum):
    """Who may call a route."""

    PUBLIC = "public"  # anyone; costs next to nothing, but for /health: a token of an idle model
    CLIENT = "client"  # any key
    ADMIN = "admin"  # the admin key
    OFF = "off"  # nobody, unless --enable-route names it: then as ADMIN


# What a protocol other than HTTP, or an application mounted below a path, has for a method.
WEBSOCKET: Final = "WEBSOCKET"
MOUNT: Final = "MOUNT"

_GET = ("GET",)
_POST = ("POST",)
_GET_HEAD = ("GET", "HEAD")
_GET_POST = ("GET", "POST")
_GET_PATCH_DELETE = ("DELETE", "GET", "PATCH")
_POST_PUT = ("POST", "PUT")

_PUBLIC: Mapping[str, tuple[str, ...]] = {
    "/": _GET_HEAD,
    **dict.fromkeys(DASHBOARD_FILES, _GET_HEAD),  # they hold no data
    "/health": _GET,
    "/healthz": _GET,
    "/ping": _GET,
    "/ready": _GET,
    "/readyz": _GET,
}
_CLIENT: Mapping[str, tuple[str, ...]] = {
    "/classify": _POST_PUT,
    "/detokenize": _POST,
    "/docs": _GET_HEAD,
    "/docs/oauth2-redirect": _GET_HEAD,
    "/encode": _POST_PUT,
    "/generate": _POST_PUT,
    "/get_model_info": _GET,
    "/health_generate": _GET,
    "/invocations": _POST,
    "/metrics": _GET_HEAD,
    "/model_info": _GET,
    "/openapi.json": _GET_HEAD,
    "/parse_function_call": _POST,
    "/redoc": _GET_HEAD,
    "/separate_reasoning": _POST,
    "/tokenize": _POST,
    "/v1/chat/completions": _POST,
    "/v1/classify": _POST,
    "/v1/completions": _POST,
    "/v1/decisions": _POST,
    "/v1/detokenize": _POST,
    "/v1/embeddings": _POST,
    "/v1/loads": _GET,
    "/v1/messages": _POST,
    "/v1/messages/count_tokens": _POST,
    "/v1/models": _GET,
    "/v1/models/{model:path}": _GET,
    "/v1/responses": _POST,
    "/v1/responses/{response_id}": _GET,
    "/v1/responses/{response_id}/cancel": _POST,
    "/v1/score": _POST,
    "/v1/systemone": _POST,
    "/v1/tokenize": _POST,
    "/version": _GET,
}
_ADMIN: Mapping[str, tuple[str, ...]] = {
    "/abort_request": _POST,
    "/close_session": _GET_POST,
    "/continue_generation": _POST,
    "/flush_cache": _GET_POST,
    "/freeze_gc": _GET_POST,
    "/get_server_info": _GET,
    "/is_scaling_elastic_ep": _GET_POST,
    "/load_lora_adapter": _POST,
    "/open_session": _GET_POST,
    "/pause_generation": _POST,
    "/scale_elastic_ep": _POST,
    # These two read whole weights. AdapterNames refuses them where slots lack memory, and
    # the group that the second one needs is made by a route that is off.
    "/send_weights_to_remote_instance": _POST,
    "/weights_checker": _GET_POST,
    "/server_info": _GET,
    "/set_internal_state": _POST_PUT,
    "/set_trace_level": _GET_POST,
    "/unload_lora_adapter": _POST,
    # Folders, digests and who is asked for: an operator's. Clients have /v1/models.
    "/v1/adapters": _GET_POST,
    "/v1/adapters/{name}": _GET_PATCH_DELETE,
    "/v1/drain": _POST,
    "/v1/heat": _GET,
    "/v1/instances": _GET,
    "/v1/load_lora_adapter": _POST,
    "/v1/memory": _GET,
    "/v1/scale": _GET_POST,
    "/v1/scale/{operation_id}": _GET,
    "/v1/unload_lora_adapter": _POST,
}
# Of these a client's GET is answered, less what its key is not to see (visible.py).
_READ_BY_CLIENTS = frozenset({"/v1/adapters", "/v1/adapters/{name}"})
# They unpickle, write files, fetch from addresses, load code, run a model's own template, replace
# weights, stop the engine, take an adapter's name where it would not be seen, or (Ollama's) can
# name no adapter and end a stream that fails without a word.
_OFF: Mapping[str, tuple[str, ...]] = {
    "/add_external_corpus": _POST,
    "/api/chat": _POST,
    "/api/generate": _POST,
    "/api/show": _POST,
    "/api/tags": _GET,
    "/begin_weight_update": _POST,
    "/configure_logging": _GET_POST,
    "/destroy_weights_update_group": _POST,
    "/dump_expert_distribution_record": _GET_POST,
    "/dumper/{method}": _POST,
    "/end_weight_update": _POST,
    "/get_hicache_l3_cache_layout": _GET,
    "/get_remote_instance_transfer_engine_info": _GET,
    "/get_weights_by_name": _GET_POST,
    "/hicache/storage-backend": ("DELETE", "GET", "PUT"),
    "/hicache/storage-backend/clear": _POST,
    "/init_weights_send_group_for_remote_instance": _POST,
    "/init_weights_update_group": _POST,
    "/list_external_corpora": _GET,
    "/load_lora_adapter_from_tensors": _POST,
    "/pd_role_switch": _POST,
    "/release_memory_occupation": _GET_POST,
    "/remote_instance_transfer_engine_info": _GET,
    "/remove_external_corpus": _POST,
    "/resume_memory_occupation": _GET_POST,
    "/slow_down": _GET_POST,
    "/start_expert_distribution_record": _GET_POST,
    "/start_profile": _GET_POST,
    "/stop_expert_distribution_record": _GET_POST,
    "/stop_profile": _GET_POST,
    "/update_weight_version": _POST,
    "/update_weights_from_disk": _POST,
    "/update_weights_from_distributed": _POST,
    "/update_weights_from_ipc": _POST,
    "/update_weights_from_tensor": _POST,
    "/v1/audio/transcriptions": _POST,
    "/v1/realtime": (WEBSOCKET,),
    "/v1/rerank": _POST_PUT,
    "/vertex_generate": _POST,
}


@dataclass(frozen=True)
class Declared:
    """One path: its methods and its class."""

    path: str
    methods: frozenset[str]
    route_class: RouteClass

    def class_for(self, method: str) -> RouteClass:
        """The class of one method: of some routes for admins reading is for clients."""
        is_read = method in _GET_HEAD and self.path in _READ_BY_CLIENTS
        return RouteClass.CLIENT if is_read else self.route_class


def _declared() -> Mapping[str, Declared]:
    groups = (
        (RouteClass.PUBLIC, _PUBLIC),
        (RouteClass.CLIENT, _CLIENT),
        (RouteClass.ADMIN, _ADMIN),
        (RouteClass.OFF, _OFF),
    )
    return MappingProxyType(
        {
            path: Declared(path, frozenset(methods), route_class)
            for route_class, paths in groups
            for path, methods in paths.items()
        }
    )


TABLE: Final[Mapping[str, Declared]] = _declared()

# What --enable-route allows for a path of which nothing is declared.
_ANY_METHOD = frozenset({"DELETE", "GET", "HEAD", "PATCH", "POST", "PUT"})
_PARAMETER = re.compile(r"\{\w+(:path)?\}")


@dataclass(frozen=True)
class AppRoute:
    """One route that an application really has."""

    path: str
    methods: frozenset[str]


class RouteTable:
    """The declared routes, with those that this server turns on."""

    def __init__(
        self, enabled: Iterable[str] = (), declared: Mapping[str, Declared] = TABLE
    ) -> None:
        self.enabled = frozenset(enabled)
        self._paths = {
            **{path: Declared(path, _ANY_METHOD, RouteClass.ADMIN) for path in self.enabled},
            **declared,
        }
        self._templates = [(_compiled(path), path) for path in self._paths if "{" in path]

    def find(self, method: str, path: str) -> RouteClass:
        """The class of a request. Raises UnknownRouteError, UnknownMethodError."""
        declared = self._declared_for(path)
        route_class = self._class_of(declared, method)
        if route_class is RouteClass.OFF:
            raise UnknownRouteError(
                f"{declared.path} is off: start the server with --enable-route {declared.path}"
            )
        if method not in declared.methods:
            allowed = ", ".join(sorted(declared.methods))
            raise UnknownMethodError(f"{declared.path} takes {allowed}")
        return route_class

    def undeclared(self, routes: Iterable[AppRoute]) -> list[str]:
        """`METHOD path` of every route of an application that the table does not have."""
        return sorted(
            f"{method} {route.path}"
            for route in routes
            for method in route.methods
            if not self._has(method, route.path)
        )

    def _declared_for(self, path: str) -> Declared:
        found = self._paths.get(path)
        if found is not None and "{" not in path:
            return found
        for pattern, template in self._templates:
            if pattern.fullmatch(path):
                return self._paths[template]
        raise UnknownRouteError("there is no such route; GET /openapi.json lists the routes")

    def _class_of(self, declared: Declared, method: str) -> RouteClass:
        if declared.route_class is RouteClass.OFF and declared.path in self.enabled:
            return RouteClass.ADMIN
        return declared.class_for(method)

    def _has(self, method: str, path: str) -> bool:
        declared = self._paths.get(path)
        return declared is not None and (method == MOUNT or method in declared.methods)


def _compiled(template: str) -> re.Pattern[str]:
    """As Starlette reads it: a parameter is one segment, or with `:path` the rest."""
    parts: list[str] = []
    end = 0
    for found in _PARAMETER.finditer(template):
        parts += [re.escape(template[end : found.start()]), ".*" if found[1] else "[^/]+"]
        end = found.end()
    return re.compile("".join([*parts, re.escape(template[end:])]))


def routes_of(routes: Iterable[Any], prefix: str = "") -> list[AppRoute]:
    """The routes of a FastAPI or Starlette application, included routers among them."""
    found: list[AppRoute] = []
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is not None:
            inner = getattr(route.include_context, "prefix", "")
            found += routes_of(included.routes, prefix + inner)
            continue
        found.append(AppRoute(prefix + route.path, _methods_of(route)))
    return found


def _methods_of(route: Any) -> frozenset[str]:
    methods = getattr(route, "methods", None)
    if methods:
        return frozenset(methods)
    return frozenset({MOUNT if hasattr(route, "routes") else WEBSOCKET})


def check_routes(routes: Iterable[AppRoute], table: RouteTable) -> None:
    """Raises UndeclaredRouteError for a route without a class and an enabled one that is not."""
    routes = tuple(routes)
    undeclared = table.undeclared(routes)
    if undeclared:
        raise UndeclaredRouteError(
            f"these routes have no declared class: {', '.join(undeclared)}; name a path by "
            "--enable-route to give it to admins, or leave out what adds it"
        )
    missing = sorted(table.enabled - {route.path for route in routes})
    if missing:
        raise UndeclaredRouteError(f"--enable-route {' '.join(missing)}: there is no such route")


def routed_path(scope: Mapping[str, Any]) -> str:
    """The path that the router matches: the scope's, less the root path. Never a header's."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if root and (path == root or path.startswith(root + "/")):
        return path[len(root) :]
    return path
