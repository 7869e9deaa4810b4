"""The GPU benches of rerouting, of a model and of serving: their pure parts, and real servers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.common.layers import DTYPE
from bench.expertweave.floor import ModelBytes, floor_over_base
from bench.gpu import equality, graph, reroute, serve
from bench.gpu import model as gpu_model
from bench.gpu.moe import grouped_experts
from sgl_esft.platform.moe import moe_forward


def test_grouped_experts_compute_what_the_platform_computes() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 64, dtype=DTYPE)
    w13, w2 = torch.randn(9, 96, 64, dtype=DTYPE) / 8, torch.randn(9, 64, 48, dtype=DTYPE) / 8
    weights, slot_ids = reroute.top_k_route(torch.randn(7, 9), 3)
    found = grouped_experts(hidden, weights, slot_ids, w13, w2)
    expected = moe_forward(hidden, w13, w2, weights, slot_ids)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


class Stale:
    """A captured step whose replays see nothing that happened since."""

    def __init__(self, result: torch.Tensor) -> None:
        self.result = result

    def replay(self) -> None:
        pass


def test_a_graph_that_misses_a_change_is_found() -> None:
    from bench.common.layers import Subject

    size = reroute.TINY
    step = reroute.make_step(Subject("host"), size)
    step.layer.place(0, reroute._adapter(size, range(3), seed=3))
    step.tags[::2] = 0

    def route(
        logits: torch.Tensor, tags: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = reroute.top_k_route(logits, size.top_k)
        return weights, reroute.reroute_unfused(ids, tags, table)

    stale = Stale(step.run(route))
    with pytest.raises(RuntimeError, match="other tags: the replayed graph answers otherwise"):
        reroute._replay_after_changes(stale, step, route, size)  # type: ignore[arg-type]


def test_full_model_has_v2_lites_bytes() -> None:
    size = gpu_model.full_size()
    assert len(size.moe_layers) == 26
    assert size.layout.num_slots == 64 + 20 * 11
    with torch.device("meta"):
        trunk = gpu_model.make_trunk(size.config, "meta")
    # Norms are all that is left out of what a step always reads.
    bytes_ = ModelBytes()
    assert trunk.num_bytes == pytest.approx(bytes_.always_read_bytes, rel=1e-3)
    touched = gpu_model.Touched(merged=26 * 40, woven=26 * 60, redirected=0.2)
    found = touched.floor_ratio(bytes_.always_read_bytes, bytes_.expert_bytes)
    assert found == pytest.approx(floor_over_base([60], [40]))


def test_a_batch_takes_turns_and_prefers_tuned_experts() -> None:
    size = replace(gpu_model.full_size(), adapter_counts=(0, 5))
    buffers = gpu_model.make_buffers(size, 64, "cpu")
    gpu_model.write_batch(buffers, size, 5, seed=1)
    assert buffers.tags.tolist() == [i % 5 for i in range(64)]
    tuned = selected = 0
    for layer_id, logits in buffers.logits.items():
        for token, ids in enumerate(logits.topk(6, dim=-1).indices.tolist()):
            own = size.tuned(token % 5, layer_id)
            tuned += sum(expert in own for expert in ids)
            selected += len(ids)
    assert 0.15 < tuned / selected < 0.3  # 0.215 to 0.232 in the published traces
    gpu_model.write_batch(buffers, size, 0, seed=1)
    assert set(buffers.tags.tolist()) == {-1}


def test_merged_logits_that_differ_are_refused() -> None:
    graphs = {
        name: graph.capture(lambda value=value: torch.tensor([value]), "cpu")
        for name, value in ((reroute.PLAIN, 1.0), (reroute.FUSED, 1.0))
    }
    assert set(gpu_model._difference(graphs).values()) == {0.0}
    graphs[reroute.CHAIN] = graph.capture(lambda: torch.tensor([2.0]), "cpu")
    with pytest.raises(RuntimeError, match="unfused chain: one adapter's logits are not"):
        gpu_model._difference(graphs)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> serve.Files:
    return serve.write_files(serve.TINY, tmp_path_factory.mktemp("served"))


def test_floor_of_served_adapters(files: serve.Files) -> None:
    assert serve.floor_of(files, 64, 0) == 1
    assert serve.floor_of(files, 1, 3) == pytest.approx(1, abs=1e-9)
    assert serve.floor_of(files, 64, 3) > 1.02


@pytest.mark.full
@pytest.mark.alone  # its servers together need much of the memory
def test_an_adapter_answers_as_its_merged_model(tmp_path: Path) -> None:
    """On a CPU to the bit, and nothing is rounded otherwise."""
    found = equality.measure(serve.TINY, tmp_path)
    assert found["tokens"] == equality.NUM_PROMPTS * (serve.TINY.prompt_tokens - 1)
    assert (found["rounding"], found["off"]) == (0, 0)
    assert found["distance"] > 0.01
    assert "failed" not in found


def test_an_adapter_is_off_by_no_more_than_rounding() -> None:
    def said(rounding: float, off: float, distance: float) -> str:
        zero = torch.zeros(4)
        found = equality.differences(zero + rounding, zero + distance, zero, zero + distance + off)
        assert found["off"] == pytest.approx(off, nan_ok=True)
        return (equality.why_not(found) or "").partition(":")[0]

    assert said(0, 0, 1) == ""
    assert said(0.1, 0.15, 1) == ""
    more = "the adapter is off its merged model by more than 2 roundings"
    assert said(0, 0.01, 1) == more
    assert said(0.1, 0.25, 1) == more
    assert said(0.1, float("nan"), 1) == more
    # Then an adapter that is ignored would pass.
    close = "the adapter is not 3 roundings away from the base"
    assert said(0.4, 0.4, 1) == close
    assert said(0, 0, 0) == close


@pytest.mark.full
@pytest.mark.alone  # its servers together need much of the memory
def test_two_real_servers_are_driven(tmp_path: Path) -> None:
    found = serve.measure(serve.TINY, tmp_path)
    assert found["num_layers"] == 3
    assert found["rounds_left_out"] == 0
    assert [(row["batch_size"], row["num_adapters"]) for row in found["rows"]] == [(2, 0), (2, 3)]
    assert all(row["tpot_over_plain"]["median"] > 0 for row in found["rows"])
    assert all("woven" not in row for row in found["rows"])
