"""Where a rank takes a request in: one that it cannot take ends alone, with an error.

    SGLang's front -> [end_it_alone: SGLang makes a request of it, checks it, queues it] -> a batch
                             '--it raised--> 500 for this request; the rank goes on

SGLang makes a request of what a client sent on every rank, and whatever that raises ends the
engine. The table of fields (sgl_esft/fields) refuses what is known to; this is for what is not.
Ranks of a group raise alike, since they were sent alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

logger = logging.getLogger(__name__)

_MESSAGE: Final = (
    "the engine cannot take this request ({error}): it was ended alone, the server's log says why; "
    "leave out what is unusual in it, and report it"
)


def end_it_alone(
    original: Callable[..., None], scheduler: Any, recv_req: Any, *, mm_input_error: Any = None
) -> None:
    """SGLang's intake; what it raises is the request's end, not the rank's."""
    try:
        original(scheduler, recv_req, mm_input_error=mm_input_error)
    except Exception as error:
        logger.exception("a request cannot be taken in, and is ended: id %s", recv_req.rid)
        _forget(scheduler, recv_req.rid)
        from sgl_esft import sglang_api

        sglang_api.fail_request(scheduler, recv_req, _MESSAGE.format(error=type(error).__name__))


def _forget(scheduler: Any, rid: str) -> None:
    """It may have been queued before it raised."""
    waiting = scheduler.waiting_queue
    waiting[:] = [each for each in waiting if each.rid != rid]
