"""SGLang's parameters over expert memory: created once, filled in place, never elsewhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from sgl_esft.config import EsftConfig
from sgl_esft.errors import DeviceMemoryError, OutOfExpertMemoryError, UnsupportedModelError
from sgl_esft.weave import expert_tensor
from sgl_esft.weave.expert_memory import open_arena
from sgl_esft.weave.moe_layer import ExpertWeights
from sgl_esft.weave.slot_layout import SlotLayout
from tests.support.random_layers import PADDED, VIRTUAL, FakeFusedMoE, RandomExperts

LAYOUT = SlotLayout.plan(num_base=4, num_routed=4, num_adapters=2, max_experts_per_adapter=3)
CPU = torch.device("cpu")
PAGE = 4096
BASE = RandomExperts.draw(num_experts=4, hidden=64, width=24, seed=0, dtype=torch.float32)
OTHER = RandomExperts.draw(num_experts=4, hidden=64, width=24, seed=1, dtype=torch.float32)


SMALL = {"w13_weight": (10, 16, 8), "w2_weight": (10, 8, 8)}


class Layer(torch.nn.Module):
    """Creates its weights as SGLang does: on the default device, with attributes for loaders."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, shapes: Mapping[str, tuple[int, ...]] = SMALL
    ) -> None:
        super().__init__()
        self.dtype, self.shapes = dtype, shapes

    def create(self) -> None:
        for name, shape in self.shapes.items():
            parameter = torch.nn.Parameter(torch.empty(shape, dtype=self.dtype), False)
            parameter.weight_loader = self.create  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)


Arena = Callable[[int | None], None]


@pytest.fixture
def own_arena() -> Arena:
    """Call it for an arena of so many pages."""

    def make(num_pages: int | None) -> None:
        budget = None if num_pages is None else num_pages * PAGE
        expert_tensor._arenas[CPU] = open_arena("host", 0, PAGE, budget)

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", [VIRTUAL, PADDED], ids=lambda config: config.expert_memory)
def test_the_bases_slots_can_be_written(config: EsftConfig, dtype: torch.dtype) -> None:
    layer = Layer(dtype)
    memory = expert_tensor.create_experts(layer, LAYOUT, config, layer.create)
    assert memory.mapped_slots() == set(range(4))
    for name, shape in SMALL.items():
        weight = getattr(layer, name)
        assert (tuple(weight.shape), weight.dtype, weight.device) == (shape, dtype, CPU)
        assert not weight.requires_grad
        assert weight.weight_loader == layer.create
        weight.data[:4] = 3
        assert (weight[:4] == 3).all()
    assert list(dict(layer.named_parameters())) == ["w13_weight", "w2_weight"]
    expert_tensor.check_still_there(layer, memory)


def memory_of_process(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) << 10


LARGE = {"w13_weight": (10, 1024, 4096), "w2_weight": (10, 1024, 2048)}


