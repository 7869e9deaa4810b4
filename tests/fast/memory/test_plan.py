"""Plans: pages are counted, the paper's numbers come out, and nothing real is used."""

from pathlib import Path

import pytest

from sgl_esft.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    AdapterPathError,
    ConfigError,
    EsftError,
)
from sgl_esft.formats.adapter_shapes import (
    TABLE_1,
    AdapterShape,
    profile_shapes,
    read_adapter_shape,
)
from sgl_esft.memory.model_sizes import ModelSizes, read_model_sizes
from sgl_esft.memory.plan import Device, PlanRow, expert_usage, plan_memory
from tests.support.base_factory import random_base_config

DATA = Path(__file__).parents[2] / "data"
V2_LITE = read_model_sizes(DATA / "deepseek-v2-lite.json")
REAL = ("gate-law", "token-law", "gate-intent", "token-intent")
PAGE = 2 << 20
GIB = 1 << 30
PAPER_DEVICE = Device(64 * GIB, 0.9, 5_239_860_101, PAGE)  # 4.88 GiB reserve; see docs/memory.md


def real_shapes() -> list[AdapterShape]:
    return [read_adapter_shape(DATA / "esft" / f"{name}.json", V2_LITE.spec) for name in REAL]


def rows(shapes: list[AdapterShape], counts: list[int]) -> dict[int, PlanRow]:
    plan = plan_memory(V2_LITE, shapes, PAPER_DEVICE, counts, kv_bytes_per_token=31_104)
    return {row.num_adapters: row for row in plan.rows}


def paper_fragmentation(shapes: list[AdapterShape]) -> float:
    """The formula of ExpertWeave section 3.1, for V2-Lite."""
    slots = 26 * (64 + len(shapes) * max(shape.max_experts for shape in shapes))
    return slots / (26 * 64 + sum(shape.num_experts for shape in shapes))


@pytest.mark.parametrize("name", TABLE_1)
def test_profile_has_the_papers_counts(name: str) -> None:
    (shape,) = profile_shapes(f"table1:{name}", V2_LITE.spec)
    most, average = TABLE_1[name]
    assert shape.max_experts == most
    assert round(shape.num_experts / 26, 2) == average
    assert list(shape.experts) == list(range(1, 27))
    assert min(shape.experts.values()) >= 1


@pytest.mark.parametrize(
    ("shapes", "most", "padded", "virtual"),
    [
        # The paper says 1.51; its own formula with its own table gives 1.50.
        (profile_shapes("table1", V2_LITE.spec), 13, 1.503, 1.005),
        (real_shapes(), 11, 1.261, 1.003),
    ],
)
def test_fragmentation(
    shapes: list[AdapterShape], most: int, padded: float, virtual: float
) -> None:
    row = rows(shapes, [len(shapes)])[len(shapes)]
    assert row.max_experts == most
    assert row.padded.fragmentation == pytest.approx(paper_fragmentation(shapes))
    assert row.padded.fragmentation == pytest.approx(padded, abs=5e-4)
    assert row.virtual.fragmentation == pytest.approx(virtual, abs=5e-4)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 20])
def test_virtual_wastes_at_most_two_percent(count: int) -> None:
    for shapes in (profile_shapes("table1", V2_LITE.spec), real_shapes()):
        fragmentation = rows(shapes, [count])[count].virtual.fragmentation
        assert 1.0 <= fragmentation <= 1.02


def test_pages_are_counted_for_each_adapter() -> None:
    """An expert takes 5.5 pages of w13 and 2.75 of w2; an edge page may be shared or half used."""
    shapes = profile_shapes("table1", V2_LITE.spec)
    usage = expert_usage(V2_LITE, shapes, 13, PAGE)
    num_experts = 26 * 64 + sum(shape.num_experts for shape in shapes)
    assert usage.used_bytes == num_experts * V2_LITE.spec.expert_bytes
    assert usage.mapped_bytes % PAGE == 0
    # At most two edge pages of each of two tensors, for each adapter and layer.
    assert 0 <= usage.mapped_bytes - usage.used_bytes < 26 * len(shapes) * 4 * PAGE
    assert 26 * 194 * V2_LITE.spec.expert_bytes <= usage.reserved_bytes
    assert 0 < usage.shared_bytes < usage.mapped_bytes


