"""Hook functions on the way of a request's tokens from HTTP to the scheduler.

tokens of a prompt -> [refuse_empty] -> SGLang's own checks -> scheduler
"""

from __future__ import annotations

from collections.abc import Sized


def refuse_empty(manager: object, obj: object, input_ids: Sized | None) -> None:
    """Before SGLang's checks. Raises ValueError, which SGLang answers with 400."""
    if input_ids is not None and len(input_ids) == 0:
        raise ValueError("the prompt has no tokens: send at least one")
