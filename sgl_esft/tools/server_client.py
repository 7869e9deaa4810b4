"""Ask a running server for its memory report.

address -> [fetch_report] -> MemoryReport
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any, Final

from sgl_esft import env
from sgl_esft.errors import ConfigError, EsftError, ServerAnswerError, ServerUnreachableError
from sgl_esft.formats.strict_json import MAX_JSON_BYTES, JsonObject, parse_object
from sgl_esft.memory.report import MemoryReport

ROUTE: Final = "/v1/memory"


def fetch_report(server: ServerAddress) -> MemoryReport:
    """GET the report. Raises as `call`, and ServerAnswerError for what is not a memory report."""
    answer = call(server, "GET", ROUTE)
    if answer is None:
        raise ServerAnswerError(f"{server.url}{ROUTE} answers with nothing.")
    return MemoryReport.from_json(answer)


# One request of a command line tool to a running server.
#
#     memory_client.py, adapters_cli.py -> [call] -> HTTP -> the answer's body
#
# Needs neither SGLang nor the extension module.

_DEFAULT_URL: Final = "http://127.0.0.1:30000"


@dataclass(frozen=True)
class ServerAddress:
    """Where a server is, and the key to show it."""

    url: str
    timeout_s: float
    key: str | None = field(default=None, repr=False)


def add_flags(parser: argparse.ArgumentParser, timeout_s: float) -> None:
    """The flags that say which server."""
    parser.add_argument("--url", default=_DEFAULT_URL, help="the server; default: %(default)s")
    parser.add_argument(
        "--key",
        help="the server's admin key; `ps` shows it to other users, the environment variable "
        f"{env.KEY} does not",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=timeout_s,
        metavar="S",
        help="seconds; default: %(default)s",
    )


def read_flags(arguments: argparse.Namespace) -> ServerAddress:
    """Raises ConfigError."""
    if not 0 < arguments.timeout < math.inf:
        raise ConfigError(f"--timeout is {arguments.timeout}, not a positive number of seconds.")
    if not arguments.url.startswith(("http://", "https://")):
        raise ConfigError(f"--url is {arguments.url!r}, not an address such as {_DEFAULT_URL}.")
    key = arguments.key or env.key()
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError("--key is not printable ASCII, so no server has such a key.")
    return ServerAddress(arguments.url.rstrip("/"), arguments.timeout, key)


def call(server: ServerAddress, method: str, path: str, body: Any = None) -> JsonObject | None:
    """The JSON object that the server answers with; None for one without a body to DELETE.

    Raises ConfigError for an address that cannot be used, ServerUnreachableError when nothing
    answers within the time, and ServerAnswerError for an error or for what is no JSON object.
    """
    address = server.url + path
    raw = _exchange(_request(server, method, address, body), server.timeout_s)
    if len(raw) > MAX_JSON_BYTES:
        raise ServerAnswerError(f"{address} answers with more than {MAX_JSON_BYTES} bytes.")
    if not raw and method == "DELETE":
        return None
    return parse_object(raw, f"the answer of {address}", ServerAnswerError)


def _request(server: ServerAddress, method: str, address: str, body: Any) -> urllib.request.Request:
    request = urllib.request.Request(address, method=method)
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    if server.key is not None:
        request.add_header("Authorization", f"Bearer {server.key}")
    return request


def _exchange(request: urllib.request.Request, timeout_s: float) -> bytes:
    address = request.full_url
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            body: bytes = answer.read(MAX_JSON_BYTES + 1)
            return body
    except urllib.error.HTTPError as error:
        with error:
            raise _refused(address, error) from error
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", error)
        raise ServerUnreachableError(
            f"nothing answers at {address} ({reason}): is the server up, and --url right?"
        ) from error
    except http.client.InvalidURL as error:
        raise ConfigError(f"--url {address!r} cannot be used: {error}.") from error
    except (http.client.HTTPException, ValueError) as error:
        raise ServerAnswerError(f"{address} does not speak HTTP: {error!r}.") from error


def _refused(address: str, error: urllib.error.HTTPError) -> ServerAnswerError:
    said = _message(error.read(MAX_JSON_BYTES))
    return ServerAnswerError(
        f"{address} answers with HTTP {error.code}: {said or _hint(error.code)}"
    )


def _message(raw: bytes) -> str | None:
    """What an error's body of ours says."""
    try:
        error = parse_object(raw, "the answer", ServerAnswerError).get("error")
    except EsftError:
        return None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return None
    return f"{error.get('type')}: {error['message']}"


def _hint(status: int) -> str:
    if status == 404:
        return "it is not a server of this package, or an older one."
    if status in (401, 403):
        return f"give the admin key, by --key or {env.KEY}."
    return "look into the server's log."
