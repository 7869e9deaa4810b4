"""What a slot of a quantised layer holds: scales beside numbers, and which parameters there are.

SGLang's own layers are in tests/fast/layer/test_quantised_layer.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sgl_esft.errors import InvariantError, UnsupportedModelError
from sgl_esft.weave import expert_tensor
from sgl_esft.weave.expert_parameters import PARAMETERS, parameters_of
from sgl_esft.weave.moe_layer import ExpertWeights, WovenLayer
from sgl_esft.weave.slot_layout import SlotLayout
from tests.support.random_layers import PADDED, VIRTUAL, FakeFusedMoE, RandomExperts

LAYOUT = SlotLayout.plan(num_base=4, num_routed=4, num_adapters=2, max_experts_per_adapter=3)
HIDDEN, WIDTH = 64, 24
BASE = RandomExperts.draw(4, HIDDEN, WIDTH, seed=0, dtype=torch.float32)
NUM_SLOTS = LAYOUT.num_slots


class Layer(torch.nn.Module):
    """With parameters of these names, dtypes and shapes, as SGLang's methods make them."""

    def __init__(self, **parameters: tuple[torch.dtype, tuple[int, ...]]) -> None:
        super().__init__()
        self.planned = parameters

    def create(self) -> None:
        for name, (dtype, shape) in self.planned.items():
            made = torch.ones(shape).to(dtype) if len(shape) else torch.empty(0, dtype=dtype)
            self.register_parameter(name, torch.nn.Parameter(made, requires_grad=False))


def int8_layer(**more: tuple[torch.dtype, tuple[int, ...]]) -> Layer:
    return Layer(
        w13_weight=(torch.int8, (NUM_SLOTS, 2 * WIDTH, HIDDEN)),
        w2_weight=(torch.int8, (NUM_SLOTS, HIDDEN, WIDTH)),
        w13_weight_scale=(torch.float32, (NUM_SLOTS, 2 * WIDTH, 1)),
        w2_weight_scale=(torch.float32, (NUM_SLOTS, HIDDEN, 1)),
        **more,
    )


@pytest.mark.parametrize("config", [VIRTUAL, PADDED], ids=lambda config: config.expert_memory)
def test_scales_are_no_numbers_until_they_are_loaded(config: object) -> None:
    """SGLang makes them ones, by which a tensor that a checkpoint lacks would go unseen."""
    layer = int8_layer(w13_g_idx=(torch.int32, ()))
    memory = expert_tensor.create_experts(layer, LAYOUT, config, layer.create)  # type: ignore[arg-type]
    scales = [layer.w13_weight_scale, layer.w2_weight_scale]
    assert all(bool(scale.isnan().all()) for scale in scales)
    assert layer.w13_g_idx.shape == (0,)
    layer.w13_weight.data[:4] = 3
    assert bool((layer.w13_weight[:4] == 3).all())
    with pytest.raises(
        UnsupportedModelError, match=r"no finite w13_weight_scale .* \[0, 1, 2, 3\]"
    ):
        expert_tensor.take_scales(layer, memory, LAYOUT)
    for scale in scales:
        scale.data[:4] = 1
    scales[1].data[2, 5] = float("inf")
    with pytest.raises(UnsupportedModelError, match=r"no finite w2_weight_scale .* \[2\]"):
        expert_tensor.take_scales(layer, memory, LAYOUT)


def test_scales_are_counted_for_every_slot() -> None:
    layer = int8_layer()
    memory = expert_tensor.create_experts(layer, LAYOUT, PADDED, layer.create)
    for name in ("w13_weight_scale", "w2_weight_scale"):
        getattr(layer, name).data[:4] = 1
    before = memory.usage()
    expert_tensor.take_scales(layer, memory, LAYOUT)
    after, per_slot = memory.usage(), 4 * (2 * WIDTH + HIDDEN)
    assert after.reserved_bytes - before.reserved_bytes == NUM_SLOTS * per_slot
    assert after.mapped_bytes - before.mapped_bytes == NUM_SLOTS * per_slot
    assert after.used_bytes - before.used_bytes == 4 * per_slot


def test_scales_without_a_row_for_each_slot_are_refused() -> None:
    layer = int8_layer()
    memory = expert_tensor.create_experts(layer, LAYOUT, VIRTUAL, layer.create)
    short = torch.nn.Parameter(torch.ones(4, 2 * WIDTH, 1), requires_grad=False)
    layer.w13_weight_scale = short
    with pytest.raises(UnsupportedModelError, match="SGLang keeps w13_weight_scale as"):
        expert_tensor.take_scales(layer, memory, LAYOUT)


@pytest.mark.parametrize("scheme", PARAMETERS)
def test_parameters_say_the_scheme(scheme: str | None) -> None:
    names = PARAMETERS[scheme].names  # type: ignore[index]
    dtype = next(iter(PARAMETERS[scheme].dtypes))  # type: ignore[index]
    dtypes = dict.fromkeys(names[:2], dtype) | dict.fromkeys(names[2:], torch.float32)
    layer = Layer(**{name: (dtypes[name], (4, 2)) for name in names})
    layer.create()
    assert parameters_of(layer) == (scheme, PARAMETERS[scheme])  # type: ignore[index]


