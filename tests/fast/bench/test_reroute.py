"""bench/kernels/reroute.py, at sizes at which only the shape of its figures can be checked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.kernels import reroute as subject

TINY = ["--batch-sizes", "1", "8", "--layer-batch-sizes", "2", "--rounds", "3"]


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_every_figure_is_a_ratio_with_its_goal_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subject, "COUNTED_TOKEN_COUNTS", (1,))
    subject.main([*TINY, "--turn-seconds", "1e-4", "--expert", "64", "48"], tmp_path)
    found = json.loads((tmp_path / "reroute.json").read_text())
    assert [row["num_tokens"] for row in found["rows"]] == [1, 8]
    assert [row["num_tokens"] for row in found["layer_rows"]] == [2]
    named = set(found["rows"][0]) | set(found["layer_rows"][0])
    assert named >= {name for name in found["goals"] if not name.endswith("_aim")}
    for row in (*found["rows"], *found["layer_rows"]):
        spreads = [value["wall"] for name, value in row.items() if name != "num_tokens"]
        assert all(0 < each["q1"] <= each["median"] <= each["q3"] for each in spreads)
    assert found["threads"] == 1
    assert "fused_over_layer" in capsys.readouterr().out
    counted = found["callgrind"]
    assert "skipped" in counted or [row["id_bits"] for row in counted["rows"]] == [32, 64]


def test_ways_that_do_not_agree_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = subject.make_inputs(8, is_expert_parallel=True)
    assert set(subject.chains(inputs)) == {"fused", "fused_out", "unfused", "unfused_bare"}
    monkeypatch.setattr(subject, "unfused_bare", lambda ids, *_: ids + 1)
    with pytest.raises(RuntimeError, match="other slots than the reference's: unfused_bare"):
        subject.chains(inputs)


def test_under_expert_parallelism_base_tokens_get_what_sglangs_gather_gives() -> None:
    inputs = subject.make_inputs(64, is_expert_parallel=True)
    inputs.tags.fill_(-1)
    slot_ids = subject.chains(inputs)["fused"]()
    own = inputs.mapping[inputs.topk_ids]
    first_of_base = subject.NUM_ADAPTERS * subject.NUM_EXPERTS
    assert isinstance(slot_ids, torch.Tensor)
    assert torch.equal(slot_ids, torch.where(own < 0, own, own + first_of_base))