def peak_of_a_large_base() -> int:
    """Bytes that this process has more, at its peak, for writing four experts of LARGE."""
    layer = Layer(shapes=LARGE)
    before = memory_of_process("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak, from now on
    expert_tensor.create_experts(layer, LAYOUT, VIRTUAL, layer.create)
    for name in layer.shapes:
        getattr(layer, name).data[:4] = 1
    return memory_of_process("VmHWM") - before


def test_the_base_is_written_into_its_pages_and_nowhere_else() -> None:
    """At its peak the process has one copy, and none of the slots without an owner."""
    base_bytes = 4 * (1024 * 4096 + 1024 * 2048) * 4
    # In a process of its own: what other tests left would be freed while this one counts.
    script = f"from {__name__} import peak_of_a_large_base\nprint(peak_of_a_large_base())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    # The kernel counts up to 64 pages late on a CPU.
    assert base_bytes - (1 << 20) <= int(done.stdout) < base_bytes + (16 << 20)


def test_layers_share_the_devices_arena() -> None:
    assert expert_tensor.open_arenas() == []
    layers = [Layer(), Layer()]
    for layer in layers:
        expert_tensor.create_experts(layer, LAYOUT, VIRTUAL, layer.create)
    (arena,) = expert_tensor.open_arenas()
    assert arena is expert_tensor.arena_of(CPU)
    assert arena.pool.state().num_used == 4


def test_a_base_larger_than_the_device(own_arena: Arena) -> None:
    own_arena(1)
    layer = Layer()
    with pytest.raises(DeviceMemoryError, match="the base model's experts do not fit"):
        expert_tensor.create_experts(layer, LAYOUT, VIRTUAL, layer.create)
    arena = expert_tensor.arena_of(CPU)
    assert arena is not None
    assert arena.pool.state().num_used == 0


@pytest.mark.parametrize("config", [VIRTUAL, PADDED], ids=lambda config: config.expert_memory)
def test_parameters_that_we_do_not_know_are_refused(config: EsftConfig) -> None:
    layer = Layer(shapes={**SMALL, "w13_weight_bias": (10, 4)})
    with pytest.raises(UnsupportedModelError, match=r"w13_weight_bias \(float32\) cannot be woven"):
        expert_tensor.create_experts(layer, LAYOUT, config, layer.create)


def test_weights_that_were_put_elsewhere_are_refused() -> None:
    layer = Layer()
    memory = expert_tensor.create_experts(layer, LAYOUT, VIRTUAL, layer.create)
    layer.w13_weight = torch.nn.Parameter(torch.empty(10, 16, 8), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match="w13_weight after loading"):
        expert_tensor.check_still_there(layer, memory)


def test_the_addresses_live_as_long_as_the_tensor() -> None:
    layer = Layer()
    memory = expert_tensor.create_experts(layer, LAYOUT, VIRTUAL, layer.create)
    weight = layer.w13_weight[0]
    weight[:] = 7
    expert_tensor._arenas.clear()
    del layer, memory
    assert (weight == 7).all()


def woven(max_adapters: int = 2) -> FakeFusedMoE:
    return FakeFusedMoE(BASE, max_adapters=max_adapters, max_experts=3, config=VIRTUAL)


def test_a_dry_pool_leaves_the_layer_as_it_was(own_arena: Arena) -> None:
    own_arena(12 + 6 + 5)  # the base's 4 x 3 and 4 x 1.5 pages, and one expert
    layer = woven().woven()
    layer.place(0, OTHER.chosen(1))
    table, usage = layer.expert_map.table.clone(), layer.memory.usage()
    with pytest.raises(OutOfExpertMemoryError):
        layer.place(1, OTHER.chosen(0, 2))
    assert torch.equal(layer.expert_map.table, table)
    assert layer.memory.usage() == usage
    layer.check_integrity()
    layer.displace(0)
    layer.place(1, OTHER.chosen(2))
    assert torch.equal(layer.w13[layer.expert_map.table[1, 2]], OTHER.w13[2])


def test_a_failed_copy_publishes_nothing_and_gives_its_pages_back() -> None:
    """Weights first, then the map: a request never finds half an adapter."""
    layer = woven().woven()
    table, usage = layer.expert_map.table.clone(), layer.memory.usage()
    adapter = OTHER.chosen(1, 2)
    bad = {**adapter, 2: ExpertWeights(adapter[2].w13[:-1], adapter[2].w2)}
    with pytest.raises(RuntimeError):
        layer.place(0, bad)
    assert torch.equal(layer.expert_map.table, table)
    assert layer.mapped_slots == set(range(4))
    assert layer.memory.usage() == usage
    layer.check_integrity()


def test_reading_what_is_not_mapped_is_a_fault() -> None:
    """Not zeros, not another adapter's experts: the process ends."""
    script = (
        "from tests.fast.weave.test_expert_tensor import *\n"
        "layer = woven().woven()\n"
        "print(layer.w13[3].sum().item() != 0, flush=True)\n"
        "layer.w13[4].sum()\n"
        "print('served')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (-11, "True\n"), done.stderr[-500:]
