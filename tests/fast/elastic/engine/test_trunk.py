"""The trunk: which tensors it has, how they are packed, and that views are its memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from sgl_elastic.engine import trunk
from sgl_elastic.engine.memory import expert_of
from sgl_elastic.engine.trunk import plan_trunk
from sgl_elastic.errors import ElasticInternalError


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 6, bias=False, dtype=torch.bfloat16)
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("cos", torch.ones(8), persistent=False)
        self.w_kc = torch.arange(24.0).reshape(2, 3, 4).transpose(1, 2)  # as MLA's: dense, turned
        self.empty = torch.empty(0)
        self.name = "attention"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layer = Attention()
        self.experts = nn.ParameterDict({"w13_weight": nn.Parameter(torch.ones(2, 2))})
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight  # tied


def is_expert(name: str) -> bool:
    return name.startswith("experts.")


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """As EngineMemory.plan gathers them."""
    tensors = trunk.weights_of(model, is_expert)
    tensors.update((name, tensor) for name, _, _, tensor in trunk.derived_of(model))
    return tensors


def test_what_belongs_to_the_trunk(model: Model) -> None:
    weights = trunk.weights_of(model, is_expert)
    assert list(weights) == ["embed.weight", "layer.scale", "layer.q.weight"], "tied: once"
    assert weights["embed.weight"] is model.head.weight, "the parameter itself, to be rebound"
    [(name, module, attribute, tensor)] = trunk.derived_of(model)
    assert (name, attribute) == ("layer.w_kc", "w_kc")
    assert module is model.layer
    assert tensor is model.layer.w_kc


def test_tensors_are_packed_apart_and_aligned(model: Model) -> None:
    layout = plan_trunk(tensors_of(model))
    spans = sorted((t.offset, t.offset + _num_bytes(t)) for t in layout.tensors)
    assert all(begin % 256 == 0 for begin, _ in spans)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= layout.num_bytes
    assert layout.num_bytes % 256 == 0
    assert plan_trunk({}).num_bytes == 256, "a model without a trunk has a slot all the same"


def _num_bytes(planned: trunk.TrunkTensor) -> int:
    return torch.empty(planned.shape, dtype=getattr(torch, planned.dtype)).nbytes


def test_views_have_the_tensors_form_and_alias_the_memory(model: Model) -> None:
    tensors = tensors_of(model)
    layout = plan_trunk(tensors)
    memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for planned in layout.tensors:
        original = tensors[planned.name]
        view = trunk.view(memory, planned)
        assert (view.shape, view.stride(), view.dtype) == (
            original.shape,
            original.stride(),
            original.dtype,
        )
        view.copy_(original.detach())
        assert view.data_ptr() == memory.data_ptr() + planned.offset
    for planned in layout.tensors:  # nothing wrote over another one's bytes
        assert torch.equal(trunk.view(memory, planned), tensors[planned.name]), planned.name
    memory.zero_()
    assert trunk.view(memory, layout.tensors[0]).abs().sum() == 0


def test_a_rebound_parameter_reads_the_trunk_and_stays_tied(model: Model) -> None:
    layout = plan_trunk(tensors_of(model))
    memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    views = {planned.name: trunk.view(memory, planned) for planned in layout.tensors}
    for name, tensor in trunk.weights_of(model, is_expert).items():
        tensor.data = views[name]
    views["embed.weight"].fill_(2.0)
    assert model.head(torch.ones(1, 4)).tolist() == [[8.0] * 5]
    assert model.embed(torch.tensor([3])).tolist() == [[2.0] * 4]
    assert model.experts["w13_weight"].sum() == 4, "experts are elsewhere"


def test_the_same_layout_has_the_same_digest(model: Model) -> None:
    tensors = tensors_of(model)
    digest = plan_trunk(tensors).digest
    assert plan_trunk(tensors_of(Model())).digest == digest
    for name, other in {
        "dtype": tensors["embed.weight"].half(),
        "shape": torch.empty(4, 5),
        "stride": tensors["embed.weight"].detach().t().contiguous().t(),
    }.items():
        assert plan_trunk({**tensors, "embed.weight": other}).digest != digest, name
    renamed = {("x" if name == "embed.weight" else name): t for name, t in tensors.items()}
    assert plan_trunk(renamed).digest != digest


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(()),
        torch.empty(3, 1, 2),
        torch.empty(1, 1),
        torch.empty(2, 3, 4).permute(2, 0, 1),
        torch.empty(4, 6)[:2],
        torch.empty(5, 4)[2:3, :],
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}",
)
def test_dense_tensors(tensor: torch.Tensor) -> None:
    [planned] = plan_trunk({"a": tensor}).tensors
    memory = torch.zeros(4096, dtype=torch.uint8)
    trunk.view(memory, planned).fill_(1.0)
    assert memory.view(torch.float32).sum() == tensor.numel()


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(4, 6)[:, :3], torch.empty(8)[::2], torch.ones(1).expand(4)],
    ids=["columns", "every second", "expanded"],
)
def test_tensors_with_gaps_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ElasticInternalError, match=r"layer\.x: stride"):
        plan_trunk({"layer.x": tensor})


def test_experts_are_told_by_their_name() -> None:
    assert expert_of("model.layers.3.mlp.experts.17.up_proj.weight") == 17
    for module in ("shared_experts.up_proj", "gate"):
        assert expert_of(f"model.layers.3.mlp.{module}.weight") is None
