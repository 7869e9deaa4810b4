"""A rank's life at random: batches, adapters that come and go, pins, reads that fail.

After every step each expert that was computed had its own weights in its row, the tables are each
other's inverse, and what failed is nowhere. Files, threads and memory are as before at the end.
"""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from sgl_esft.errors import NoFreeSlotError
from sgl_esft.formats.model_spec import MoeSpec
from sgl_esft.offload.routing import StepTokens
from sgl_esft.offload.rows import NOT_HERE
from sgl_esft.offload.tiered_layer import TieredLayer
from sgl_esft.platform.moe import FAILED
from sgl_esft.weave.plane import AdapterPlane, AdapterSource
from tests.fast.offload.test_tier import _finemoe
from tests.fast.offload.test_tiered_layer import woven
from tests.fast.offload.tiers import Rank

ADAPTERS = ("math", "law", "code")


class Weak:
    """Reads that fail now and then, while it is told to."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self.share = 0.0

    def __call__(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        with self._lock:
            fails = self._rng.random() < self.share
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(fd, buffers, offset)


class Life:
    """The plane and the tier, driven at random, beside what each slot must hold."""

    def __init__(self, rank: Rank, plane: AdapterPlane, root: Path, weak: Weak, seed: int) -> None:
        self.rank, self.plane, self.weak = rank, plane, weak
        self.rng = random.Random(seed)
        self._root = root
        self._down = {name: _down_of(root / name, rank.spec) for name in ADAPTERS}
        self._loaded: dict[str, str] = {}  # adapter id -> name
        self._number = 0
        self.num_failed = 0

    def step(self) -> None:
        self.weak.share = self.rng.choice([0.0, 0.0, 0.0, 0.1])
        self.rng.choice([self._batch, self._batch, self._batch, self._come, self._go, self._pin])()
        self.plane.check_integrity()
        self.rank.tier.decisions.check_integrity()

    def _come(self) -> None:
        if len(self._loaded) < 4:
            self._number += 1
            name, adapter_id = self.rng.choice(ADAPTERS), f"id-{self._number}"
            self.plane.load(AdapterSource(adapter_id, name, str(self._root / name)))
            self._loaded[adapter_id] = name

    def _go(self) -> None:
        if self._loaded:
            adapter_id = self.rng.choice(list(self._loaded))
            del self._loaded[adapter_id]
            self.plane.unload(adapter_id)

    def _pin(self) -> None:
        for adapter_id in self._loaded:
            try:
                self.plane.set_pinned(adapter_id, self.rng.random() < 0.3)
            except NoFreeSlotError:
                continue

    def _batch(self) -> None:
        wanted = self.rng.sample(list(self._loaded), min(len(self._loaded), self.rng.randrange(3)))
        try:
            self.plane.ensure_on_device(wanted)
        except NoFreeSlotError:  # two are pinned
            wanted = []
        tags = [-1, *(self.plane.slot_of(adapter_id) for adapter_id in wanted)]
        names = {self.plane.slot_of(i): self._loaded[i] for i in wanted}
        tokens = StepTokens(tuple(range(len(tags))), tuple(tags))
        tier = self.rank.tier
        tier.begin(tokens if self.rng.random() < 0.7 else None)
        tier.embedded(np.eye(4, dtype=np.float32)[[tag % 4 for tag in tags]])
        for index in range(len(tier.layers)):
            self._layer(index, tags, names)

    def _layer(self, index: int, tags: list[int], names: dict[int, str]) -> None:
        layer = list(self.plane.layers.values())[index]
        assert isinstance(layer, TieredLayer)
        num_experts = self.rank.spec.num_experts
        ids = [self.rng.sample(range(num_experts), self.rng.choice([1, 2, 8])) for _ in tags]
        owners: dict[int, tuple[int, int]] = {}  # slot -> tag, expert id
        for tag, of_token in zip(tags, ids, strict=True):
            for expert in of_token:
                owners[int(layer.expert_map.table[tag, expert])] = (tag, expert)
        probs = np.full((len(tags), num_experts), 1 / num_experts, np.float32)
        tier, failed = self.rank.tier, []
        for slot, row in tier.arrivals(index, sorted(owners), probs):
            if row == FAILED:
                self.num_failed += 1
                failed.append(slot)
                continue
            tag, expert = owners[slot]
            expected = self._expected(index, layer, names.get(tag), tag, expert)
            assert torch.equal(layer.w2[row], expected), (slot, tag, expert)
        assert all(tier.decisions.where(index)[slot] == NOT_HERE for slot in failed)

    def _expected(
        self, index: int, layer: TieredLayer, name: str | None, tag: int, expert: int
    ) -> torch.Tensor:
        if name is not None and (layer.layer_id, expert) in self._down[name]:
            return self._down[name][layer.layer_id, expert]
        return self.rank.w2[index][expert]

    def end(self) -> None:
        for adapter_id in list(self._loaded):
            self.plane.unload(adapter_id)
        self._loaded.clear()


def _down_of(folder: Path, spec: MoeSpec) -> dict[tuple[int, int], torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return {
        (layer, expert): tensors[name]
        for layer in spec.moe_layer_ids
        for expert in range(spec.num_experts)
        if (name := spec.expert_tensor_name(layer, expert, "down")) in tensors
    }


def _state() -> tuple[int, int]:
    process = psutil.Process()
    return process.num_fds(), process.num_threads()


@pytest.mark.parametrize(
    ("num_steps", "num_rows", "policy"),
    [
        (700, 3, "finemoe"),
        (700, 6, "lfu"),
        pytest.param(10_000, 4, "finemoe", marks=pytest.mark.full),
        pytest.param(10_000, 5, "lru", marks=pytest.mark.full),
    ],
)
def test_a_random_life(root: Path, num_steps: int, num_rows: int, policy: str) -> None:
    weak = Weak(num_steps)
    predictor = _finemoe(3, 8) if policy == "finemoe" else None
    with woven(
        root / "base", num_rows, policy, os_preadv=weak, predictor=predictor, loads_per_layer=1.5
    ) as (rank, plane):
        gc.collect()
        before = _state()
        life = Life(rank, plane, root, weak, num_rows)
        for _ in range(num_steps):
            life.step()
        life.end()
        counts = rank.tier.totals()
        assert life.num_failed > 0
        assert counts.num_hits > 0
        assert counts.num_asked == counts.num_hits + counts.num_loads
        if predictor is not None:
            assert counts.num_useful > 0
        rank.tier.begin(None)
        gc.collect()  # of errors, whose tracebacks are cycles
        num_files, num_threads = _state()
        assert num_files == before[0]
        assert num_threads <= before[1] + 1, "the one beside begins with its first work"
