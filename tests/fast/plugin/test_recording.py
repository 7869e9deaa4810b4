"""A rank's routing as a trace: what its layers saw, whose it was, and what changed in between."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sgl_esft import sglang_api
from sgl_esft.config import RecordConfig
from sgl_esft.offload.routing import NO_OWNER
from sgl_esft.offload.trace import SlotChange, TraceStep, read_header_of, read_trace
from sgl_esft.plugin import recording
from sgl_esft.plugin.adapter_owners import owner_number
from sgl_esft.plugin.decoded_tokens import DecodedTokens
from sgl_esft.plugin.recording import Recorder, trace_folder
from sgl_esft.weave.batch_tags import BatchTags
from sgl_esft.weave.plane import AdapterPlane, AdapterSource
from tests.fast.offload.test_tiered_layer import CONFIG, woven

HIDDEN = 16


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(50, HIDDEN)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "FLUSH_PERIOD_S", 0.01)
    monkeypatch.setattr(sglang_api, "rank_in_server", lambda: 0)
    monkeypatch.setattr(sglang_api, "is_dp_attention", lambda: False)
    monkeypatch.setattr(sglang_api, "routers", lambda model: iter(()))


def batch(rids: list[str], *, is_decode: bool) -> Any:
    mode = SimpleNamespace(is_decode=lambda: is_decode)
    return SimpleNamespace(forward_mode=mode, rids=rids)


class Pass:
    """Forward passes of a model that does nothing but route."""

    def __init__(self, folder: Path, plane: AdapterPlane) -> None:
        self.plane = plane
        self.model = Model()
        self.tags = BatchTags(64, "cpu")
        decoded = DecodedTokens(self.model, HIDDEN)
        config = RecordConfig(str(folder), 1 << 30)
        self.recorder = Recorder(config, plane, self.tags, decoded, self.model, 2)

    @torch.no_grad()
    def run(self, rids: list[str], slots: list[int], seed: int, *, is_decode: bool) -> torch.Tensor:
        random = torch.Generator().manual_seed(seed)
        self.tags.set(torch.tensor(slots, dtype=torch.int32))
        self.recorder.begin(batch(rids, is_decode=is_decode), slots)
        self.model.embed_tokens(torch.arange(len(slots)))
        ids = torch.randint(0, 8, (len(self.plane.layers), len(slots), 2), generator=random)
        for index, layer_id in enumerate(self.plane.layers):
            logits = torch.randn((len(slots), 8), generator=random)
            output = SimpleNamespace(topk_ids=ids[index], router_logits=logits)
            self.recorder.watch(layer_id)(output)
        return ids


def events(folder: Path, count: int) -> list[Any]:
    for _ in range(300):
        found = list(read_trace(folder))
        if len(found) >= count:
            return found
        time.sleep(0.01)
    raise AssertionError(f"{len(found)} of {count} events")


def test_steps_are_as_the_layers_saw_them(root: Path, tmp_path: Path) -> None:
    with woven(root / "base", 4) as (_, plane):
        server = Pass(tmp_path / "trace", plane)
        prompt = server.run(["a"], [-1, -1, -1], 1, is_decode=False)
        decoded = server.run(["a", "b"], [-1, 0], 2, is_decode=True)
        change, first, second = events(tmp_path / "trace", 3)
        header = read_header_of(tmp_path / "trace")
        assert (header.num_layers, header.num_experts, header.top_k) == (3, 8, 2)
        assert isinstance(change, SlotChange)
        assert change.maps.shape == (3, 3, 8)
        assert np.array_equal(first.topk_ids, prompt.numpy())
        assert (first.request_ids, first.probs.shape) == ((), (3, 0, 8))
        assert np.array_equal(second.topk_ids, decoded.numpy())
        assert second.adapter_slots.tolist() == [-1, 0]
        assert len(set(second.request_ids)) == 2
        assert np.allclose(second.probs.sum(axis=-1), 1.0, atol=0.01)
        assert second.embeddings.shape == (2, header.embedding_size)


def test_adapters_that_change_slots_are_noted_before_the_step(root: Path, tmp_path: Path) -> None:
    with woven(root / "base", 4) as (_, plane):
        server = Pass(tmp_path / "trace", plane)
        plane.load(AdapterSource("1", "math", str(root / "math")))
        plane.ensure_on_device({"1"})
        slot = plane.slot_of("1")
        server.run(["a"], [slot], 1, is_decode=True)
        plane.unload("1")
        plane.load(AdapterSource("2", "law", str(root / "law")))
        plane.ensure_on_device({"2"})
        server.run(["b"], [plane.slot_of("2")], 2, is_decode=True)
        kinds = events(tmp_path / "trace", 4)
        assert [type(event) for event in kinds] == [SlotChange, TraceStep] * 2
        before, after = kinds[0], kinds[2]
        for index, layer in enumerate(plane.layers.values()):
            assert np.array_equal(after.maps[index], layer.expert_map.table.numpy())
        assert not np.array_equal(before.maps, after.maps)
        region = next(iter(plane.layers.values())).layout.adapter_range(slot)
        assert {(0, s) for s in region} <= set(after.forgotten)


def test_owners_are_adapters_names_wherever_they_sit(root: Path, tmp_path: Path) -> None:
    """After a load of other files, in another slot, and in another server: the same number."""
    with woven(root / "base", 4) as (_, plane):
        server, slots = Pass(tmp_path / "trace", plane), []
        loaded: dict[str, str] = {}
        server.run(["a"], [-1], 0, is_decode=True)
        for ids in ({"1": "math"}, {"2": "law", "3": "math"}, {"4": "law"}):
            for adapter_id in loaded:
                plane.unload(adapter_id)
            loaded = ids
            for adapter_id, name in ids.items():
                plane.load(AdapterSource(adapter_id, name, str(root / name)))
            plane.ensure_on_device(ids)
            slots.append({name: plane.slot_of(adapter_id) for adapter_id, name in ids.items()})
            server.run(["a"], [-1], 1, is_decode=True)
        changes = [e for e in events(tmp_path / "trace", 8) if isinstance(e, SlotChange)]
        nobody = (NO_OWNER,) * CONFIG.max_adapters
        assert changes[0].owners == nobody
        for change, where in zip(changes[1:], slots, strict=True):
            expected = list(nobody)
            for name, slot in where.items():
                expected[slot] = owner_number(name)
            assert change.owners == tuple(expected)
        assert slots[0]["math"] != slots[1]["math"]
    assert owner_number("math") == 20230257029590476, "also after a restart"
    assert owner_number("law") != owner_number("math")


def test_a_pass_that_was_not_finished_is_left_out(root: Path, tmp_path: Path) -> None:
    with woven(root / "base", 4) as (_, plane):
        server = Pass(tmp_path / "trace", plane)
        server.recorder.begin(batch(["a"], is_decode=True), [-1])
        first = next(iter(plane.layers))
        output = SimpleNamespace(topk_ids=torch.zeros((1, 2)), router_logits=torch.zeros((1, 8)))
        server.recorder.watch(first)(output)
        ids = server.run(["a"], [-1], 3, is_decode=True)
        found = events(tmp_path / "trace", 2)
        assert len(found) == 2
        assert np.array_equal(found[1].topk_ids, ids.numpy())


def test_replicas_have_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trace_folder("/t") == Path("/t")
    monkeypatch.setattr(sglang_api, "rank_in_server", lambda: 3)
    assert trace_folder("/t") == Path("/t.3")
