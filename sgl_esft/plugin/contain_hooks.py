"""What one request does to a rank stays with it: it ends with an error, and no other does.

    SGLang's front -> [end_it_alone: SGLang makes a request of it, checks it, queues it] -> a batch
                             '--it raised--> 500 for this request; the rank goes on
    model -> logits -> [zero_what_is_not_finite] -> SGLang samples -> tokens
                            '--which rows--> logits_output --> [end_not_finite] -> abort

SGLang makes a request of what a client sent on every rank, and whatever that raises ends the
engine. The table of fields (sgl_esft/fields) refuses what is known to; this is for what is not.

Finite weights can still overflow: a row of logits then holds a NaN or +inf, or nothing but -inf.
Sampling from such a row raises, which ends the engine; an argmax of it would be an answer that
nobody computed. A grammar that no token can follow leaves such a row, too. The rows are found by
one reduction on the logits' device, without waiting for it, and are sampled from zeros; when the
step's results are read, their requests end with an error.

Ranks of a group are sent the same requests and have the same logits, and so end the same requests.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

import torch

from sgl_esft.errors import LogitsNotFiniteError, NothingToSampleError

logger = logging.getLogger(__name__)

_CANNOT_TAKE: Final = (
    "the engine cannot take this request ({error}): it was ended alone, the server's log says why; "
    "leave out what is unusual in it, and report it"
)
_GREATEST: Final = "sgl_esft_greatest"  # of SGLang's logits_output: [num_rows] on their device
_NOT_FINITE: Final = (
    f"{LogitsNotFiniteError.__name__}: the model's logits for this request are not finite, so "
    "there is no answer: the weights of {whose} overflow in the model's dtype; look at how they "
    "were trained"
)
_NOTHING_LEFT: Final = (
    f"{NothingToSampleError.__name__}: what the request asks for (a grammar, a schema, biases) "
    "leaves no token to go on with; ask for something that has an answer"
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

        sglang_api.fail_request(
            scheduler, recv_req, _CANNOT_TAKE.format(error=type(error).__name__)
        )


def _forget(scheduler: Any, rid: str) -> None:
    """It may have been queued before it raised."""
    waiting = scheduler.waiting_queue
    waiting[:] = [each for each in waiting if each.rid != rid]


def zero_what_is_not_finite(sampler: Any, logits_output: Any, *_: Any, **__: Any) -> None:
    """Before SGLang samples: float[num_rows, vocab_size], rows are changed in place."""
    logits = logits_output.next_token_logits
    if logits is None or logits.shape[0] == 0:
        return
    greatest = logits.amax(dim=-1)  # a NaN is the greatest of its row
    logits.masked_fill_(~torch.isfinite(greatest).unsqueeze(-1), 0.0)
    vars(logits_output)[_GREATEST] = greatest


def end_not_finite(scheduler: Any, batch: Any, result: Any) -> None:
    """Before SGLang takes a step's tokens: the requests of these rows end with this step."""
    output = getattr(result, "logits_output", None)
    greatest = None if output is None else vars(output).get(_GREATEST)
    if greatest is None:
        return
    if result.copy_done is not None:  # with overlap, another stream may still be at this step
        result.copy_done.synchronize()
    for req, value in zip(batch.reqs, greatest.tolist(), strict=False):
        if not (math.isfinite(value) or req.finished() or _is_no_answer(scheduler, req)):
            _end(scheduler, req, value)


def _is_no_answer(scheduler: Any, req: Any) -> bool:
    """The logits of a prompt's earlier chunks are nobody's answer.

    But where an expert could not be read they show that the chunk's KV is of no use.
    """
    from sgl_esft import sglang_api

    return req.inflight_middle_chunks > 0 and not sglang_api.has_tiers(scheduler)


def _end(scheduler: Any, req: Any, greatest: float) -> None:
    """A row of nothing but -inf is what a mask has left: the request's doing, not the model's."""
    from sgl_esft import sglang_api

    if greatest == -math.inf:
        sglang_api.end_request(req, _NOTHING_LEFT, NothingToSampleError.http_status)
        return
    unread = sglang_api.unread_experts(scheduler)
    if unread is not None:
        sglang_api.end_request(req, unread, HTTPStatus.SERVICE_UNAVAILABLE)
        return
    whose = _whose(scheduler, req.lora_id)
    logger.error("request %s ends: the logits of %s are not finite", req.rid, whose)
    message = _NOT_FINITE.format(whose=whose)
    sglang_api.end_request(req, message, LogitsNotFiniteError.http_status)


def _whose(scheduler: Any, adapter_id: str | None) -> str:
    if adapter_id is None:
        return "the base model"
    from sgl_esft import sglang_api

    return f"adapter {sglang_api.adapter_name(scheduler, adapter_id)!r}"
