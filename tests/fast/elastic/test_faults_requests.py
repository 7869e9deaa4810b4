"""A request whose rank was lost, in a new rank: the prompt, and the tokens that came by."""

from __future__ import annotations

from array import array

import pytest

from sgl_elastic.engine import requests
from sgl_elastic.instance.rank_messages import RequestState
from tests.fast.elastic.instance.test_requests_state import (
    PROMPT,
    FakeGrammar,
    new_request,
    over_the_wire,
)

SEEN = array("q", [40, 41, 42])
STATE = RequestState("a", SEEN.tobytes(), len(SEEN), {}, {})


@pytest.mark.parametrize("return_logprob", [False, True])
def test_only_later_tokens_are_sent(return_logprob: bool) -> None:
    req = new_request(return_logprob=return_logprob)
    requests.restore(req, over_the_wire(STATE))
    assert list(req.output_ids) == list(SEEN)
    assert req.send_token_offset == req.send_output_token_logprobs_offset == 3
    assert req.is_retracted
    req.output_ids.append(43)
    decode_ids, _ = req.init_incremental_detokenize()
    assert list(decode_ids[req.send_decode_id_offset :]) == [43], "the detokenizer has the others"
    assert list(decode_ids) == [*PROMPT, 40, 41, 42, 43]
    assert list(req.output_ids[req.send_token_offset :]) == [43]


def test_log_probabilities_go_on_behind_those_that_were_sent() -> None:
    req = new_request()
    requests.restore(req, STATE)
    assert req.input_logprob_sent
    req.logprob.output_token_logprobs_val.append(-0.5)
    sent = req.send_output_token_logprobs_offset
    assert req.logprob.output_token_logprobs_val[sent:] == [-0.5]
    assert req.logprob.output_top_logprobs_val is not req.logprob.output_top_logprobs_idx


def test_a_grammar_is_advanced() -> None:
    req = new_request(return_logprob=False)
    req.grammar = FakeGrammar()
    requests.restore(req, STATE)
    assert req.grammar.accepted == list(SEEN)
