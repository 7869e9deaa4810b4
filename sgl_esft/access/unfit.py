"""Values that a route turns out not to be able to use: the client's error, not the server's.

SGLang's route --ValueError--> [answer_unfit] --> 400

SGLang checks some values where it uses them, and not all of its routes say so to the client: a
parser that there is not, a prompt longer than the context. The text is not passed on, since it may
repeat what the client sent; the log has it.
"""

from __future__ import annotations

import logging

from fastapi import Request
from fastapi.responses import Response

from sgl_esft.access.answers import error_json
from sgl_esft.errors import BadBodyError

logger = logging.getLogger(__name__)

_UNFIT = BadBodyError(
    "the route cannot use a value of the body or of the address, or the prompt and the tokens that "
    "were asked for are more than the model's context; GET /openapi.json describes the values"
)


async def answer_unfit(request: Request, error: Exception) -> Response:
    """FastAPI's handler of a ValueError that no route has caught: 400 BadBodyError."""
    path = request.scope["path"]
    logger.warning("%s refused a value: %s", path, type(error).__name__, exc_info=error)
    content = error_json(_UNFIT)
    return Response(content, status_code=_UNFIT.http_status, media_type="application/json")
