"""The adapter plane over real folders: who is where, what is published, what fails clean."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from sgl_esft import errors
from sgl_esft.config import EsftConfig
from sgl_esft.formats.manifest import check_loadable
from sgl_esft.formats.model_spec import MoeSpec, read_moe_spec
from sgl_esft.weave.plane import AdapterSource
from tests.support.adapter_factory import (
    BAD_ADAPTERS,
    BAD_WEIGHTS,
    corrupt,
    write_random_adapter,
    write_random_base,
)
from tests.support.random_layers import ONE_RANK, Rank
from tests.support.woven_device import Device

SMALL = {"hidden_size": 16, "moe_intermediate_size": 8, "n_routed_experts": 8, "vocab_size": 300}
NAMES = ("math", "intent", "law", "code")
MAX_EXPERTS = 3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    return write_random_base(folder, "DeepseekV2ForCausalLM", seed=1, **SMALL)


@pytest.fixture(scope="module")
def spec(base: Path) -> MoeSpec:
    return read_moe_spec(base)


@pytest.fixture(scope="module")
def root(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of adapters, one of each name, with different experts."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        write_random_adapter(root / name, base, seed=seed, max_experts=MAX_EXPERTS)
    return root


MakeDevice = Callable[..., Device]


@pytest.fixture
def make_device(spec: MoeSpec, root: Path) -> MakeDevice:
    def make(
        max_adapters: int,
        loads: Iterable[str] = (),
        *,
        is_resident: bool = False,
        rank: Rank = ONE_RANK,
        adapter_root: Path | None = None,
    ) -> Device:
        within = adapter_root and str(adapter_root)
        config = EsftConfig(max_adapters, MAX_EXPERTS, adapter_root=within)
        device = Device(spec, config, rank, is_resident=is_resident)
        for name in loads:
            device.load(root / name)
        return device

    return make


def test_loads_into_free_slots(make_device: MakeDevice, root: Path) -> None:
    device = make_device(2, ("math", "intent"))
    assert device.plane.names == {n: str((root / n).resolve()) for n in ("math", "intent")}
    assert device.slots() == {"math": 0, "intent": 1}
    for name in ("math", "intent"):
        device.check(root / name)
    device.plane.check_integrity()


@pytest.mark.parametrize(
    "rank",
    [
        Rank(ep_rank=0, ep_size=2),
        Rank(ep_rank=1, ep_size=2),
        Rank(tp_rank=1, tp_size=2),
        Rank(ep_rank=1, ep_size=4, tp_rank=1, tp_size=2),
    ],
    ids=str,
)
def test_a_rank_of_several_takes_its_part(make_device: MakeDevice, root: Path, rank: Rank) -> None:
    device = make_device(3, NAMES[:3], rank=rank)
    for name in NAMES[:3]:
        device.check(root / name)
    device.plane.check_integrity()


def test_an_adapter_without_a_slot_waits_on_the_host(make_device: MakeDevice, root: Path) -> None:
    device = make_device(1)
    device.load(root / "math")
    before = device.slots()
    device.load(root / "law")
    assert device.slots() == before, "loading evicts nobody: a batch may be running"
    with pytest.raises(errors.InvariantError, match="not on the device"):
        device.plane.slot_of("law")
    assert set(device.plane.names) == {"math", "law"}

    device.plane.ensure_on_device(["law"])
    device.check(root / "law")
    assert device.slots() == {"law": 0}
    device.check_mapped_slots()
    device.plane.ensure_on_device(["math"])
    device.check(root / "math")
    device.check_mapped_slots()
    device.plane.check_integrity()


def test_eviction_reads_the_host_not_the_disk(
    make_device: MakeDevice, root: Path, tmp_path: Path
) -> None:
    device = make_device(1)
    shutil.copytree(root / "math", tmp_path / "math")
    device.load(tmp_path / "math")
    device.load(root / "law")
    shutil.rmtree(tmp_path / "math")
    device.plane.ensure_on_device(["law"])
    device.plane.ensure_on_device(["math"])
    device.check(root / "math")


def test_the_least_recently_used_leaves(make_device: MakeDevice, root: Path) -> None:
    device = make_device(2, ("math", "intent", "law"))
    device.plane.ensure_on_device(["math"])
    device.plane.ensure_on_device(["law"])
    assert device.slots() == {"math": 0, "law": 1}
    with pytest.raises(errors.NoFreeSlotError):
        device.plane.ensure_on_device(["math", "intent", "law"])
    assert device.slots() == {"math": 0, "law": 1}
    assert device.plane.can_run_together(["intent", "law"])
    assert not device.plane.can_run_together(["math", "intent", "law"])


def test_unknown_ids(make_device: MakeDevice, root: Path) -> None:
    device = make_device(2, ["math"])
    before = device.snapshot()
    with pytest.raises(errors.UnknownAdapterError, match="nobody"):
        device.plane.ensure_on_device(["math", "nobody"])
    with pytest.raises(errors.UnknownAdapterError, match="nobody"):
        device.plane.unload("nobody")
    assert device.snapshot() == before


def test_unload_gives_the_slot_back(make_device: MakeDevice, root: Path) -> None:
    device = make_device(2, ("math", "intent"))
    device.plane.unload("math")
    for layer in device.layers.values():
        assert torch.equal(layer.expert_map.table[0], layer.expert_map.base_row)
    assert list(device.plane.names) == ["intent"]
    device.check(root / "intent")
    with pytest.raises(errors.UnknownAdapterError):
        device.plane.unload("math")
    device.load(root / "code")
    assert device.slots()["code"] == 0
    device.check(root / "code")
    device.plane.check_integrity()


def test_two_versions_of_a_name_stand_side_by_side(
    make_device: MakeDevice, root: Path, spec: MoeSpec
) -> None:
    device = make_device(2, ["math"])
    device.load(root / "math", adapter_id="another")
    assert device.slots() == {"math": 0, "another": 1}
    device.plane.unload("math")
    device.check(root / "math", "another")
    with pytest.raises(errors.AdapterExistsError, match="'math' is already loaded"):
        check_loadable("math", str(root / "math"), ["math"], spec, EsftConfig(2, MAX_EXPERTS))


def test_pins_change_while_loaded(make_device: MakeDevice, root: Path) -> None:
    device = make_device(2, ("math", "law"))
    device.plane.set_pinned("math", True)
    before = device.snapshot()
    with pytest.raises(errors.NoFreeSlotError, match="'law' cannot be pinned"):
        device.plane.set_pinned("law", True)
    assert device.snapshot() == before
    device.plane.ensure_on_device(["math"])
    device.load(root / "code")
    device.plane.ensure_on_device(["code"])
    assert set(device.slots()) == {"math", "code"}
    device.plane.set_pinned("math", False)
    device.plane.ensure_on_device(["law"])
    assert set(device.slots()) == {"law", "code"}


@pytest.mark.parametrize("breakage", [*BAD_ADAPTERS, *BAD_WEIGHTS])
def test_a_bad_folder_changes_nothing(
    make_device: MakeDevice, root: Path, tmp_path: Path, breakage: str
) -> None:
    device = make_device(2, ["math"])
    folder = shutil.copytree(root / "law", tmp_path / "law")
    expected = corrupt(folder, breakage)
    before = device.snapshot()
    with pytest.raises(expected):
        device.load(folder)
    assert device.snapshot() == before
    shutil.rmtree(folder)
    shutil.copytree(root / "law", folder)
    device.load(folder)
    device.check(folder)


def test_a_folder_outside_the_root(make_device: MakeDevice, root: Path, tmp_path: Path) -> None:
    device = make_device(2, adapter_root=tmp_path)
    with pytest.raises(errors.AdapterPathError, match="--adapter-root"):
        device.load(root / "math")
    shutil.copytree(root / "math", tmp_path / "math")
    device.plane.load(AdapterSource("math", "math", "math"))
    device.check(tmp_path / "math")


def test_a_resident_adapter_has_its_slot_for_good(make_device: MakeDevice, root: Path) -> None:
    device = make_device(2, ("math", "intent"), is_resident=True)
    before = device.snapshot()
    with pytest.raises(errors.NoFreeSlotError, match="'law' needs a slot of its own, and all 2"):
        device.load(root / "law")
    assert device.snapshot() == before
    assert device.plane.can_run_together(["math", "intent", "law", "code"])
    device.plane.ensure_on_device(["intent"])
    device.plane.unload("math")
    device.load(root / "law")
    assert device.slots() == {"intent": 1, "law": 0}
    device.check(root / "law")


def test_resident_ranks_that_see_other_batches_agree(make_device: MakeDevice, root: Path) -> None:
    """Under DP attention only the order of loads is common to the ranks."""
    left, right = (make_device(3, is_resident=True) for _ in range(2))
    for name in ("math", "intent", "law"):
        for device in (left, right):
            device.load(root / name)
        left.plane.ensure_on_device(["math"])
    for device in (left, right):
        device.plane.unload("intent")
    right.plane.ensure_on_device(["law", "math"])
    for device in (left, right):
        device.load(root / "code")
    assert left.slots() == right.slots() == {"math": 0, "law": 2, "code": 1}


def test_a_pinned_adapter_is_not_evicted(make_device: MakeDevice, root: Path) -> None:
    device = make_device(2)
    device.load(root / "math", pinned=True)
    device.plane.ensure_on_device(["math"])
    for name in ("intent", "law", "code"):
        device.load(root / name)
        device.plane.ensure_on_device([name])
        assert device.slots()["math"] == 0
    assert not device.plane.can_run_together(["intent", "law"])
    assert device.plane.can_run_together(["math", "law"])
    device.plane.unload("math")
    assert device.plane.can_run_together(["intent", "law"])


def test_pinning_does_not_disturb_batches_that_are_running(
    make_device: MakeDevice, root: Path
) -> None:
    """They were let in before, and will be brought to the device again for every step."""
    device = make_device(2, ("math", "intent"))
    running = ["math", "intent"]
    assert device.plane.can_run_together(running)
    device.plane.ensure_on_device(running)
    device.load(root / "law", pinned=True)
    device.plane.ensure_on_device(running)
    assert not device.plane.can_run_together([*running, "law"])
    device.plane.ensure_on_device(["intent", "law"])
    assert not device.plane.can_run_together(running), "from now on the pin holds"


def test_the_last_slot_cannot_be_pinned(make_device: MakeDevice, root: Path) -> None:
    """Requests of the other adapters would wait for ever."""
    device = make_device(2)
    device.load(root / "math", pinned=True)
    before = device.snapshot()
    with pytest.raises(errors.NoFreeSlotError, match="'law' cannot be pinned"):
        device.load(root / "law", pinned=True)
    assert device.snapshot() == before
    device.plane.unload("math")
    device.load(root / "law", pinned=True)


@pytest.mark.parametrize("seed", range(4))
def test_ranks_agree_and_stay_sound_in_any_order_of_calls(
    make_device: MakeDevice, root: Path, seed: int
) -> None:
    rng = random.Random(seed)
    ranks = [make_device(2, rank=Rank(ep_rank=r, ep_size=2)) for r in range(2)]
    for _ in range(25):
        name, loaded = rng.choice(NAMES), sorted(ranks[0].plane.names)
        wanted = rng.sample(loaded, min(len(loaded), rng.randint(0, 2)))
        unload = rng.random() < 0.3
        for device in ranks:
            if name not in loaded:
                device.load(root / name)
            elif unload:
                device.plane.unload(name)
            else:
                device.plane.ensure_on_device(wanted)
            device.plane.check_integrity()
            device.check_mapped_slots()
        assert ranks[0].slots() == ranks[1].slots()
        for device in ranks:
            for resident in device.slots():
                device.check(root / resident)


def test_integrity_check_finds_a_map_that_leads_nowhere(
    make_device: MakeDevice, root: Path
) -> None:
    device = make_device(2, ["math"])
    layer = device.layers[2]
    layer.expert_map.table[1, 0] = layer.layout.adapter_range(1)[0]
    with pytest.raises(errors.InvariantError, match="unmapped"):
        device.plane.check_integrity()
