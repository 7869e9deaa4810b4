"""Serve the page's files: each has a path of its own, and no path comes from a client.

    static/* --read once, at start--> Page(bytes, ETag) --> [add_routes] --> 200, 304

No build step and no other host: the policy that comes with every file lets a browser load scripts,
styles and data from this server only, and keeps scripts from making HTML out of text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

ROOT_PATH: Final = "/dashboard"
_STATIC: Final = resources.files(__package__) / "static"
_MEDIA_TYPES: Final[Mapping[str, str]] = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

# URL path -> file in static/, all that is there.
FILES: Final[Mapping[str, str]] = {
    ROOT_PATH if file.name == "page.html" else f"{ROOT_PATH}/{file.name}": file.name
    for file in sorted(_STATIC.iterdir(), key=lambda file: file.name)
}

POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Final[Mapping[str, str]] = {
    "Cache-Control": "no-cache",  # kept, and asked for again each time: see ETag
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Page:
    """One file as it is sent."""

    body: bytes
    media_type: str

    @property
    def etag(self) -> str:
        """Changes with the content."""
        return f'"{hashlib.sha256(self.body).hexdigest()[:32]}"'


def read_pages() -> Mapping[str, Page]:
    """URL path -> file, all of FILES."""
    return {
        path: Page((_STATIC / name).read_bytes(), _MEDIA_TYPES[name.rpartition(".")[2]])
        for path, name in FILES.items()
    }


def add_routes(app: Any) -> None:
    """Add the page to a FastAPI or Starlette application; GET and HEAD, not in its OpenAPI page."""
    for path, page in read_pages().items():
        app.add_route(path, _endpoint(page), methods=["GET"], include_in_schema=False)


def _endpoint(page: Page) -> Endpoint:
    headers = {**HEADERS, "ETag": page.etag}

    async def answer(request: Request) -> Response:
        if page.etag in _etags(request.headers.get("if-none-match", "")):
            return Response(status_code=304, headers=headers)
        return Response(page.body, headers=headers, media_type=page.media_type)

    return answer


def _etags(header: str) -> frozenset[str]:
    """The tags of an If-None-Match header; weak ones count, as RFC 9110 says."""
    return frozenset(tag.strip().removeprefix("W/") for tag in header.split(","))
