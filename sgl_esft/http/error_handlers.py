"""Errors that no route has caught: whose they are, and what is answered.

SGLang's route --ValueError--> [answer_invalid_value] --of SGLang's own code--> 400
                                     '--of ours--> [answer_defect] --> 500, traceback in the log

SGLang checks some values where it uses them, and not all of its routes say so to the client: a
parser that there is not, a prompt longer than the context. The text is not passed on, since it may
repeat what the client sent; the log has it. A ValueError of this package is a defect here.
"""

from __future__ import annotations

import logging
import traceback

from fastapi import Request
from fastapi.responses import Response

from sgl_esft.errors import BadBodyError, EsftError, InternalError
from sgl_esft.http.answers import as_response

logger = logging.getLogger(__name__)

_SGLANG = "sglang"
_OURS = frozenset({"sgl_esft", "sgl_elastic", "sgl_esft_kernels"})
_UNFIT = BadBodyError(
    "the route cannot use a value of the body or of the address, or the prompt and the tokens that "
    "were asked for are more than the model's context; GET /openapi.json describes the values"
)
_DEFECT = InternalError(
    "the server has failed at this request, which is a defect: its log says where; please report it"
)


async def answer_invalid_value(request: Request, error: Exception) -> Response:
    """FastAPI's handler of a ValueError: 400 BadBodyError. Raises what is no client's error."""
    if isinstance(error, EsftError):  # of a hook: a ValueError too, so that SGLang's routes know it
        return as_response(error)
    if not _is_of_sglang(error):
        raise error
    path = request.scope["path"]
    logger.warning("%s refused a value: %s", path, type(error).__name__, exc_info=error)
    return as_response(_UNFIT)


async def answer_defect(request: Request, error: Exception) -> Response:
    """FastAPI's handler of everything else: 500 InternalError.

    Starlette raises the error again behind the answer, and the web server logs its traceback.
    """
    return as_response(_DEFECT)


def _is_of_sglang(error: Exception) -> bool:
    """Whether SGLang's code raised it, or what that called, for a route of SGLang's.

    Frames of FastAPI and the standard library do not count: they do what one of the two asked for.
    """
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    packages = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames]
    known = [package for package in packages if package == _SGLANG or package in _OURS]
    return bool(known) and known[0] == known[-1] == _SGLANG
