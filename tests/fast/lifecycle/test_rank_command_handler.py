"""Two ranks that carry out commands side by side: reading in the background, one common answer."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sgl_esft import errors
from sgl_esft.config import EsftConfig
from sgl_esft.formats.model_spec import read_moe_spec
from sgl_esft.lifecycle import staging
from sgl_esft.lifecycle.commands import RankCommand, Verb, decode, is_command
from sgl_esft.lifecycle.rank_command_handler import RankCommandHandler, RankGroup
from sgl_esft.weave.plane import AdapterSource
from tests.support.random_layers import Rank
from tests.support.woven_device import Device

NUM_RANKS = 2
TIMEOUT_S = 20.0


class Ranks:
    """Both ranks get every message; each on a thread of its own, as processes would."""

    def __init__(self, root: Path, *, is_resident: bool, max_adapters: int = 2) -> None:
        config = EsftConfig(max_adapters, max_experts_per_adapter=2)
        spec = read_moe_spec(root / "base")
        self._meeting = threading.Barrier(NUM_RANKS, timeout=TIMEOUT_S)
        self._told: dict[int, bytes] = {}
        self._pool = ThreadPoolExecutor(NUM_RANKS)
        self.devices = [
            Device(spec, config, Rank(ep_rank=r, ep_size=NUM_RANKS), is_resident=is_resident)
            for r in range(NUM_RANKS)
        ]
        self.handlers = [
            RankCommandHandler(
                device.plane, RankGroup(rank, lambda told, r=rank: self._gather(r, told))
            )
            for rank, device in enumerate(self.devices)
        ]
        self.at_first = self.snapshot()

    def _gather(self, rank: int, told: bytes) -> list[bytes]:
        self._told[rank] = told
        self._meeting.wait()
        found = [self._told[r] for r in range(NUM_RANKS)]
        self._meeting.wait()
        return found

    def ask(self, verb: Verb, folder: Path | None = None, *, adapter_id: str = "id") -> Any:
        path = "" if folder is None else str(folder)
        command = RankCommand(verb, adapter_id, "math", path)
        replies = list(self._pool.map(lambda handler: handler.answer(command), self.handlers))
        assert replies[0] == replies[1]
        return replies[0]

    def take_in(self, folder: Path, *, adapter_id: str = "id") -> None:
        source = AdapterSource(adapter_id, "math", str(folder))
        list(self._pool.map(lambda handler: handler.take_in(source), self.handlers))

    def stage(self, folder: Path, *, adapter_id: str = "id") -> Any:
        self.ask("stage", folder, adapter_id=adapter_id)
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            state = self.ask("poll", adapter_id=adapter_id)
            if state["is_read"] or state["error"]:
                return state
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def check(self, folder: Path, *, adapter_id: str = "id") -> None:
        for device in self.devices:
            device.check(folder, adapter_id)
            device.check_mapped_slots()
            device.plane.check_integrity()

    def snapshot(self) -> list[object]:
        return [device.snapshot() for device in self.devices]


@pytest.mark.parametrize("is_resident", [False, True])
def test_an_adapter_comes_in_pieces(root: Path, is_resident: bool) -> None:
    ranks = Ranks(root, is_resident=is_resident)
    state = ranks.stage(root / "math")
    assert state["num_bytes_read"] == state["num_bytes"] > 0
    num_layers = len(ranks.devices[0].layers)
    for num_placed in range(num_layers):
        assert ranks.ask("place")["layers_placed"] == num_placed
    state = ranks.ask("place")
    assert (state["layers_placed"], state["num_layers"]) == (num_layers, num_layers)
    ranks.take_in(root / "math")
    ranks.check(root / "math")


def test_what_is_published_early_is_complete(root: Path) -> None:
    ranks = Ranks(root, is_resident=False)
    ranks.stage(root / "math")
    ranks.ask("place")
    ranks.take_in(root / "math")
    ranks.check(root / "math")
    ranks.take_in(root / "law", adapter_id="unstaged")
    ranks.check(root / "law", adapter_id="unstaged")
    ranks.ask("stage", root / "code", adapter_id="third")
    ranks.take_in(root / "code", adapter_id="third")  # waits for the reader
    for device in ranks.devices:
        device.plane.ensure_on_device(["third"])
    ranks.check(root / "code", adapter_id="third")


@pytest.mark.parametrize("num_pieces", [0, 1, 2, 50])
def test_what_is_dropped_leaves_nothing(root: Path, num_pieces: int) -> None:
    ranks = Ranks(root, is_resident=False)
    ranks.stage(root / "math")
    for _ in range(num_pieces):
        ranks.ask("place")
    ranks.ask("drop")
    assert ranks.snapshot() == ranks.at_first
    assert not ranks.ask("poll")["is_known"]


def test_a_batch_may_take_the_slot_of_what_is_half_placed(root: Path) -> None:
    ranks = Ranks(root, is_resident=False, max_adapters=1)
    for device in ranks.devices:
        device.load(root / "law")
        device.plane.stay_on_host("law")
    ranks.stage(root / "math")
    ranks.ask("place")
    ranks.ask("place")
    for device in ranks.devices:
        device.plane.ensure_on_device(["law"])
    state = ranks.ask("place")
    assert state["layers_placed"] == state["num_layers"]
    ranks.check(root / "law", adapter_id="law")
    ranks.take_in(root / "math")
    assert ranks.devices[0].slots() == {"law": 0}


def no_page(*_: object) -> None:
    raise errors.OutOfExpertMemoryError("no page")


@pytest.mark.parametrize("is_resident", [False, True])
def test_a_rank_without_pages_decides_for_all(
    root: Path, is_resident: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(root, is_resident=is_resident)
    ranks.stage(root / "math")
    ranks.ask("place")
    last = list(ranks.devices[1].layers.values())[-1]
    place = last.place

    monkeypatch.setattr(last, "place", no_page)
    states = [ranks.ask("place") for _ in ranks.devices[0].layers]
    assert bool(states[-1]["error"]) is is_resident
    assert [device.slots() for device in ranks.devices] == [{}, {}]
    monkeypatch.setattr(last, "place", place)
    if is_resident:
        assert states[-1]["error"] == "OutOfExpertMemoryError: no page"
        assert ranks.snapshot() == ranks.at_first
    else:
        ranks.take_in(root / "math")
        for device in ranks.devices:
            device.plane.ensure_on_device(["id"])
        ranks.check(root / "math")


@pytest.mark.parametrize("num_pieces", [None, 0, 1])
def test_a_rank_that_cannot_take_it_in_speaks_for_all(
    root: Path, num_pieces: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(root, is_resident=True)
    if num_pieces is not None:
        ranks.stage(root / "math")
        for _ in range(num_pieces):
            ranks.ask("place")

    last = list(ranks.devices[1].layers.values())[-1]
    monkeypatch.setattr(last, "place", no_page)
    source = AdapterSource("id", "math", str(root / "math"))
    for told in [ranks._pool.submit(handler.take_in, source) for handler in ranks.handlers]:
        with pytest.raises(errors.OutOfExpertMemoryError, match="no page"):
            told.result(TIMEOUT_S)
    assert ranks.snapshot() == ranks.at_first


def test_a_pin_that_is_refused_leaves_the_adapter(root: Path) -> None:
    ranks = Ranks(root, is_resident=False)
    for name in ("math", "law"):
        ranks.take_in(root / name, adapter_id=name)
    before = ranks.snapshot()
    for name, error in (("math", None), ("law", errors.NoFreeSlotError)):
        source = AdapterSource(name, name, str(root / name), pinned=True)
        for told in [ranks._pool.submit(handler.take_in, source) for handler in ranks.handlers]:
            assert type(told.exception(TIMEOUT_S)) is (error or type(None))
    assert ranks.snapshot() == before


def test_a_reader_that_fails_is_an_error_of_its_load(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(root, is_resident=False)
    assert ranks.stage(root / "nowhere")["error"].startswith("AdapterPathError: ")

    def die(*_: object) -> None:
        raise MemoryError("no host memory")

    monkeypatch.setattr(os, "preadv", die)
    error = ranks.stage(root / "math")["error"]
    assert error.startswith("InvariantError: adapter 'math' could not be read: MemoryError")
    ranks.ask("drop")
    assert ranks.snapshot() == ranks.at_first


def test_a_new_stage_drops_the_one_before(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(root, is_resident=False)
    go_on = threading.Event()
    read = os.preadv

    def slowly(*args: Any) -> int:
        go_on.wait(TIMEOUT_S)
        return read(*args)

    monkeypatch.setattr(os, "preadv", slowly)
    ranks.ask("stage", root / "math")
    while not ranks.ask("poll")["num_bytes"]:
        time.sleep(0.01)
    before = [handler._stager.find("id") for handler in ranks.handlers]
    ranks.ask("stage", root / "law", adapter_id="law")
    go_on.set()
    assert not ranks.ask("poll")["is_known"]
    readers = [stage for stage in before if stage is not None and stage.num_bytes]
    assert readers  # one rank may have none of its experts
    for stage in readers:
        assert stage.is_over.wait(TIMEOUT_S)
        assert (stage.adapter, stage.error) == (None, None)


def test_the_reader_yields(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "setpriority", lambda *args: told.append(args))
    names: list[int] = []
    stager = staging.Stager(lambda *_: names.append(threading.get_native_id()))  # type: ignore[arg-type,return-value]
    stager.start(AdapterSource("id", "math", "nowhere"))
    with pytest.raises(errors.InvariantError, match="left nothing"):
        stager.take("id")
    assert told == [(os.PRIO_PROCESS, names[0], 19)]
    assert names[0] != threading.get_native_id()


def test_a_report_says_who_is_where(root: Path) -> None:
    ranks = Ranks(root, is_resident=False)
    ranks.stage(root / "math")
    ranks.take_in(root / "math")
    for device in ranks.devices:
        device.plane.ensure_on_device(["id"])
        device.plane.ensure_on_device(["id"])
    reports = ranks.ask("report")
    assert [report["rank"] for report in reports] == [0, 1]
    for report, device in zip(reports, ranks.devices, strict=True):
        slot, num_bytes = report["slots"]["id"]
        assert slot == device.slots()["id"]
        assert num_bytes == sum(
            len(layer.adapter_runs[slot]) * (layer.w13[0].nbytes + layer.w2[0].nbytes)
            for layer in device.layers.values()
        )
        assert (report["num_hits"], report["num_misses"], report["num_evictions"]) == (1, 0, 0)


def test_commands_are_no_paths_of_clients() -> None:
    command = RankCommand("stage", "id", "math", "/folder", pinned=True)
    assert is_command(command.encode())
    assert decode(command.encode()) == command
    assert not is_command("/folder/esft-command:")
    assert not is_command(None)
    with pytest.raises(errors.InvariantError, match="is not a command"):
        decode("esft-command:{")
    with pytest.raises(errors.InvariantError, match="is not a command"):
        decode('esft-command:{"verb": "poll", "x": 1}')
