"""What a request's headers say: how large they are, the Host it asked for, the page that asks.

A browser sends any page's requests to this machine's servers. Without keys only pages and names of
this machine are answered, so that a page from elsewhere cannot use a server that listens on
loopback, not even by giving its own name this machine's address.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from urllib.parse import urlsplit

from sgl_esft.errors import (
    AmbiguousLengthError,
    BadBodyError,
    HeadersTooLargeError,
    NotAllowedError,
)
from sgl_esft.http.answers import Headers, header_values

MAX_HEADERS = 100
MAX_HEADER_BYTES = 16 << 10
ANY_ORIGIN = "*"
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(:[0-9]{1,5})?")


def is_loopback(host: str) -> bool:
    """Whether a name or address can only mean this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_headers(headers: Headers) -> None:
    """Raises HeadersTooLargeError, AmbiguousLengthError."""
    if len(headers) > MAX_HEADERS:
        raise HeadersTooLargeError(f"a request may have {MAX_HEADERS} headers")
    if sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
        raise HeadersTooLargeError(f"a request's headers may have {MAX_HEADER_BYTES} bytes")
    if header_values(headers, b"transfer-encoding") and header_values(headers, b"content-length"):
        raise AmbiguousLengthError(
            "a request has Content-Length or Transfer-Encoding, not both (RFC 9112, 6.3): a proxy "
            "in front may see another end of it"
        )


def check_host(headers: Headers, *, has_keys: bool) -> None:
    """Raises BadBodyError for what is no host, NotAllowedError for a foreign one without keys.

    None at all, as old probes of load balancers send, will do where keys are asked for: then the
    host decides nothing.
    """
    hosts = header_values(headers, b"host")
    are_enough = len(hosts) == 1 or (has_keys and not hosts)
    if not are_enough or any(not _HOST.fullmatch(host) for host in hosts):
        raise BadBodyError("the Host header must be one host, with or without a port")
    if not has_keys and not all(is_loopback(_HOST.sub(r"\1", host)) for host in hosts):
        raise NotAllowedError(
            "a server without keys answers to this machine's own names only: start it with "
            "--api-keys-file or --api-key"
        )


def check_origin(headers: Headers, allowed: Collection[str]) -> None:
    """Raises NotAllowedError for a page that is neither ours, this machine's nor allowed."""
    for origin in header_values(headers, b"origin"):
        if ANY_ORIGIN in allowed or origin in allowed or _is_local(origin, headers):
            continue
        raise NotAllowedError("web pages of this origin are not allowed: see --allowed-origins")


def check_site(headers: Headers, allowed: Collection[str], *, has_keys: bool) -> None:
    """Raises NotAllowedError for a foreign page's image or link, which comes without an Origin.

    Only where no key is asked for: a page cannot give one to an image or a link.
    """
    if has_keys or ANY_ORIGIN in allowed or header_values(headers, b"origin"):
        return
    if "cross-site" in header_values(headers, b"sec-fetch-site"):
        raise NotAllowedError("images and links of other web pages are not allowed here")


def _is_local(origin: str, headers: Headers) -> bool:
    try:
        parts = urlsplit(origin)
        host = parts.hostname
    except ValueError:
        return False
    if parts.scheme not in ("http", "https") or host is None:
        return False
    return is_loopback(host) or parts.netloc in header_values(headers, b"host")
