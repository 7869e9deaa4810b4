"""Ask a running server for its memory report.

    URL -> [fetch_report] -> MemoryReport

In: an address such as http://127.0.0.1:30000. Needs neither SGLang nor the extension module.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from typing import Final

from sgl_esft.errors import ConfigError, ServerAnswerError, ServerUnreachableError
from sgl_esft.memory_report import MemoryReport
from sgl_esft.strict_json import MAX_JSON_BYTES, parse_object

ROUTE: Final = "/v1/memory"


def fetch_report(url: str, timeout_s: float) -> MemoryReport:
    """GET the report from the server at `url`.

    Raises ConfigError for something that is no http address, ServerUnreachableError when nothing
    answers within the time, and ServerAnswerError when the answer is not a memory report.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url is {url!r}, not an address such as http://127.0.0.1:30000.")
    address = url.rstrip("/") + ROUTE
    body = _get(address, timeout_s)
    if len(body) > MAX_JSON_BYTES:
        raise ServerAnswerError(f"{address} answers with more than {MAX_JSON_BYTES} bytes.")
    return MemoryReport.from_json(parse_object(body, f"the answer of {address}", ServerAnswerError))


def _get(address: str, timeout_s: float) -> bytes:
    try:
        with urllib.request.urlopen(address, timeout=timeout_s) as answer:
            body: bytes = answer.read(MAX_JSON_BYTES + 1)
            return body
    except urllib.error.HTTPError as error:
        with error:
            raise ServerAnswerError(
                f"{address} answers with HTTP {error.code}: {_hint(error.code)}"
            ) from error
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", error)
        raise ServerUnreachableError(
            f"nothing answers at {address} ({reason}): is the server up, and --url right?"
        ) from error
    except http.client.InvalidURL as error:
        raise ConfigError(f"--url {address!r} cannot be used: {error}.") from error
    except (http.client.HTTPException, ValueError) as error:
        raise ServerAnswerError(f"{address} does not speak HTTP: {error!r}.") from error


def _hint(status: int) -> str:
    if status == 404:
        return "it is not a server of this package, or an older one."
    return "look into the server's log."
