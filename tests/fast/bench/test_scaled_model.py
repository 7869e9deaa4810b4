"""The scaled model of the served figures: sizes, experts of published configs, folders kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from bench.common import scaled_model
from bench.common.scaled_model import ScaledModel, ScaledShape
from bench.expertweave import figure5, figure6
from sgl_esft.formats.adapter_config import EXPERT_CONFIG_NAME, read_expert_config

TINY = ScaledShape(hidden_size=32, expert_width=32, num_moe_layers=2)
V2_LITE = Path(__file__).resolve().parents[2] / "data" / "deepseek-v2-lite.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ScaledModel:
    return ScaledModel.of(TINY, tmp_path_factory.mktemp("models"))


def expert_of(folder: Path, layer: int, expert: int) -> torch.Tensor:
    name = f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"
    with safe_open(folder / "model.safetensors", "pt") as file:
        return file.get_tensor(name)


def test_adapters_tune_what_the_published_configs_name(model: ScaledModel) -> None:
    adapters = model.adapters(5)
    assert list(adapters) == ["a00", "a01", "a02", "a03", "a04"]
    tuned = [read_expert_config(folder / EXPERT_CONFIG_NAME) for folder in adapters.values()]
    assert tuned == model.tuned(5)
    published = read_expert_config(scaled_model.PUBLISHED[1])
    assert tuned[1] == {1: tuple(sorted(published[1])), 2: tuple(sorted(published[14]))}
    assert tuned[4] == tuned[0]  # four configs, then they repeat
    assert len({tuple(sorted(experts.items())) for experts in tuned}) == 4


def test_a_merged_model_has_the_adapters_experts(model: ScaledModel) -> None:
    adapter = model.adapters(2)["a01"]
    tuned = model.tuned(2)[1]
    merged = model.merged(1)
    assert torch.equal(expert_of(merged, 1, tuned[1][0]), expert_of(adapter, 1, tuned[1][0]))
    other = next(m for m in range(64) if m not in tuned[1])
    assert torch.equal(expert_of(merged, 1, other), expert_of(model.base(), 1, other))


def test_tpot_floor_grows_with_adapters_and_batch(model: ScaledModel) -> None:
    floors = [figure5.tpot_floor(model, n, 1.0, batch=8.0) for n in (1, 5, 20)]
    assert floors[0] == pytest.approx(1)
    assert 1.01 < floors[1] < floors[2] < 2
    assert figure5.tpot_floor(model, 20, 1.0, batch=1.0) == pytest.approx(1.0)
    assert figure5.tpot_floor(model, 20, 0.1, batch=8.0) < floors[2]


def test_figure5_serves_the_same_base_plain_and_woven(model: ScaledModel) -> None:
    found = figure5.commands(model, 3, ["--reroute", "unfused"])
    assert set(found) == {"base", "woven"}
    assert "--no-esft" in found["base"].arguments
    assert [a for a in found["woven"].arguments if "=" in a] == [
        f"{name}={folder}" for name, folder in model.adapters(3).items()
    ]
    assert found["woven"].arguments[-2:] == ["--reroute", "unfused"]
    assert all(str(model.base()) in command.arguments for command in found.values())


@pytest.mark.parametrize(("setting", "cores"), [("half", [4]), ("equal", [4, 5])])
def test_figure6_gives_each_merged_server_a_core_and_woven_its_share(
    model: ScaledModel, setting: str, cores: list[int]
) -> None:
    found = figure6.commands(model, figure6.SETTINGS[setting], [4, 5], [])
    assert {name: command.cores for name, command in found.items()} == {
        "a00": [4],
        "a01": [5],
        "woven": cores,
    }
    assert str(model.merged(1)) in found["a01"].arguments
    assert ("--attn-dp-size" in found["woven"].arguments) == (setting == "equal")
