"""Who may call the server: from flags to what the gate is made of.

flags.py -> AccessFlags -> [plan_access] -> AccessPlan -> http_stack.py
                                            └-> [argv_of, check_keys]: SGLang knows our key only
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_esft.access import keys
from sgl_esft.access.gate import InnerKey, Policy
from sgl_esft.access.keys import Caller, KeyEntry, KeyRing, WatchedKeys
from sgl_esft.access.origins import is_loopback
from sgl_esft.byte_size import parse_bytes
from sgl_esft.errors import ConfigError
from sgl_esft.fields.rules import DEFAULT_MAX_BODY_BYTES, BodyRules
from sgl_esft.http.classes import RouteTable
from sgl_esft.http.text_jobs import DEFAULT_TIMEOUT_S as DEFAULT_TEXT_TIMEOUT_S
from sgl_esft_launch.arguments import nearest
from sgl_esft_launch.resolved import Needed

DEFAULT_BODY_TIMEOUT_S = 30.0
DEFAULT_REQUEST_TIMEOUT_S = 1800.0
_LOGIT_PROCESSORS = "--enable-custom-logit-processor"
_TEMPLATES = "--trust-request-chat-template"
# Switches of SGLang's environment: what each opens that the gate does not see.
_NO_OTHER_SWITCH: Mapping[str, str] = {
    "SGLANG_RUST_SERVER": "that server has no access control",
    "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES": "headers would set fields that bodies may not",
    "DUMPER_SERVER_PORT": "that server listens everywhere, without access control",
}
# As SGLang reads them; with `reuse` the dumper's routes are this server's own.
_OFF = ("", "0", "-1", "false", "no", "n", "reuse")

# Other doors into the server, at which there is no gate.
_NO_OTHER_DOOR: tuple[Needed, ...] = (
    Needed("tokenizer_worker_num", (1,), "each worker would be a server without access control"),
    Needed("grpc_port", (None,), "there is no access control on gRPC"),
    Needed(
        "disaggregation_mode",
        ("null", None),
        "prefill and decode find each other at a port without access control",
    ),
    Needed(
        "enable_http2",
        (False, None),
        "headers are checked as HTTP/1 has them; put a proxy in front that speaks HTTP/2",
    ),
)


@dataclass(frozen=True)
class AccessFlags:
    """The command line's part. None = not given."""

    api_key: str | None = field(repr=False)
    admin_api_key: str | None = field(repr=False)
    api_keys_file: str | None
    admin_key_env: str | None
    max_body_bytes: int
    body_timeout_s: float
    request_timeout_s: float
    allowed_origins: tuple[str, ...]
    enabled_routes: tuple[str, ...]
    allows_stop_regex: bool = False
    isolates_prefix_cache: bool = False
    text_timeout_s: float = DEFAULT_TEXT_TIMEOUT_S


@dataclass(frozen=True)
class AccessPlan:
    """Checked access control."""

    policy: Policy
    inner_key: InnerKey | None  # what SGLang is started with; None without keys
    keys: Callable[[], KeyRing]  # those of now
    forgotten: tuple[str, ...] = ()  # variables that no child process may inherit
    isolates_prefix_cache: bool = False  # by key
    text_timeout_s: float = DEFAULT_TEXT_TIMEOUT_S


