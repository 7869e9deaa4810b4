"""The predictor that a policy's name gives, and what is kept of its store."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sgl_esft import sglang_api
from sgl_esft.config import TierConfig
from sgl_esft.errors import ConfigError, UnsupportedModelError
from sgl_esft.formats.model_spec import MoeSpec, read_moe_spec
from sgl_esft.offload.policies import POLICIES
from sgl_esft.offload.predictors.counts import RequestCountsPredictor
from sgl_esft.offload.predictors.finemoe import FineMoEPredictor
from sgl_esft.offload.predictors.learned import LearnedPredictor, train
from sgl_esft.offload.predictors.map_store import MapStore
from sgl_esft.offload.predictors.moments import logits_of, num_bytes_of
from sgl_esft.offload.predictors.next_gate import NextGatePredictor
from sgl_esft.offload.predictors.regression import RegressionPredictor
from sgl_esft.plugin import tier_predictors, tiers
from sgl_esft.plugin.decoded_tokens import EMBEDDING_SIZE, projection
from sgl_esft.plugin.tier_predictors import StoreKeeper, base_line, make_predictor

CONFIG = TierConfig(num_rows=4, top_k=2, prefetch_distance=1)


@pytest.fixture
def base(root: Path) -> Path:
    return root / "base"


@pytest.fixture
def spec(base: Path) -> MoeSpec:
    return read_moe_spec(base)


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch, spec: MoeSpec) -> dict[int, torch.Tensor]:
    # As a model holds them: parameters that want gradients.
    weights = {i: torch.full((8, spec.hidden_size), float(i)) for i in spec.moe_layer_ids}
    found = {i: torch.nn.Parameter(weight) for i, weight in weights.items()}
    monkeypatch.setattr(sglang_api, "gates", lambda model: found.items())
    monkeypatch.setattr(sglang_api, "rank_in_server", lambda: 0)
    return found


def made(policy: str, base: Path, config: TierConfig = CONFIG) -> Any:
    spec = read_moe_spec(base)
    return make_predictor(POLICIES[policy], config, spec, torch.nn.Identity(), base)


def test_each_policys_predictor(base: Path, gates: dict[int, torch.Tensor]) -> None:
    assert isinstance(made("finemoe", base), FineMoEPredictor)
    assert isinstance(made("regression", base), RegressionPredictor)
    assert isinstance(made("request-counts", base), RequestCountsPredictor)
    assert isinstance(made("next-gate", base), NextGatePredictor)
    assert [made(name, base) for name in ("stream", "static", "lru", "lfu")] == [None] * 4


def test_auto_predicts_nothing_where_its_sums_do_not_fit(
    spec: MoeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_api, "is_dp_attention", lambda: False)
    fewest = num_bytes_of(len(spec.moe_layer_ids), spec.num_experts)
    for num_bytes, predictor in ((fewest, "regression"), (fewest - 1, None)):
        config = TierConfig(num_rows=4, top_k=2, map_store_bytes=num_bytes)
        assert tiers._policy(config, spec, 2.0, None).predictor == predictor


def test_a_model_without_router_weights_is_named(
    base: Path, spec: MoeSpec, gates: dict[int, torch.Tensor]
) -> None:
    del gates[spec.moe_layer_ids[1]]
    with pytest.raises(UnsupportedModelError, match=rf"layers \[{spec.moe_layer_ids[1]}\]"):
        made("next-gate", base)


def test_learned_needs_its_probes(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs --expert-probe FILE"):
        made("learned", base)
    maps = np.random.default_rng(1).random((50, 3, 8)).astype(np.float32)
    path = tmp_path / "probe"
    train(maps, 1, 1e-3, top_k=2).save(path)
    config = TierConfig(num_rows=4, top_k=2, policy="learned", probe_file=str(path))
    assert isinstance(made("learned", base, config), LearnedPredictor)


def _entry(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return (
        rng.random((1, EMBEDDING_SIZE)).astype(np.float32),
        rng.random((1, 3, 8)).astype(np.float32),
    )


def test_a_store_is_kept_across_restarts(
    base: Path, tmp_path: Path, gates: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_predictors, "SAVE_PERIOD_S", 0.01)
    path = tmp_path / "maps"
    config = TierConfig(num_rows=4, top_k=2, prefetch_distance=1, map_store_file=str(path))
    store = MapStore(3, 8, EMBEDDING_SIZE, 1, 1 << 20, base=base_line(base))
    keeper = StoreKeeper(store, path, 0.01)
    keeper.start()
    store.add(*_entry(1))
    store.add(*_entry(2))
    keeper.stop()
    assert made("finemoe", base, config).store.size == 2


def test_moments_are_kept_across_restarts(
    base: Path, tmp_path: Path, gates: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_predictors, "SAVE_PERIOD_S", 0.01)
    path = tmp_path / "moments"
    config = TierConfig(num_rows=4, top_k=2, policy="regression", map_store_file=str(path))
    first = made("regression", base, config)
    keeper = StoreKeeper(first.moments, path, 0.01)
    keeper.start()
    first.moments.add(logits_of(np.random.default_rng(1).random((20, 3, 8), np.float32)))
    keeper.stop()
    assert made("regression", base, config).moments.num_tokens == 20


def test_only_what_is_new_is_written(tmp_path: Path) -> None:
    store = MapStore(3, 8, EMBEDDING_SIZE, 1, 1 << 20)
    keeper = StoreKeeper(store, tmp_path / "maps")
    keeper.save()
    assert not (tmp_path / "maps").exists()
    store.add(*_entry(1))
    keeper.save()
    stamp = (tmp_path / "maps").stat().st_mtime_ns
    keeper.save()
    assert (tmp_path / "maps").stat().st_mtime_ns == stamp


def test_a_full_disk_is_no_reason_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = MapStore(3, 8, EMBEDDING_SIZE, 1, 1 << 20)
    store.add(*_entry(1))
    keeper = StoreKeeper(store, tmp_path / "maps")
    store.add(*_entry(2))

    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "save", full)
    keeper.save()
    assert "No space left" in caplog.text


def test_a_file_of_another_model_is_refused(base: Path, tmp_path: Path, gates: object) -> None:
    """By what its base is, whatever its sizes; both are named, and what to do."""
    path, other = tmp_path / "maps", shutil.copytree(base, tmp_path / "other")
    config = TierConfig(num_rows=4, top_k=2, map_store_file=str(path))
    store = MapStore(3, 8, EMBEDDING_SIZE, 1, 1 << 20, base=base_line(base))
    store.add(*_entry(1))
    store.save(path)
    said = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**said, "transformers_version": "0"}, indent=1))
    assert made("finemoe", other, config).store.size == 1, "who wrote it is no other model"
    (other / "config.json").write_text(json.dumps({**said, "rope_theta": 123.0}))
    with pytest.raises(ConfigError, match="or a new name") as refused:
        made("finemoe", other, config)
    for words in (str(path), base_line(base), base_line(other), "3 MoE layers of 8 experts"):
        assert words in str(refused.value)
    assert base_line(base) != base_line(other)


def test_a_file_below_no_folder_is_refused(base: Path, tmp_path: Path, gates: object) -> None:
    config = TierConfig(num_rows=4, top_k=2, map_store_file=str(tmp_path / "none" / "maps"))
    with pytest.raises(ConfigError, match="there is no folder"):
        made("finemoe", base, config)


def test_the_projection_keeps_angles_and_is_the_same_everywhere() -> None:
    some = torch.randn((40, 512), generator=torch.Generator().manual_seed(2))
    cut = some @ projection(512)
    before = torch.nn.functional.cosine_similarity(some[:20], some[20:])
    after = torch.nn.functional.cosine_similarity(cut[:20], cut[20:])
    assert (before - after).abs().max() < 0.5
    same = torch.nn.functional.cosine_similarity(cut, cut)
    assert torch.allclose(same, torch.ones(40))
    assert torch.equal(projection(512), projection(512))


def test_gates_are_those_of_blocks_with_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Experts(torch.nn.Module):
        layer_id = 7

    monkeypatch.setattr(sglang_api, "FusedMoE", Experts)
    block = torch.nn.Module()
    block.gate = torch.nn.Linear(4, 8, bias=False)
    block.experts = Experts()
    other = torch.nn.Module()
    other.gate = SimpleNamespace(weight=3)
    found = list(sglang_api.gates(torch.nn.Sequential(block, other)))
    assert [layer_id for layer_id, _ in found] == [7]
    assert torch.equal(found[0][1], block.gate.weight)
