"""What a question about the ranks' state makes them do, between two steps."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.managers.io_struct import GetInternalStateReq

from sgl_esft import sglang_api
from sgl_esft.errors import HeatOffError
from sgl_esft.plugin import heat_hooks, memory_hooks
from sgl_esft.weave.heat import HeatSampler
from tests.support.memory_reports import padded_device


class Rank:
    """One scheduler, and the tokenizer manager that asks it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, counts: bool = True) -> None:
        self.made: list[str] = []  # reports
        self.heat = HeatSampler((1, 2), 1, 4, 1, dict, "cpu") if counts else None
        for name, answer in (
            ("adapter_manager", SimpleNamespace(plane=None, heat=self.heat, tiers=None, lora=None)),
            ("tp_rank", 0),
            ("device_of", None),
            ("kv_memory", None),
        ):
            monkeypatch.setattr(sglang_api, name, lambda *_, answer=answer: answer)
        monkeypatch.setattr(sglang_api, "gather_bytes", lambda data: [data])
        monkeypatch.setattr(
            memory_hooks, "required_config", lambda: SimpleNamespace(expert_memory="padded")
        )
        monkeypatch.setattr(memory_hooks, "measure_device", self.measure)
        report = HeatSampler.report
        monkeypatch.setattr(HeatSampler, "report", lambda heat: self.note("heat") or report(heat))

    def note(self, what: str) -> None:
        self.made.append(what)

    def measure(self, *_: Any) -> Any:
        self.note("memory")
        return padded_device(rank=0)

    def auto_create_handle_loop(self) -> None:
        pass

    async def get_internal_state_communicator(self, question: Any) -> list[Any]:
        """By the wire's format to the rank, and back."""
        arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(question), type=type(question))
        reply = SimpleNamespace(internal_state={"world_size": 1})
        return [memory_hooks.add_report(reply, None, arrived)]


def test_a_memory_report_makes_no_heat_report(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    report = asyncio.run(memory_hooks.fetch_report(rank))
    assert [device.rank for device in report.devices] == [0]
    assert rank.made == ["memory"]


def test_a_heat_report_measures_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    assert asyncio.run(heat_hooks.fetch_heat(rank))["layers"] == [1, 2]
    assert rank.made == ["heat"]


def test_sglangs_own_question_makes_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    (reply,) = asyncio.run(rank.get_internal_state_communicator(GetInternalStateReq()))
    assert (reply.internal_state, rank.made) == ({"world_size": 1}, [])


def test_heat_that_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HeatOffError, match="--heat-every"):
        asyncio.run(heat_hooks.fetch_heat(Rank(monkeypatch, counts=False)))
