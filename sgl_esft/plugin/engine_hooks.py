"""Hooks on the way of a request through SGLang's TokenizerManager, in the process that serves HTTP.

HTTP request -> [note_prompt, note_sequences] -> record.py
engine's outputs -> [observe_output] -> request_metrics.py
"""

from __future__ import annotations

from typing import Any

from sgl_esft.http import record
from sgl_esft.observe.request_metrics import RequestMetrics

_metrics: RequestMetrics | None = None


def use(metrics: RequestMetrics | None) -> None:
    """Where outputs are counted from now on."""
    global _metrics
    _metrics = metrics


def note_sequences(result: None, manager: Any, obj: Any, request: Any = None) -> None:
    """After SGLang has made the states of a request's sequences."""
    found = record.current()
    if found is not None:
        ids = obj.rid if isinstance(obj.rid, list) else [obj.rid]
        found.sequences += [manager.rid_to_state[each] for each in ids]


def note_prompt(
    result: Any,
    manager: Any,
    obj: Any,
    input_text: Any,
    input_ids: Any,
    input_embeds: Any = None,
    mm_inputs: Any = None,
    token_type_ids: Any = None,
) -> None:
    """After SGLang has tokenized one prompt."""
    found = record.current()
    if found is not None and input_ids is not None:
        found.prompt_tokens += len(input_ids)


def observe_output(manager: Any, state: Any, recv_obj: Any, i: int) -> None:
    """Before SGLang counts one sequence's outputs; it does so only with --enable-metrics."""
    if _metrics is not None:
        _metrics.observe_output(state, recv_obj, i)
