"""Adapters and pages: more adapters than memory, and memory that runs out halfway."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from sgl_esft import errors
from sgl_esft.config import EsftConfig
from sgl_esft.formats.manifest import read_manifest
from sgl_esft.formats.model_spec import read_moe_spec
from sgl_esft.weave import expert_tensor
from sgl_esft.weave.adapter_pages import bound_pages
from sgl_esft.weave.expert_memory import ExpertArena, open_arena
from sgl_esft.weave.plane import AdapterSource
from tests.support.adapter_factory import write_random_adapter
from tests.support.base_factory import write_random_base
from tests.support.random_layers import ONE_RANK, Rank
from tests.support.woven_device import Device

PAGE = 4096
# An expert is 3 + 1.5 pages; two neighbouring ones are 6 + 3.
SIZES = {"hidden_size": 64, "moe_intermediate_size": 24, "n_routed_experts": 8, "vocab_size": 300}
NUM_LAYERS = 3
NAMES = ("math", "intent", "law", "code")
# Two experts in each layer: at most 7 + 4 pages a layer (bounds: one page more each than the size).
PAGES_AT_MOST = NUM_LAYERS * (7 + 4)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("paged")
    base = write_random_base(root / "base", "DeepseekV2ForCausalLM", seed=1, **SIZES)
    for seed, name in enumerate(NAMES):
        experts = {1 + i: (seed, seed + 2) for i in range(NUM_LAYERS)}
        write_random_adapter(root / name, base, seed=seed, experts=experts)
    return root


Make = Callable[..., Device]


@pytest.fixture
def make(root: Path) -> Make:
    def make(
        max_pages: int | None = None,
        loads: Iterable[str] = (),
        *,
        pool_pages: int | None = None,
        is_resident: bool = False,
        rank: Rank = ONE_RANK,
    ) -> Device:
        """`max_pages` is what adapters are promised; `pool_pages` what there is beside the base."""
        expert_tensor._arenas.clear()
        arena = open_arena("host", 0, PAGE)
        expert_tensor._arenas[torch.device("cpu")] = arena
        device = Device(
            read_moe_spec(root / "base"),
            EsftConfig(4, 2),
            rank,
            is_resident=is_resident,
            max_pages=max_pages,
        )
        if pool_pages is not None:
            arena.pool.set_budget((arena.pool.state().num_used + pool_pages) * PAGE)
        for name in loads:
            device.load(root / name)
        return device

    return make


def arena_of_test() -> ExpertArena:
    (arena,) = expert_tensor.open_arenas()
    return arena


def num_used() -> int:
    return arena_of_test().pool.state().num_used


def check(device: Device) -> None:
    device.plane.check_integrity()
    device.check_mapped_slots()
    arena_of_test().check_integrity()


def test_pages_come_and_go_with_adapters(make: Make, root: Path) -> None:
    device = make()
    before = num_used()
    device.load(root / "math")
    assert before + NUM_LAYERS * 9 <= num_used() <= before + PAGES_AT_MOST
    device.check(root / "math")
    device.plane.unload("math")
    assert num_used() == before
    check(device)


def test_slots_are_free_but_pages_are_not(make: Make, root: Path) -> None:
    """Two fit: the third waits on the host, and the one used longest ago makes room for it."""
    device = make(2 * PAGES_AT_MOST, ("math", "intent", "law"))
    assert set(device.slots()) == {"math", "intent"}
    assert device.plane.can_run_together(["math", "law"])
    assert not device.plane.can_run_together(["math", "intent", "law"])
    device.plane.ensure_on_device(["intent"])
    device.plane.ensure_on_device(["law"])
    assert set(device.slots()) == {"intent", "law"}
    for name in ("intent", "law"):
        device.check(root / name)
    check(device)


def test_an_adapter_larger_than_all_pages(make: Make, root: Path) -> None:
    device = make(PAGES_AT_MOST - 1)
    before = device.snapshot()
    with pytest.raises(errors.DeviceMemoryError, match=r"'math' .*raise --adapter-memory"):
        device.load(root / "math")
    assert device.snapshot() == before


def test_pinned_adapters_leave_pages_for_the_others(make: Make, root: Path) -> None:
    device = make(2 * PAGES_AT_MOST)
    for name, pinned in (("math", True), ("intent", False)):
        device.load(root / name, pinned=pinned)
    before = device.snapshot()
    with pytest.raises(errors.OutOfExpertMemoryError, match="pin fewer"):
        device.load(root / "law", pinned=True)
    assert device.snapshot() == before
    device.load(root / "law")
    check(device)


def test_the_last_pages_may_be_pinned_only_while_nobody_else_is_there(
    make: Make, root: Path
) -> None:
    device = make(2 * PAGES_AT_MOST)
    for name in ("math", "law"):
        device.load(root / name, pinned=True)
    before = device.snapshot()
    with pytest.raises(errors.OutOfExpertMemoryError, match="pin fewer"):
        device.load(root / "code")
    assert device.snapshot() == before


@pytest.mark.parametrize("is_resident", [False, True], ids=["a cache", "for good"])
@pytest.mark.parametrize("pool_pages", [0, 4, 9, 15, 26])
def test_a_pool_that_runs_dry_in_mid_load(
    make: Make, root: Path, pool_pages: int, is_resident: bool
) -> None:
    """Layers that were placed are taken back, wherever the last page went."""
    device = make(pool_pages=pool_pages, is_resident=is_resident)
    empty = device.snapshot()
    if is_resident:
        with pytest.raises(errors.OutOfExpertMemoryError, match="page pool"):
            device.load(root / "math")
        assert device.snapshot() == empty
    else:
        device.load(root / "math")
        assert device.slots() == {}
        with pytest.raises(errors.OutOfExpertMemoryError, match="page pool"):
            device.plane.ensure_on_device(["math"])
        device.plane.unload("math")
        assert device.snapshot() == empty
    check(device)


def test_others_are_evicted_when_the_device_has_less_than_was_promised(
    make: Make, root: Path
) -> None:
    device = make(None, ("math", "law"), pool_pages=PAGES_AT_MOST)
    assert set(device.slots()) == {"math"}
    device.plane.ensure_on_device(["law"])
    assert set(device.slots()) == {"law"}
    device.check(root / "law")
    with pytest.raises(errors.OutOfExpertMemoryError):
        device.plane.ensure_on_device(["law", "math"])
    assert set(device.slots()) == {"law"}, "what the batch needs is not evicted for it"
    device.check(root / "law")
    check(device)


def test_adapters_for_good_are_counted(make: Make, root: Path) -> None:
    device = make(2 * PAGES_AT_MOST, ("math", "intent"), is_resident=True)
    before = device.snapshot()
    with pytest.raises(errors.OutOfExpertMemoryError, match="0 of 66 are left"):
        device.load(root / "law")
    assert device.snapshot() == before
    device.plane.unload("math")
    device.load(root / "law")
    check(device)


def test_ranks_decide_alike(make: Make, root: Path) -> None:
    """They hold different experts, so different pages, but must admit the same batches."""
    admitted = []
    for ep_rank in range(2):
        device = make(40, rank=Rank(ep_rank=ep_rank, ep_size=2))
        for name in NAMES:
            device.plane.load(AdapterSource(name, name, str(root / name)))
        pairs = [(a, b) for a in NAMES for b in NAMES]
        admitted.append([device.plane.can_run_together(pair) for pair in pairs])
        check(device)
    assert admitted[0] == admitted[1]
    assert True in admitted[0]
    assert False in admitted[0]


def bound(
    device: Device, config: EsftConfig, *names: str, root: Path, has_limit: bool
) -> int | None:
    initial = [read_manifest(root / name, device.spec) for name in names]
    arena = arena_of_test()
    return bound_pages(arena, device.layers, config, initial, has_limit=has_limit)


def test_the_bound_of_the_initial_adapters(make: Make, root: Path) -> None:
    """On a device with limited memory: as many as there are slots; nothing is made for them yet."""
    device = make()
    before = arena_of_test().pool.state().num_pages
    for max_adapters, num_counted in ((1, 1), (2, 2), (8, 3)):
        config = EsftConfig(max_adapters, 2)
        names = NAMES[:3]
        assert bound(device, config, *names, root=root, has_limit=False) is None
        found = bound(device, config, *names, root=root, has_limit=True)
        assert found == num_counted * PAGES_AT_MOST
    assert arena_of_test().pool.state().num_pages == before


def test_the_bound_without_initial_adapters_is_made_at_once(make: Make, root: Path) -> None:
    device = make()
    assert bound(device, EsftConfig(4, 2), root=root, has_limit=False) is None
    found = bound(device, EsftConfig(4, 2), root=root, has_limit=True)
    assert found == arena_of_test().pool.state().num_free == 4 * PAGES_AT_MOST


def test_adapter_memory_decides(make: Make, root: Path) -> None:
    device = make()
    config = EsftConfig(4, 2, adapter_memory_bytes=10 * PAGE - 1)
    assert bound(device, config, "math", root=root, has_limit=False) == 10
    assert arena_of_test().pool.state().num_free == 10


def test_no_room_for_adapters(make: Make, root: Path) -> None:
    device = make(pool_pages=9)
    config = EsftConfig(4, 2, adapter_memory_bytes=10 * PAGE)
    with pytest.raises(errors.DeviceMemoryError, match="set a smaller --adapter-memory"):
        bound(device, config, root=root, has_limit=True)
    assert arena_of_test().pool.state().num_free == 0


def test_padded_memory_has_no_pages(make: Make, root: Path) -> None:
    device = make()
    assert bound_pages(None, device.layers, EsftConfig(4, 2), [], has_limit=True) is None