def add_flags(group: argparse._ArgumentGroup) -> None:
    """The flags of access control."""
    group.add_argument(
        "--api-keys-file",
        metavar="FILE",
        help="JSON with every client's key, adapters and limits; mode 0600",
    )
    group.add_argument("--api-key", metavar="KEY", help="one key for all clients")
    group.add_argument("--admin-api-key", metavar="KEY", help="the key for admin routes")
    group.add_argument(
        "--admin-key-env",
        metavar="NAME",
        help="the environment variable with the admin key, which `ps` does not show",
    )
    group.add_argument(
        "--max-body-bytes",
        metavar="SIZE",
        default=str(DEFAULT_MAX_BODY_BYTES),
        help="the largest body of a request, such as 8MiB (default: 2MiB)",
    )
    group.add_argument(
        "--body-timeout",
        type=float,
        metavar="SECONDS",
        default=DEFAULT_BODY_TIMEOUT_S,
        help="a client may take so long to send a body (default: %(default)g)",
    )
    group.add_argument(
        "--request-timeout",
        type=float,
        metavar="SECONDS",
        default=DEFAULT_REQUEST_TIMEOUT_S,
        help="a request is ended when its answer has taken so long (default: %(default)g)",
    )
    group.add_argument(
        "--text-timeout",
        type=float,
        metavar="SECONDS",
        default=DEFAULT_TEXT_TIMEOUT_S,
        help="tokenizing or parsing the text of a request that does not run the model may take so "
        "long (default: %(default)g)",
    )
    group.add_argument(
        "--allowed-origins",
        nargs="+",
        metavar="ORIGIN",
        default=[],
        help="web pages that may use the server besides this machine's, such as "
        "https://chat.example; * allows all",
    )
    group.add_argument(
        "--enable-route",
        action="append",
        metavar="PATH",
        default=[],
        help="turn on a route that is off, for admins; may be given several times",
    )
    group.add_argument(
        "--allow-stop-regex",
        action="store_true",
        help="let clients send stop_regex: a pattern can hold up the server for all of them",
    )
    group.add_argument(
        "--isolate-prefix-cache",
        action="store_true",
        help="no key's requests use what the prefix cache has of another's, so that none can time "
        "the prompts of others; a prompt that keys share is computed and kept once for each",
    )


def read_flags(found: argparse.Namespace) -> AccessFlags:
    """Raises ConfigError."""
    return AccessFlags(
        api_key=found.api_key,
        admin_api_key=found.admin_api_key,
        api_keys_file=found.api_keys_file,
        admin_key_env=found.admin_key_env,
        max_body_bytes=_bytes(found.max_body_bytes),
        body_timeout_s=_seconds("--body-timeout", found.body_timeout),
        request_timeout_s=_seconds("--request-timeout", found.request_timeout),
        allowed_origins=tuple(found.allowed_origins),
        enabled_routes=tuple(found.enable_route),
        allows_stop_regex=found.allow_stop_regex,
        isolates_prefix_cache=found.isolate_prefix_cache,
        text_timeout_s=_seconds("--text-timeout", found.text_timeout),
    )


def _bytes(text: str) -> int:
    return parse_bytes(f"{text}B" if text.isdigit() else text, "--max-body-bytes")


