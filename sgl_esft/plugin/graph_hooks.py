"""What a breakable decode graph answers: SGLang's backend knows tensors, a model gives a record.

    capture: a model's LogitsProcessorOutput --[flatten]--> tensors, which SGLang gives a buffer
    replay:  the buffer's tensors --[fill]--> LogitsProcessorOutput, as of a graph of a whole step

Only with --expert-cache on an accelerator, whose decode graphs have breaks (tier_waves.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from sgl_esft.errors import UnsupportedModelError

_FORMS = "esft_output_forms"  # of SGLang's backend: graph's key -> OutputForm


@dataclass(frozen=True)
class OutputForm:
    """A record without its tensors: who kept those would keep a graph's memory."""

    bare: Any
    names: tuple[str, ...]  # of the fields that are tensors

    def fill(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """The record, with these."""
        return replace(self.bare, **dict(zip(self.names, tensors, strict=True)))


def flatten(output: Any) -> tuple[OutputForm, tuple[torch.Tensor, ...]]:
    """A record's form and its tensors. Raises UnsupportedModelError for what is neither."""
    known = {field.name: getattr(output, field.name) for field in fields(output)}
    tensors = {name: value for name, value in known.items() if isinstance(value, torch.Tensor)}
    others = [name for name in known.keys() - tensors if known[name] is not None]
    if others:
        raise UnsupportedModelError(
            f"decode graphs with --expert-cache: a step answers with {', '.join(sorted(others))}, "
            "which was not shown; use --cuda-graph-backend-decode disabled"
        )
    bare = replace(output, **dict.fromkeys(tensors))
    return OutputForm(bare, tuple(tensors)), tuple(tensors.values())


def capture_tensors(
    original: Callable[..., None],
    backend: Any,
    shape_key: Any,
    forward_fn: Callable[[], Any],
    capture_inputs: Any = None,
    post_warmup_hook: Any = None,
) -> None:
    """`BreakableCudaGraphBackend.capture_one`, of a forward that answers with a record."""
    from sgl_esft import sglang_api

    forms = vars(backend).setdefault(_FORMS, {})

    def forward() -> Any:
        output = forward_fn()
        if not isinstance(output, sglang_api.logits_record):
            return output
        forms[shape_key], tensors = flatten(output)
        return tensors

    original(backend, shape_key, forward, capture_inputs, post_warmup_hook)


def replay_record(
    original: Callable[..., Any],
    backend: Any,
    shape_key: Any,
    static_forward_batch: Any,
    **kwargs: Any,
) -> Any:
    """`BreakableCudaGraphBackend.replay`, which answers as the captured forward did."""
    found = original(backend, shape_key, static_forward_batch, **kwargs)
    form = vars(backend).get(_FORMS, {}).get(shape_key)
    return found if form is None else form.fill(found)