def test_figure_9_of_the_paper() -> None:
    """Section 5.4 of the paper, with the second adapter being gate-intent: docs/memory.md."""
    shapes = profile_shapes("table1:gate-math,gate-intent,token-math", V2_LITE.spec)
    found = rows(shapes, [1, 2, 3])
    gib = [
        [getattr(found[n], way).weight_bytes / GIB for n in (1, 2, 3)]
        for way in ("merged", "padded", "virtual")
    ]
    assert gib[0] == pytest.approx([29.3, 58.6, 88], rel=0.005)
    assert gib[1] == pytest.approx([34, 39, 44.3], rel=0.011)
    assert gib[2] == pytest.approx([32.1, 36.2, 38.7], rel=0.005)
    assert found[1].merged.kv_tokens == pytest.approx(810_000, rel=1e-4)
    assert found[2].merged.kv_tokens is None
    assert found[2].virtual.kv_tokens == pytest.approx(572_000, rel=0.01)
    assert found[3].virtual.kv_tokens == pytest.approx(477_000, rel=0.01)
    gains = [
        (found[n].virtual.kv_tokens or 0) / (found[n].padded.kv_tokens or 1) - 1 for n in (2, 3)
    ]
    assert gains == pytest.approx([0.228, 0.634], rel=0.05)


def test_adapters_are_used_again_in_order() -> None:
    shapes = real_shapes()[:2]
    plan = plan_memory(V2_LITE, shapes, PAPER_DEVICE, [3], kv_bytes_per_token=1)
    usage = expert_usage(V2_LITE, [*shapes, shapes[0]], 11, PAGE)
    assert plan.rows[0].virtual.weight_bytes == V2_LITE.trunk_bytes + usage.mapped_bytes
    assert any("beyond 2, these again" in line for line in plan.as_table())


def test_adapter_without_experts_in_a_layer() -> None:
    shape = AdapterShape("one", {5: 3})
    usage = expert_usage(V2_LITE, [shape], 3, PAGE)
    assert usage.used_bytes == (26 * 64 + 3) * V2_LITE.spec.expert_bytes


def test_slots_are_never_more_than_experts() -> None:
    shape = AdapterShape("one", {5: 3})
    plan = plan_memory(V2_LITE, [shape], PAPER_DEVICE, [1], kv_bytes_per_token=1, max_experts=1000)
    assert plan.rows[0].max_experts == 64


def test_reserve_is_taken_for_each_engine() -> None:
    device = Device(1000, 1.0, 100, PAGE)
    assert device.kv_tokens(600, 10, engines=1) == 30
    assert device.kv_tokens(600, 10, engines=3) == 10
    assert device.kv_tokens(600, 10, engines=4) == 0
    assert device.kv_tokens(600, 10, engines=5) is None


def test_profile_of_other_models() -> None:
    tiny = ModelSizes.from_config(random_base_config("Qwen3MoeForCausalLM"))
    shapes = profile_shapes("table1", tiny.spec)
    plan = plan_memory(tiny, shapes, PAPER_DEVICE, [10], kv_bytes_per_token=1)
    assert plan.rows[0].virtual.fragmentation is not None
    mixtral = ModelSizes.from_config(random_base_config("MixtralForCausalLM"))
    with pytest.raises(ConfigError, match="gate-math has 12 experts"):
        profile_shapes("table1", mixtral.spec)


@pytest.mark.parametrize("profile", ["", "table2", "table1:", "table1:gate-math,", "gate-math"])
def test_unknown_profiles(profile: str) -> None:
    with pytest.raises(ConfigError, match="--profile is "):
        profile_shapes(profile, V2_LITE.spec)


def test_a_plan_needs_an_adapter() -> None:
    with pytest.raises(ConfigError, match="at least one adapter"):
        plan_memory(V2_LITE, [], PAPER_DEVICE, [1], kv_bytes_per_token=1)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", AdapterFormatError),
        ('{"experts": {}}', AdapterFormatError),
        ('{"experts": {"1": [64]}}', AdapterMismatchError),
        ('{"experts": {"0": [1]}}', AdapterMismatchError),
    ],
)
def test_malformed_adapters(text: str, error: type[EsftError], tmp_path: Path) -> None:
    (tmp_path / "expert_cfg.json").write_text(text)
    with pytest.raises(error):
        read_adapter_shape(tmp_path, V2_LITE.spec)


def test_adapter_folder_and_missing_adapter(tmp_path: Path) -> None:
    folder = tmp_path / "math"
    folder.mkdir()
    with pytest.raises(AdapterPathError, match="does not exist"):
        read_adapter_shape(folder, V2_LITE.spec)
    (folder / "expert_cfg.json").write_text('{"experts": {"3": [1, 2], "4": [7]}}')
    shape = read_adapter_shape(folder, V2_LITE.spec)
    assert shape == AdapterShape("math", {3: 2, 4: 1})
