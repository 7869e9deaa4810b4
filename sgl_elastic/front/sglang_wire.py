"""SGLang's own messages and sockets, as the router uses them. The one file that names them.

Imported in the process that serves HTTP.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    LoadLoRAAdapterReqInput,
    PauseGenerationReqInput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    UnloadLoRAAdapterReqInput,
    sock_send,
)
from sglang.srt.managers.load_snapshot import LoadSnapshot, ShmLoadSnapshotReader
from sglang.srt.observability.req_time_stats import APIServerReqTimeStats
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.network import get_zmq_socket

from sgl_elastic.errors import ElasticError, EngineFailedError
from sgl_elastic.instance.rank_messages import PAUSE_TO_PARK
from sgl_elastic.instance.state import Instance

_BATCHES = (BatchTokenizedGenerateReqInput, BatchTokenizedEmbeddingReqInput)
_SINGLES = (TokenizedGenerateReqInput, TokenizedEmbeddingReqInput)
_WARM_UP_TOKENS = 8

# Type of a control message -> the communicator that asked with one last. One asks at a time.
_asking: dict[type, Any] = {}


def note_who_asks(
    _: None, communicator: Any, send: Callable[[Any], None], fan_out: int, mode: str = "queueing"
) -> None:
    """Of a new FanOutCommunicator, which message is whose is known from now on."""

    def ask(message: Any) -> None:
        _asking[type(message)] = communicator
        communicator.asked_last = type(message)
        send(message)

    communicator._send = ask


def read_loads(directory: Path, instance: Instance) -> list[LoadSnapshot]:
    """The loads of an instance's ranks on this machine, by rank."""
    path = directory / f"{instance.instance_id}.loads"
    reader = ShmLoadSnapshotReader(str(path), instance.num_ranks)
    try:
        found: list[LoadSnapshot] = reader.read_all()
    finally:
        reader.close()
    return found


class SglangWire:
    """`Wire` of router.py."""

    def __init__(self) -> None:
        self._context = zmq.Context(2)
        self._answers: Any = None  # to the tokenizer manager

    def open(self, address: str) -> Any:
        return get_zmq_socket(self._context, zmq.PUSH, address, True)

    def close(self, socket: Any) -> None:
        socket.close(linger=0)

    def answer_at(self, address: str) -> None:
        """Where the tokenizer manager hears of outputs."""
        self._answers = get_zmq_socket(self._context, zmq.PUSH, address, False)

    def fail(self, rid: str, error: ElasticError) -> None:
        """The client's answer is this error, as if a scheduler had refused the request."""
        message = f"{type(error).__name__}: {error}"
        reason = {"type": "abort", "message": message, "status_code": error.http_status}
        sock_send(self._answers, AbortReq(rid=rid, finished_reason=reason))

    def send(self, socket: Any, message: Any) -> None:
        try:
            # An instance that has ended has no peer here, and a send would wait for one for ever.
            sock_send(socket, message, zmq.NOBLOCK)
        except zmq.Again:
            raise EngineFailedError("nobody takes requests there: the instance has ended") from None

    def expect_answers(self, message: Any) -> None:
        """Answers of all present ranks; those of ranks that are lost do not count."""
        if self.is_waiting(message):
            communicator = _asking[type(message)]
            communicator._result_fan_out = communicator._fan_out
            communicator._result_values.clear()

    def is_waiting(self, message: Any) -> bool:
        """Whether who sent it still waits for answers, and has asked nothing else since."""
        communicator = _asking.get(type(message))
        return (
            communicator is not None
            and communicator._result_event is not None
            and not communicator._result_event.is_set()
            and communicator.asked_last is type(message)
        )

    def is_changing_adapters(self) -> bool:
        changes = (LoadLoRAAdapterReqInput, UnloadLoRAAdapterReqInput)
        asking = [_asking[change] for change in changes if change in _asking]
        return any(communicator._queueing_lock.locked() for communicator in asking)

    def is_request(self, message: Any) -> bool:
        return isinstance(message, (*_BATCHES, *_SINGLES))

    def is_adapter_change(self, message: Any) -> bool:
        return isinstance(message, LoadLoRAAdapterReqInput | UnloadLoRAAdapterReqInput)

    def singles(self, message: Any) -> Sequence[Any]:
        return list(message) if isinstance(message, _BATCHES) else [message]

    def with_rank(self, request: Any, rank: int) -> Any:
        routed = copy.copy(request)
        routed.routed_dp_rank = rank
        return routed

    def pause(self) -> Any:
        return PauseGenerationReqInput(mode="retract", rid=PAUSE_TO_PARK)

    def warm_up(self, rid: str, rank: int) -> Any:
        sampling = SamplingParams(max_new_tokens=2, temperature=0.0, ignore_eos=True)
        sampling.normalize(None)
        request = TokenizedGenerateReqInput(
            rid=f"{HEALTH_CHECK_RID_PREFIX}-{rid}",
            input_text="",
            input_ids=array("q", [1] * _WARM_UP_TOKENS),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
            routed_dp_rank=rank,
        )
        request.time_stats = APIServerReqTimeStats()
        request.wrap_pickle_fields()
        return request
