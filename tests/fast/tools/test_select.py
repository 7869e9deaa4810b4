"""Expert selection reproduces the published configurations."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_esft.errors import ConfigError
from sgl_esft.formats.adapter_config import read_expert_config
from sgl_esft.formats.manifest import AdapterManifest
from sgl_esft.tools.select import ScoreKind, read_scores, select_experts

DATA = Path(__file__).parents[2] / "data" / "esft"


def published(name: str) -> dict[int, list[int]]:
    layers = json.loads((DATA / f"{name}.json").read_text())["experts"]
    return {int(layer): ids for layer, ids in layers.items()}


@pytest.mark.parametrize("task", ["intent", "law"])
@pytest.mark.parametrize(("kind", "threshold"), [("token", 0.2), ("gate", 0.1)])
def test_published_configs(task: str, kind: ScoreKind, threshold: float) -> None:
    selected = select_experts(read_scores(DATA / f"{task}-scores.json", kind), threshold)
    expected = published(f"{kind}-{task}")
    assert {layer: set(ids) for layer, ids in selected.items()} == {
        layer: set(ids) for layer, ids in expected.items()
    }
    assert {layer: list(ids) for layer, ids in selected.items()} == expected, "order, too"


@pytest.mark.parametrize(
    ("name", "most", "mean", "sparsity"),
    [
        ("token-intent", 6, 4.77, 0.21),
        ("token-law", 9, 5.88, 0.35),
        ("gate-intent", 6, 4.73, 0.21),
        ("gate-law", 11, 6.27, 0.43),
    ],
)
def test_sparsity_of_the_published_configs(
    name: str, most: int, mean: float, sparsity: float
) -> None:
    experts = read_expert_config(DATA / f"{name}.json")
    manifest = AdapterManifest(DATA, experts, {}, "bfloat16", 0, num_moe_layers=26)
    assert manifest.max_experts_per_layer == most
    assert manifest.mean_experts_per_layer == pytest.approx(mean, abs=0.005)
    assert manifest.sparsity == pytest.approx(sparsity, abs=0.005)


def test_ties_go_to_the_lower_id() -> None:
    assert select_experts({4: {9: 0.3, 2: 0.3, 5: 0.4}}, 0.6) == {4: (5, 2)}


def test_decimal_sums_reach_their_threshold() -> None:
    scores = dict.fromkeys(range(10), 0.1)
    assert len(select_experts({0: scores}, 0.3)[0]) == 3
    assert len(select_experts({0: scores}, 0.8)[0]) == 8


_LAYER = st.dictionaries(st.integers(0, 63), st.floats(0, 1), min_size=1, max_size=64)


@given(_LAYER, st.floats(0, 1, exclude_min=True))
def test_selection_is_the_shortest_sufficient_prefix(
    scores: dict[int, float], threshold: float
) -> None:
    if math.fsum(scores.values()) < threshold:
        with pytest.raises(ConfigError, match="sum to"):
            select_experts({7: scores}, threshold)
        return
    ids = select_experts({7: scores}, threshold)[7]
    assert math.fsum(scores[i] for i in ids) >= threshold
    assert len(ids) == 1 or math.fsum(scores[i] for i in ids[:-1]) < threshold
    least = min((scores[i], -i) for i in ids)
    assert all((scores[i], -i) < least for i in scores.keys() - set(ids))


@pytest.mark.parametrize("threshold", [0.0, -0.1, 1.01, math.nan])
def test_bad_threshold(threshold: float) -> None:
    with pytest.raises(ConfigError, match="threshold"):
        select_experts({1: {0: 1.0}}, threshold)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"token_scores": {}}',
        '{"token_scores": [1]}',
        '{"token_scores": {"1": {}}}',
        '{"token_scores": {"x": {"0": 1}}}',
        '{"token_scores": {"1": {"-1": 1}}}',
        '{"token_scores": {"1": {"0": "1"}}}',
        '{"token_scores": {"1": {"0": true}}}',
        '{"token_scores": {"1": {"0": -0.1}}}',
        '{"token_scores": {"1": {"0": NaN}}}',
        '{"token_scores": {"1": {"0": Infinity}}}',
        '{"gate_scores": {"1": {"0": 1.0}}}',
    ],
)
def test_bad_scores(text: str, tmp_path: Path) -> None:
    (tmp_path / "scores.json").write_text(text)
    with pytest.raises(ConfigError, match=r"scores\.json"):
        read_scores(tmp_path / "scores.json", "token")
