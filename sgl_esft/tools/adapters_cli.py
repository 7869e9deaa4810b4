"""`sgl-esft adapters`: the adapters of a running server, from a shell.

cli.py -> [run] -> server_client.call -> /v1/adapters
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias
from urllib.parse import quote

from sgl_esft.errors import ConfigError, ServerAnswerError
from sgl_esft.tools import server_client
from sgl_esft.tools.server_client import ServerAddress, call

_EXIT_OK: Final = 0
_ROUTE: Final = "/v1/adapters"
_TIMEOUT_S: Final = 600.0  # a load is waited for
_ACTIONS: Final = ("list", "load", "unload", "pin", "unpin", "replace")
_COLUMNS: Final = ("NAME", "STATE", "PINNED", "EXPERTS", "MIB", "SLOTS", "USES", "FOLDER")

Answer: TypeAlias = Mapping[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `sgl-esft adapters`."""
    parser.add_argument(
        "action", choices=_ACTIONS, nargs="?", default="list", help="default: %(default)s"
    )
    parser.add_argument("name", nargs="?", help="the adapter; not for list")
    parser.add_argument(
        "--path",
        metavar="DIR",
        help="load, replace: the folder on the server's machine (default: the one that it knows)",
    )
    parser.add_argument("--pinned", action="store_true", help="load: never evict it")
    parser.add_argument("--json", action="store_true", help="print the server's JSON")
    server_client.add_flags(parser, _TIMEOUT_S)


def run(arguments: argparse.Namespace) -> int:
    """Ask, print."""
    _check(arguments)
    answer = _ask(server_client.read_flags(arguments), arguments)
    if arguments.json:
        print(json.dumps(answer))
    elif answer is None:
        print(f"{arguments.name} is unloaded")
    else:
        listed = answer.get("adapters", [answer])
        if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            raise ServerAnswerError(f"{arguments.url}{_ROUTE} answers with something else.")
        print("\n".join(table(listed)))
    return _EXIT_OK


def _check(arguments: argparse.Namespace) -> None:
    action = arguments.action
    if (arguments.name is None) != (action == "list"):
        raise ConfigError(
            "list takes no name." if arguments.name else f"{action} needs an adapter's name."
        )
    if arguments.path is not None and action not in ("load", "replace"):
        raise ConfigError(f"--path is for load and replace, not for {action}.")
    if arguments.pinned and action != "load":
        raise ConfigError(f"--pinned is for load, not for {action}.")


def _ask(server: ServerAddress, arguments: argparse.Namespace) -> Answer | None:
    action, name = arguments.action, arguments.name
    folder = {} if arguments.path is None else {"path": arguments.path}
    if action == "list":
        return call(server, "GET", _ROUTE)
    if action == "load":
        body = {"name": name, "pinned": arguments.pinned, **folder}
        return call(server, "POST", f"{_ROUTE}?wait=true", body)
    route = f"{_ROUTE}/{quote(name, safe='')}?wait=true"
    if action == "unload":
        return call(server, "DELETE", route)
    if action == "replace":
        return call(server, "PATCH", route, folder or {"reload": True})
    return call(server, "PATCH", route, {"pinned": action == "pin"})


def table(adapters: Sequence[Answer]) -> list[str]:
    """One line an adapter, below the names of the columns; what is wrong with it beneath."""
    rows = [_COLUMNS, *map(_row, adapters)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row, adapter in zip(rows, [{}, *adapters], strict=True):
        lines.append("  ".join(map(str.ljust, row, widths)).rstrip())
        error = adapter.get("error")
        if isinstance(error, dict):
            lines.append(f"  {error.get('type')}: {error.get('message')}")
    return lines


def _row(adapter: Answer) -> tuple[str, ...]:
    num_bytes, experts = adapter.get("num_bytes"), adapter.get("num_experts")
    slots = sorted({place["adapter_slot"] for place in adapter.get("devices", ())})
    state = str(adapter.get("state"))
    load = adapter.get("load")
    if isinstance(load, dict):
        state += f" ({load['phase']} {load['progress']:.0%})"
    return (
        str(adapter.get("name")),
        state + ("*" if adapter.get("changed_on_disk") else ""),
        "yes" if adapter.get("pinned") else "no",
        "-" if experts is None else str(experts),
        "-" if num_bytes is None else f"{num_bytes / 2**20:.1f}",
        ",".join(map(str, slots)) or "-",
        str(adapter.get("num_references", 0)),
        str(adapter.get("folder", "")),
    )
