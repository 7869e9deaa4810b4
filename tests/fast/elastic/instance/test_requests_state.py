"""A running request, from SGLang's own Req to another one of the same message."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_elastic.engine import requests
from sgl_elastic.instance.rank_messages import RequestState

PROMPT = [5, 6, 7]
COUNTERS = {
    "decoded_text": "so far",
    "send_token_offset": 3,
    "send_decode_id_offset": 2,
    "send_output_token_logprobs_offset": 3,
    "input_logprob_sent": True,
    "cached_tokens": 11,
    "cached_tokens_device": 9,
    "_cache_breakdown_computed": True,
    "reasoning_tokens": 4,
    "_is_reasoning_over": True,
    "_think_end_match_len": 1,
}
LOGPROBS = {
    "output_token_logprobs_val": [-0.5, -1.5, -2.5],
    "output_token_logprobs_idx": [40, 41, 42],
    "output_top_logprobs_val": [[-0.5, -0.75], [-1.5, -2.0], [-2.5, -3.0]],
    "output_top_logprobs_idx": [[40, 1], [41, 2], [42, 3]],
    "input_token_logprobs_val": [None, -0.25, -0.125],
    "input_token_logprobs_idx": [5, 6, 7],
}
SEEN = array("q", [40, 41, 42])
STATE = RequestState("a", SEEN.tobytes(), len(SEEN), {}, {})  # its rank was lost


class FakeGrammar:
    def __init__(self) -> None:
        self.accepted: list[int] = []

    def accept_token(self, token_id: int) -> None:
        self.accepted.append(token_id)


def new_request(*, return_logprob: bool = True) -> Req:
    """As the scheduler makes one of a client's message."""
    return Req(
        rid="a",
        origin_input_text="",
        origin_input_ids=array("q", PROMPT),
        sampling_params=SamplingParams(max_new_tokens=9),
        return_logprob=return_logprob,
        vocab_size=100,
    )


def running_request(*, return_logprob: bool = True) -> Req:
    req = new_request(return_logprob=return_logprob)
    req.output_ids.extend([40, 41, 42])
    for name, value in COUNTERS.items():
        setattr(req, name, value)
    if return_logprob:
        for name, values in LOGPROBS.items():
            setattr(req.logprob, name, values)
    return req


def over_the_wire(state: RequestState) -> RequestState:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=RequestState)


def test_sglang_has_every_field_that_is_handed_over() -> None:
    req = new_request()
    assert set(COUNTERS) == set(requests._FIELDS)
    assert [name for name in requests._FIELDS if not hasattr(req, name)] == []
    assert [name for name in requests._LOGPROB_LISTS if not hasattr(req.logprob, name)] == []


@pytest.mark.parametrize("return_logprob", [True, False])
def test_a_request_goes_on_where_it_was(return_logprob: bool) -> None:
    old = running_request(return_logprob=return_logprob)
    state = over_the_wire(requests.state_of(old))
    assert (state.rid, state.num_sent) == ("a", 3)
    new = new_request(return_logprob=return_logprob)
    requests.restore(new, state)
    assert new.output_ids == old.output_ids
    assert {name: getattr(new, name) for name in COUNTERS} == COUNTERS
    for name in requests._LOGPROB_LISTS:
        assert getattr(new.logprob, name) == getattr(old.logprob, name), name
    assert new.is_retracted
    assert new.retracted_stain
    assert new.seqlen == old.seqlen == 6


def test_a_state_is_a_copy_and_restored_tokens_can_be_appended_to() -> None:
    """SGLang extends the array that it finds in the request."""
    req, new = running_request(), new_request()
    state = requests.state_of(req)
    req.output_ids.append(99)
    req.logprob.output_token_logprobs_val.append(-9.0)
    assert state.output_ids == SEEN.tobytes()
    assert state.lists["output_token_logprobs_val"] == [-0.5, -1.5, -2.5]
    requests.restore(new, state)
    new.output_ids.append(43)
    assert requests.state_of(new).output_ids == array("q", [40, 41, 42, 43]).tobytes()


@pytest.mark.parametrize("state", [STATE, requests.state_of(running_request())])
def test_a_grammar_hears_the_tokens_again(state: RequestState) -> None:
    new = new_request()
    new.grammar = FakeGrammar()
    requests.restore(new, state)
    assert new.grammar.accepted == [40, 41, 42]
    new.grammar = object()  # a future: it is still compiled, and left alone
    requests.restore(new, state)
    assert list(new.output_ids) == [40, 41, 42]


# ---- a request whose rank was lost: the prompt, and the tokens that came by ----


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
    if return_logprob:
        assert req.input_logprob_sent
        req.logprob.output_token_logprobs_val.append(-0.5)
        sent = req.send_output_token_logprobs_offset
        assert req.logprob.output_token_logprobs_val[sent:] == [-0.5]
        assert req.logprob.output_top_logprobs_val is not req.logprob.output_top_logprobs_idx
