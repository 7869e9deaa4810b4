"""Hook functions on the way of a request's tokens from HTTP to the scheduler.

tokens of a prompt -> [refuse_empty] -> SGLang's own checks -> scheduler
"""

from __future__ import annotations

from collections.abc import Sized

from sgl_esft.errors import EmptyPromptError


def refuse_empty(manager: object, obj: object, input_ids: Sized | None) -> None:
    """Before SGLang's checks. Raises EmptyPromptError, which SGLang answers as a ValueError."""
    if input_ids is not None and len(input_ids) == 0:
        raise EmptyPromptError("the prompt has no tokens: send at least one")