@pytest.mark.parametrize(
    ("left_out", "added", "named"),
    [
        ("w2_weight_scale", {}, r"w13_weight_scale \(float32\)"),
        ("w13_weight_scale", {}, r"w2_weight_scale \(float32\)"),
        ("", {"w13_weight_bias": torch.float32}, r"w13_weight_bias \(float32\)"),
        ("", {"w13_qzeros": torch.uint8}, r"w13_qzeros \(uint8\)"),
        ("", {"w13_input_scale": torch.float32}, r"w13_input_scale \(float32\)"),
    ],
)
def test_other_parameters_are_refused_by_name(
    left_out: str, added: dict[str, torch.dtype], named: str
) -> None:
    layer = int8_layer(**{name: (dtype, (NUM_SLOTS, 4)) for name, dtype in added.items()})
    layer.planned.pop(left_out, None)
    for config in (VIRTUAL, PADDED):
        with pytest.raises(UnsupportedModelError, match=f"experts with {named} cannot be woven"):
            expert_tensor.create_experts(layer, LAYOUT, config, layer.create)


def test_numbers_without_any_scale_are_refused() -> None:
    layer = int8_layer()
    for name in ("w13_weight_scale", "w2_weight_scale"):
        del layer.planned[name]
    with pytest.raises(UnsupportedModelError, match=r"w13_weight \(int8\), w2_weight \(int8\)"):
        expert_tensor.create_experts(layer, LAYOUT, VIRTUAL, layer.create)


def quantised_layer(*, is_up_first: bool = False, one_scale: bool = False) -> WovenLayer:
    """One adapter's slots, 4 to 6, of int8 experts."""
    fake = FakeFusedMoE(BASE, max_adapters=1, max_experts=3, config=PADDED).woven()
    shape = () if one_scale else (2 * WIDTH, 1)
    return replace(
        fake,
        w13=torch.zeros(7, 2 * WIDTH, HIDDEN, dtype=torch.int8),
        w2=torch.zeros(7, HIDDEN, WIDTH, dtype=torch.int8),
        scales=(torch.full((7, *shape), torch.nan), torch.full((7, HIDDEN, 1), torch.nan)),
        is_up_first=is_up_first,
    )


def quantised_expert(*, one_scale: bool = False) -> ExpertWeights:
    generator = torch.Generator().manual_seed(3)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)

    scale = torch.tensor(0.5) if one_scale else torch.rand(2 * WIDTH, 1, generator=generator)
    return ExpertWeights(
        numbers(2 * WIDTH, HIDDEN),
        numbers(HIDDEN, WIDTH),
        scale,
        torch.rand(HIDDEN, 1, generator=generator),
    )


@pytest.mark.parametrize("one_scale", [False, True])
def test_rows_that_change_places_take_their_scales_along(one_scale: bool) -> None:
    expert = quantised_expert(one_scale=one_scale)
    layer = quantised_layer(is_up_first=True, one_scale=one_scale)
    layer.place(0, {2: expert})
    held = layer.at(4)
    order = [*range(WIDTH, 2 * WIDTH), *range(WIDTH)]
    assert expert.w13_scale is not None
    assert held.w13_scale is not None
    assert torch.equal(held.w13, expert.w13[order])
    assert torch.equal(held.w13_scale, expert.w13_scale if one_scale else expert.w13_scale[order])
    assert torch.equal(held.w2, expert.w2)
    assert held.w2_scale is not None
    assert expert.w2_scale is not None
    assert torch.equal(held.w2_scale, expert.w2_scale)


def test_a_slot_is_the_experts_own_scales_and_then_nobodys() -> None:
    expert, layer = quantised_expert(), quantised_layer()
    layer.place(0, {2: expert})
    assert layer.scales is not None
    for scale, wanted in zip(layer.scales, (expert.w13_scale, expert.w2_scale), strict=True):
        assert wanted is not None
        assert torch.equal(scale[4], wanted)
        assert bool(scale[5:].isnan().all())
    layer.displace(0)
    assert all(bool(scale.isnan().all()) for scale in layer.scales)


def test_packing_sees_scales_in_the_layers_dtype_and_each_tensor_whole() -> None:
    expert, layer = quantised_expert(), quantised_layer()
    assert layer.scales is not None
    seen: list[tuple[tuple[int, ...], torch.dtype]] = []

    def pack(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        seen.append((tuple(numbers.shape), scales.dtype))
        return numbers.flip(0)

    halved = tuple(scale.bfloat16() for scale in layer.scales)
    layer = replace(layer, pack=pack, scales=(halved[0], halved[1]))
    layer.place(0, {2: expert})
    assert seen == [((2 * WIDTH, HIDDEN), torch.bfloat16), ((HIDDEN, WIDTH), torch.bfloat16)]
    assert torch.equal(layer.at(4).w13, expert.w13.flip(0))
    assert torch.equal(layer.at(4).w2, expert.w2.flip(0))


def test_an_unquantised_layer_takes_no_scales() -> None:
    layer = FakeFusedMoE(BASE, max_adapters=1, max_experts=3, config=PADDED).woven()
    expert = replace(BASE.chosen(1)[1], w13_scale=torch.ones(1), w2_scale=torch.ones(1))
    with pytest.raises(InvariantError, match=r"an expert of float .* for a slot of float"):
        layer.place(0, {1: expert})
