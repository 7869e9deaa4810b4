"""Ask a running server for its memory report.

address -> [fetch_report] -> MemoryReport
"""

from __future__ import annotations

from typing import Final

from sgl_esft.errors import ServerAnswerError
from sgl_esft.memory_report import MemoryReport
from sgl_esft.server_client import ServerAddress, call

ROUTE: Final = "/v1/memory"


def fetch_report(server: ServerAddress) -> MemoryReport:
    """GET the report. Raises as `call`, and ServerAnswerError for what is not a memory report."""
    answer = call(server, "GET", ROUTE)
    if answer is None:
        raise ServerAnswerError(f"{server.url}{ROUTE} answers with nothing.")
    return MemoryReport.from_json(answer)
