"""Rows of logits that cannot be sampled from are found, zeroed, and end their requests alone."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_esft.plugin import contain_hooks

NAN, INF = float("nan"), float("inf")
GOOD = [[0.0, 1.0, -2.0], [-INF, 3.0, -INF]]  # a grammar's mask
NOTHING = [-INF, -INF, -INF]
BAD = [[NAN, 1.0, 2.0], [INF, 1.0, 2.0], NOTHING, [-INF, NAN, -INF], [INF, NAN, -INF]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_found_and_zeroed(dtype: torch.dtype) -> None:
    given = torch.tensor([*GOOD, *BAD], dtype=dtype)
    output = LogitsProcessorOutput(next_token_logits=given.clone())
    contain_hooks.zero_what_is_not_finite(None, output)
    assert torch.equal(output.next_token_logits[:2], given[:2])
    assert not output.next_token_logits[2:].any()


def test_their_requests_end_with_this_step() -> None:
    reqs = [request(str(number)) for number in range(3)]
    output = LogitsProcessorOutput(next_token_logits=torch.tensor([GOOD[0], BAD[0], GOOD[1]]))
    contain_hooks.zero_what_is_not_finite(None, output)
    contain_hooks.end_not_finite(RANK, SimpleNamespace(reqs=reqs), result_of(output))
    assert [req.to_finish is not None for req in reqs] == [False, True, False]
    bad = reqs[1]
    bad.output_ids.append(0)
    bad.update_finish_state()
    assert bad.finished_reason.to_json()["status_code"] == 500
    assert "LogitsNotFiniteError" in bad.finished_reason.to_json()["message"]
    assert list(bad.output_ids_through_stop) == [], "the token that nobody computed"


@pytest.mark.parametrize("manager", ["woven", "of SGLang"])
@pytest.mark.parametrize(
    ("adapter_id", "whose"), [(None, "the base model"), ("id-7", "adapter 'math'")]
)
def test_the_error_names_whose_weights_overflow(
    adapter_id: str | None, whose: str, manager: str
) -> None:
    req = request("0", adapter_id)
    batch = SimpleNamespace(reqs=[req])
    output = LogitsProcessorOutput(next_token_logits=torch.tensor([BAD[0]]))
    contain_hooks.zero_what_is_not_finite(None, output)
    contain_hooks.end_not_finite(rank_with(MANAGERS[manager]), batch, result_of(output))
    assert f"the weights of {whose} overflow" in req.to_finish.to_json()["message"]


def test_a_mask_that_leaves_nothing_is_the_requests_doing() -> None:
    req = request("0")
    output = LogitsProcessorOutput(next_token_logits=torch.tensor([NOTHING]))
    contain_hooks.zero_what_is_not_finite(None, output)
    contain_hooks.end_not_finite(RANK, SimpleNamespace(reqs=[req]), result_of(output))
    ended = req.to_finish.to_json()
    assert ended["status_code"] == 400
    assert ended["message"].startswith("NothingToSampleError")


def test_rows_are_read_when_their_step_has_ended() -> None:
    """With overlap they are another stream's until its event: here it fills them in."""
    req = request("0")
    output = LogitsProcessorOutput(next_token_logits=torch.tensor([GOOD[0]]))
    contain_hooks.zero_what_is_not_finite(None, output)
    greatest = vars(output)["sgl_esft_greatest"]
    done = SimpleNamespace(synchronize=lambda: greatest.fill_(NAN))
    contain_hooks.end_not_finite(RANK, SimpleNamespace(reqs=[req]), result_of(output, done))
    assert req.to_finish is not None


def test_a_chunk_before_the_last_ends_nothing() -> None:
    req = request("0")
    req.inflight_middle_chunks = 1
    output = LogitsProcessorOutput(next_token_logits=torch.tensor([BAD[0]]))
    contain_hooks.zero_what_is_not_finite(None, output)
    contain_hooks.end_not_finite(RANK, SimpleNamespace(reqs=[req]), result_of(output))
    assert req.to_finish is None


UNREAD = "ExpertReadError: model.safetensors gave 7 of 4096 bytes at byte 0"


@pytest.mark.parametrize("num_middle_chunks", [0, 1])
def test_what_could_not_be_read_is_named_and_not_kept(num_middle_chunks: int) -> None:
    """Where experts are in tiers: a chunk before the last ends too, since its KV is of no use."""
    rank = rank_with(SimpleNamespace(tiers=SimpleNamespace(failure=UNREAD)))
    req = request("0")
    req.inflight_middle_chunks = num_middle_chunks
    output = LogitsProcessorOutput(next_token_logits=torch.tensor([BAD[0]]))
    contain_hooks.zero_what_is_not_finite(None, output)
    contain_hooks.end_not_finite(rank, SimpleNamespace(reqs=[req]), result_of(output))
    ended = req.to_finish.to_json()
    assert (ended["status_code"], ended["message"]) == (503, UNREAD)
    assert req.skip_radix_cache_insert


def test_weights_that_overflow_in_tiers_are_called_that() -> None:
    rank = rank_with(SimpleNamespace(tiers=SimpleNamespace(failure=None)))
    req = request("0")
    output = LogitsProcessorOutput(next_token_logits=torch.tensor([BAD[0]]))
    contain_hooks.zero_what_is_not_finite(None, output)
    contain_hooks.end_not_finite(rank, SimpleNamespace(reqs=[req]), result_of(output))
    assert req.to_finish.to_json()["message"].startswith("LogitsNotFiniteError")


def test_results_without_logits_are_left() -> None:
    contain_hooks.end_not_finite(RANK, SimpleNamespace(reqs=[]), SimpleNamespace())
    nothing = result_of(LogitsProcessorOutput(next_token_logits=None))
    contain_hooks.zero_what_is_not_finite(None, nothing.logits_output)
    contain_hooks.end_not_finite(RANK, SimpleNamespace(reqs=[]), nothing)


def result_of(output: LogitsProcessorOutput, copy_done: object = None) -> Any:
    return SimpleNamespace(logits_output=output, copy_done=copy_done)


MANAGERS = {  # what sits in LoRA's place
    "woven": SimpleNamespace(name_of={"id-7": "math"}.get),
    "of SGLang": SimpleNamespace(lora_refs={"id-7": SimpleNamespace(lora_name="math")}),
}


def rank_with(manager: object) -> Any:
    runner = SimpleNamespace(lora_manager=manager)
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))


RANK = rank_with(None)  # plain SGLang


def request(rid: str, adapter_id: str | None = None) -> Any:
    parameters = SamplingParams(max_new_tokens=4)
    return Req(rid, "", array("q", [1]), parameters, vocab_size=3, lora_id=adapter_id)