def _seconds(flag: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise ConfigError(f"{flag} {value:g}: must be a finite time above 0 s")
    return value


def plan_access(
    flags: AccessFlags,
    host: str,
    sglang_argv: Sequence[str],
    *,
    weave: bool,
    environment: Mapping[str, str] = os.environ,
) -> AccessPlan:
    """Read the keys and check who could reach the server. Raises ConfigError."""
    ring = _ring(flags, environment, weave)
    if not ring and not is_loopback(host):
        raise ConfigError(
            f"--host {host} can be reached from elsewhere, and there are no keys: give "
            "--api-keys-file or --api-key (and --admin-key-env), or leave --host out"
        )
    _check_doors(sglang_argv, environment)
    if flags.isolates_prefix_cache and not ring:
        raise ConfigError(
            "--isolate-prefix-cache keeps keys apart, and there are no keys: give --api-keys-file, "
            "or leave it out"
        )
    policy = Policy(
        keys=ring,
        table=RouteTable(flags.enabled_routes),
        rules=BodyRules(
            max_bytes=flags.max_body_bytes,
            takes_logit_processors=_LOGIT_PROCESSORS in sglang_argv,
            takes_templates=_TEMPLATES in sglang_argv,
            takes_stop_regex=flags.allows_stop_regex,
            takes_media=not weave,
        ),
        body_timeout_s=flags.body_timeout_s,
        request_timeout_s=flags.request_timeout_s,
        allowed_origins=flags.allowed_origins,
    )
    forgotten = () if flags.admin_key_env is None else (flags.admin_key_env,)
    current = _watched(ring, flags, dict(environment), weave)
    return AccessPlan(
        policy,
        InnerKey() if ring else None,
        current,
        forgotten,
        isolates_prefix_cache=flags.isolates_prefix_cache,
        text_timeout_s=flags.text_timeout_s,
    )


def _check_doors(sglang_argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """By name, before SGLang reads anything; `needed` has what it made of them. ConfigError."""
    given = {arg.split("=")[0] for arg in sglang_argv}
    for door in _NO_OTHER_DOOR:
        flag = "--" + door.field.replace("_", "-")
        if flag in given:
            raise ConfigError(f"{flag}: {door.reason}; leave it out")
    for switch, reason in _NO_OTHER_SWITCH.items():
        if environment.get(switch, "").lower() not in _OFF:
            raise ConfigError(f"{switch}: {reason}; unset it")


def _ring(flags: AccessFlags, environment: Mapping[str, str], weave: bool) -> KeyRing:
    ring = KeyRing(_entries(flags, environment))
    if not weave and ring.is_restricted:
        raise ConfigError("--no-esft has no adapters, and --api-keys-file has keys for some only")
    return ring


def _watched(
    ring: KeyRing, flags: AccessFlags, environment: Mapping[str, str], weave: bool
) -> Callable[[], KeyRing]:
    """The keys, followed where they come from a file."""
    if flags.api_keys_file is None:
        return lambda: ring
    name = flags.admin_key_env or ""
    given = {name: environment[name]} if name in environment else {}
    return WatchedKeys(
        Path(flags.api_keys_file).absolute(),
        ring,
        lambda: _ring(flags, given, weave),
        time.monotonic,
    ).current


def _entries(flags: AccessFlags, environment: Mapping[str, str]) -> list[KeyEntry]:
    found: list[KeyEntry] = []
    if flags.api_keys_file is not None:
        found += keys.read_keys_file(Path(flags.api_keys_file))
    if flags.api_key is not None:
        found.append(keys.entry_for(Caller("api-key"), flags.api_key, "--api-key"))
    if flags.admin_api_key is not None:
        admin = Caller("admin-api-key", is_admin=True)
        found.append(keys.entry_for(admin, flags.admin_api_key, "--admin-api-key"))
    if flags.admin_key_env is not None:
        found.append(keys.admin_from_environment(flags.admin_key_env, environment))
    return found


def argv_of(plan: AccessPlan) -> tuple[str, ...]:
    """SGLang's own two keys: one that nobody else knows, or none without keys."""
    if plan.inner_key is None:
        return ()
    # In one word each: a key may begin with a dash.
    return tuple(f"{flag}={plan.inner_key.value}" for flag in ("--api-key", "--admin-api-key"))


def needed(host: str) -> tuple[Needed, ...]:
    """What SGLang's resolved arguments must be, so that the gate is the only door."""
    return (*_NO_OTHER_DOOR, Needed("host", (host,), "write --host in full, on the command line"))


def check_keys(arguments: Any, plan: AccessPlan) -> None:
    """SGLang has no key but ours, from wherever it came. Raises ConfigError, without the key."""
    expected = None if plan.inner_key is None else plan.inner_key.value
    for name in ("api_key", "admin_api_key"):
        if getattr(arguments, name) != expected:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"write {flag} in full, on the command line")
    if plan.inner_key is not None and arguments.enable_response_store:
        raise ConfigError(
            "--enable-response-store keeps answers for whoever names their id, whatever their key: "
            "leave it out, or serve without keys"
        )


def unknown_adapters(ring: KeyRing, known: Collection[str]) -> Iterator[str]:
    """A warning for each key that may use what no adapter is called. One may be loaded later."""
    for caller in ring.callers:
        unknown = sorted((caller.adapters or frozenset()) - set(known))
        if unknown:
            yield (
                f"key {caller.name!r} may use {', '.join(_with_nearest(n, known) for n in unknown)}"
                ": no adapter has the name now; correct the keys file, or load one of that name"
            )


def _with_nearest(name: str, known: Collection[str]) -> str:
    near = nearest(name, sorted(known))
    return f"{name!r} (did you mean {near[0]!r}?)" if near else repr(name)


def forget(plan: AccessPlan) -> None:
    """Take the keys out of the environment, which every child process would inherit."""
    for name in plan.forgotten:
        os.environ.pop(name, None)
