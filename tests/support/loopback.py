"""A server on a loopback socket, and handlers that speak JSON.

[served(server)] --thread--> server.serve_forever() --> JsonHandler.do_*
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

Server = TypeVar("Server", bound=ThreadingHTTPServer)


@contextmanager
def served(server: Server) -> Iterator[Server]:
    """Serve on a thread, until the block ends."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def url_of(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


class JsonHandler(BaseHTTPRequestHandler):
    """Reads and sends JSON, and logs nothing."""

    def log_message(self, *_: object) -> None:
        pass

    def read_json(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        return body

    def send_json(self, status: int, reply: Any) -> None:
        self.send_bytes(status, json.dumps(reply).encode())

    def send_bytes(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def send_events(self, events: Iterable[dict[str, Any]]) -> None:
        """A stream of server-sent events, as SGLang's."""
        self.send_response(200)
        self.end_headers()
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")
