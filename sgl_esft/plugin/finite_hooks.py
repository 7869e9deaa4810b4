"""Logits that are not finite end the requests that they belong to, and no others.

    model -> logits -> [zero_what_is_not_finite] -> SGLang samples -> tokens
                            '--which rows--> logits_output --> [end_not_finite] -> abort

Finite weights can still overflow: a row of logits then holds a NaN or +inf, or nothing but -inf.
Sampling from such a row raises, which ends the engine; an argmax of it would be an answer that
nobody computed. The rows are found by one reduction on the logits' device, without waiting for it,
and are sampled from zeros; when the step's results are read, their requests end with an error.
All ranks of a tensor parallel group have the same logits, and so end the same requests.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import torch

from sgl_esft.errors import LogitsNotFiniteError

logger = logging.getLogger(__name__)

_ROWS: Final = "sgl_esft_not_finite"  # of SGLang's logits_output: bool[num_rows] on their device
_MESSAGE: Final = (
    f"{LogitsNotFiniteError.__name__}: the model's logits for this request are not finite, so "
    "there is no answer: the weights of {whose} overflow in the model's dtype; look at how they "
    "were trained"
)


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
            sglang_api.end_request(req, _MESSAGE.format(whose=whose))


def _has_logits(result: Any) -> bool:
    return getattr(result, "logits_output", None) is not None
