"""A request whose adapter a rank does not have is refused there, and the rank goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_esft.plugin.schedule_hooks import refuse_unknown_adapter


class FakeScheduler:
    """SGLang's scheduler, as far as the hook goes; its manager has one adapter."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        manager = SimpleNamespace(has=lambda adapter_id: adapter_id == "here")
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=manager))
        self.output_streamer = SimpleNamespace(
            stream_output=lambda reqs, return_logprob: self.sent.extend(reqs)
        )


def request(adapter_id: str | None) -> Any:
    return SimpleNamespace(lora_id=adapter_id, return_logprob=False, finished_reason=None)


@pytest.mark.parametrize("adapter_id", [None, "here"])
@pytest.mark.parametrize("answer", [False, True])
def test_others_are_sglangs_to_judge(adapter_id: str | None, answer: bool) -> None:
    scheduler, req = FakeScheduler(), request(adapter_id)
    assert refuse_unknown_adapter(lambda *_: answer, scheduler, req) is answer
    assert scheduler.sent == []


def test_one_without_its_adapter_is_answered_with_an_error() -> None:
    scheduler, req = FakeScheduler(), request("gone")
    assert not refuse_unknown_adapter(lambda *_: pytest.fail("asked"), scheduler, req)
    assert scheduler.sent == [req]
    reason = req.finished_reason.to_json()
    assert reason["type"] == "abort"
    assert reason["status_code"] == 400
    assert "UnknownAdapterError" in reason["message"]
