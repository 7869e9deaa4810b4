"""The state of a running request, taken from one rank and given to another.

    retracted Req --> [state_of] --> RequestState --> front --> [restore] --> new Req in its queue
    rank lost: prompt, tokens that came by --> front --> RequestState without fields --> [restore]

A handed-over request is what SGLang calls retracted: its prompt, the tokens it has emitted, and
counters of what was sent. The new rank computes from prompt + emitted tokens, mostly found in the
prefix cache, and goes on.
"""

from __future__ import annotations

from array import array
from typing import Any

from sgl_elastic.instance.rank_messages import RequestState

# SGLang's names. What a client sent travels with its own request; offsets into the prompt are
# worked out again from it.
_FIELDS = (
    "decoded_text",
    "send_token_offset",
    "send_decode_id_offset",
    "send_output_token_logprobs_offset",
    "input_logprob_sent",
    "cached_tokens",
    "cached_tokens_device",
    "_cache_breakdown_computed",
    "reasoning_tokens",
    "_is_reasoning_over",
    "_think_end_match_len",
)
_LOGPROB_LISTS = (
    "output_token_logprobs_val",
    "output_token_logprobs_idx",
    "output_top_logprobs_val",
    "output_top_logprobs_idx",
    "output_token_ids_logprobs_val",
    "output_token_ids_logprobs_idx",
    "input_token_logprobs_val",
    "input_token_logprobs_idx",
    "input_top_logprobs_val",
    "input_top_logprobs_idx",
    "input_token_ids_logprobs_val",
    "input_token_ids_logprobs_idx",
)


def state_of(req: Any) -> RequestState:
    """Everything a retracted request needs to go on elsewhere."""
    logprob = req.logprob
    lists = {name: getattr(logprob, name, None) for name in _LOGPROB_LISTS}
    return RequestState(
        rid=req.rid,
        output_ids=array("q", req.output_ids).tobytes(),
        num_sent=int(req.send_token_offset),
        fields={name: getattr(req, name) for name in _FIELDS},
        lists={name: list(value) for name, value in lists.items() if value is not None},
    )


def restore(req: Any, state: RequestState) -> None:
    """Make a new request the one that `state` was taken of; it must not have run yet."""
    output_ids = array("q")
    output_ids.frombytes(state.output_ids)
    req.output_ids = output_ids
    for name, value in state.fields.items():
        setattr(req, name, value)
    for name, values in state.lists.items():
        setattr(req.logprob, name, values)
    if not state.fields:
        _as_sent(req)
    req.is_retracted = True
    req.retracted_stain = True
    _advance_grammar(req, output_ids)


def _as_sent(req: Any) -> None:
    """All of its tokens have reached the front: the state of a request whose rank was lost."""
    num_sent = len(req.output_ids)
    decode_ids, _ = req.init_incremental_detokenize()
    req.send_token_offset = req.send_output_token_logprobs_offset = num_sent
    req.send_decode_id_offset = len(decode_ids)
    if not req.return_logprob:
        return
    req.input_logprob_sent = True
    for name in _LOGPROB_LISTS:
        if name.startswith("output_"):  # what was sent is not sent again: only its length counts
            setattr(req.logprob, name, [None] * num_sent)


def _advance_grammar(req: Any, output_ids: array[int]) -> None:
    grammar = req.grammar
    if grammar is None or not hasattr(grammar, "accept_token"):
        return
    for token_id in output_ids:
        grammar.accept_token(token_id)
