"""What one request does to a rank stays with it: it ends with an error, and no other does.

    SGLang's front -> [end_it_alone: SGLang makes a request of it, checks it, queues it] -> a batch
                             '--it raised--> 500 for this request; the rank goes on
    model -> logits -> [zero_what_is_not_finite] -> SGLang samples -> tokens
                            '--which rows--> logits_output --> [end_not_finite] -> abort

SGLang makes a request of what a client sent on every rank, and whatever that raises ends the
engine. The table of fields (sgl_esft/fields) refuses what is known to; this is for what is not.

Finite weights can still overflow: a row of logits then holds a NaN or +inf, or nothing but -inf.
Sampling from such a row raises, which ends the engine; an argmax of it would be an answer that
nobody computed. The rows are found by one reduction on the logits' device, without waiting for it,
and are sampled from zeros; when the step's results are read, their requests end with an error.

Ranks of a group are sent the same requests and have the same logits, and so end the same requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import torch

from sgl_esft.errors import LogitsNotFiniteError

logger = logging.getLogger(__name__)

_CANNOT_TAKE: Final = (
    "the engine cannot take this request ({error}): it was ended alone, the server's log says why; "
    "leave out what is unusual in it, and report it"
)
_ROWS: Final = "sgl_esft_not_finite"  # of SGLang's logits_output: bool[num_rows] on their device
_NOT_FINITE: Final = (
    f"{LogitsNotFiniteError.__name__}: the model's logits for this request are not finite, so "
    "there is no answer: the weights of {whose} overflow in the model's dtype; look at how they "
    "were trained"
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
    rows = not_finite(logits)
    logits.masked_fill_(rows.unsqueeze(-1), 0.0)
    vars(logits_output)[_ROWS] = rows


def not_finite(logits: torch.Tensor) -> torch.Tensor:
    """Rows that cannot be sampled from. A NaN is the greatest of its row; -inf may be a mask."""
    return ~torch.isfinite(logits.amax(dim=-1))


def end_not_finite(scheduler: Any, batch: Any, result: Any) -> None:
    """Before SGLang takes a step's tokens: the requests of these rows end with this step."""
    rows = vars(result.logits_output).get(_ROWS) if _has_logits(result) else None
    if rows is None:
        return
    if result.copy_done is not None:  # with overlap, another stream may still be at this step
        result.copy_done.synchronize()
    for req, is_bad in zip(batch.reqs, rows.tolist(), strict=False):
        # The logits of a prompt's earlier chunks are nobody's answer.
        if is_bad and not req.finished() and req.inflight_middle_chunks <= 0:
            from sgl_esft import sglang_api

            whose = "its adapter" if req.lora_id else "the base model"
            logger.error("request %s ends: the logits of %s are not finite", req.rid, whose)
            sglang_api.end_request(req, _NOT_FINITE.format(whose=whose))


def _has_logits(result: Any) -> bool:
    return getattr(result, "logits_output", None) is not None
