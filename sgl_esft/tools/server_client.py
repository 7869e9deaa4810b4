"""One request of a command line tool to a running server.

memory_cli.py, adapters_cli.py -> [call] -> HTTP -> the answer's body

Needs neither SGLang nor the extension module.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from sgl_esft import env
from sgl_esft.errors import ConfigError, EsftError, ServerAnswerError, ServerUnreachableError
from sgl_esft.formats.strict_json import MAX_JSON_BYTES, JsonObject, parse_object

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
    raw = _exchange(server, method, address, body)
    if len(raw) > MAX_JSON_BYTES:
        raise ServerAnswerError(f"{address} answers with more than {MAX_JSON_BYTES} bytes.")
    if not raw and method == "DELETE":
        return None
    return parse_object(raw, f"the answer of {address}", ServerAnswerError)


def _exchange(server: ServerAddress, method: str, address: str, body: Any) -> bytes:
    headers = {"Accept-Encoding": "identity"}  # so that what is read is what is counted
    if server.key is not None:
        headers["Authorization"] = f"Bearer {server.key}"
    options: dict[str, Any] = {"timeout": server.timeout_s, "follow_redirects": True}
    try:
        with httpx.stream(method, address, json=body, headers=headers, **options) as answer:
            raw = _read(answer)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigError(f"--url {address!r} cannot be used: {error}.") from error
    except (httpx.ProtocolError, httpx.TooManyRedirects) as error:
        raise ServerAnswerError(f"{address} does not speak HTTP: {error!r}.") from error
    except httpx.TransportError as error:
        raise ServerUnreachableError(
            f"nothing answers at {address} ({error}): is the server up, and --url right?"
        ) from error
    if answer.is_success:
        return raw
    said = _message(raw) or _hint(answer.status_code)
    raise ServerAnswerError(f"{address} answers with HTTP {answer.status_code}: {said}")


def _read(answer: httpx.Response) -> bytes:
    """Its body, or a little more of it than is allowed."""
    raw = bytearray()
    for chunk in answer.iter_raw():
        raw += chunk
        if len(raw) > MAX_JSON_BYTES:
            break
    return bytes(raw)


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
