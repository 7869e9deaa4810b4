"""Rows of an accelerator, over simulated streams: no kernel reads what is not there yet."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sgl_esft.offload.ahead import Ahead
from sgl_esft.offload.decisions import Decisions
from sgl_esft.offload.device_rows import DeviceRows, make_staging
from sgl_esft.offload.loader import Loader, LoadJob
from sgl_esft.offload.policies import POLICIES
from sgl_esft.offload.source import ExpertPlace
from sgl_esft.offload.tier import ExpertTier, TierLayer
from sgl_esft.platform.moe import FAILED
from tests.fast.offload.tiers import Rank, open_rank
from tests.support.streams import StreamRaceError, Streams

THREADS = 2


@contextmanager
def on_device(
    rank: Rank, num_rows: int, policy: str, rows_type: type[DeviceRows] = DeviceRows
) -> Iterator[tuple[ExpertTier, DeviceRows, Streams]]:
    """The rank's experts once more, in rows that a copy stream fills."""
    streams = Streams()
    first = rank.tier.layers[0]

    def read(place: ExpertPlace, w13: torch.Tensor, w2: torch.Tensor) -> None:
        streams.writes([w13, w2])
        rank.reader.read(place, w13, w2)

    staging = make_staging(first.w13, first.w2, THREADS, pin_memory=False)
    rows = rows_type(streams, staging, read)
    layers = [_layer(of, num_rows) for of in rank.tier.layers]
    decisions = Decisions(
        len(layers), 16, num_rows, POLICIES[policy], num_base=8, loads_per_layer=2.0
    )
    ahead = Ahead(decisions, None, lambda layer, slot, ids: ids) if policy == "stream" else None
    tier = ExpertTier(layers, decisions, lambda run: Loader(THREADS, run), rows.load, ahead)
    for index, of in enumerate(rank.tier.layers):
        tier.add(index, of.places)
    with streams.watched():
        try:
            yield tier, rows, streams
        finally:
            tier.close()


def _layer(of: TierLayer, num_rows: int) -> TierLayer:
    w13 = torch.full((num_rows, *of.w13.shape[1:]), torch.nan, dtype=of.w13.dtype)
    w2 = torch.full((num_rows, *of.w2.shape[1:]), torch.nan, dtype=of.w2.dtype)
    return TierLayer(of.layer_id, w13, w2)


def _run(rank: Rank, tier: ExpertTier, rows: DeviceRows, streams: Streams, seed: int) -> int:
    """Steps whose kernels read every row they were told of. Returns how many there were."""
    rng, num_waves = random.Random(seed), 0
    for _ in range(40):
        tier.begin(None)
        for index, layer in enumerate(tier.layers):
            needed = sorted(rng.sample(range(8), rng.choice([1, 2, 3, 8])))
            seen = []
            for wave in tier.waves(index, needed):
                num_waves += 1
                here = [row for _, row in wave]
                assert FAILED not in here
                rows.before(index, here)
                streams.reads(w[row] for row in here for w in (layer.w13, layer.w2))
                for slot, row in wave:
                    assert torch.equal(layer.w13[row], rank.w13[index][slot])
                rows.after(index, here)
                seen += [slot for slot, _ in wave]
            assert sorted(seen) == needed
    return num_waves


@pytest.fixture(scope="module")
def base(root: Path) -> Path:
    return root / "base"


@pytest.mark.parametrize("policy", ["lru", "lfu", "stream"])
@pytest.mark.parametrize("num_rows", [2, 4, 8])
def test_every_access_is_ordered(base: Path, num_rows: int, policy: str) -> None:
    with (
        open_rank(base, 2) as rank,
        on_device(rank, num_rows, policy) as (tier, rows, streams),
    ):
        num_waves = _run(rank, tier, rows, streams, num_rows)
        assert streams.num_copies > 0
        assert num_waves > 40 * 3 if num_rows == 2 else num_waves >= 40 * 3


class BlindKernel(DeviceRows):
    """Reads rows before their experts are there."""

    def before(self, layer: int, rows: Any) -> None:
        pass


class ForgetfulKernel(DeviceRows):
    """Tells nobody that it reads."""

    def after(self, layer: int, rows: Any) -> None:
        pass


class HastyRead(DeviceRows):
    """Reads into host memory that is still being copied from."""

    def load(self, job: LoadJob, w13_row: torch.Tensor, w2_row: torch.Tensor) -> None:
        place = self._free.get()
        place.emptied = None
        self._free.put(place)
        super().load(job, w13_row, w2_row)


@pytest.mark.parametrize("broken", [BlindKernel, ForgetfulKernel, HastyRead])
def test_what_is_left_out_is_a_race(base: Path, broken: type[DeviceRows]) -> None:
    """Each of the three waits is needed, and the simulator sees that it is gone."""
    with (
        open_rank(base, 2) as rank,
        on_device(rank, 3, "lru", broken) as (tier, rows, streams),
        pytest.raises((StreamRaceError, AssertionError)),
    ):
        _run(rank, tier, rows, streams, 1)


def test_a_read_that_fails_leaves_its_staging_free(base: Path) -> None:
    streams, fails = Streams(), [True]

    def read(place: ExpertPlace, w13: torch.Tensor, w2: torch.Tensor) -> None:
        if fails[0]:
            raise OSError(5, "broken")

    shape = torch.zeros((1, 4, 3))
    rows = DeviceRows(streams, make_staging(shape, shape, 1, pin_memory=False), read)
    job: Any = LoadJob(0, 0, 0, None, None)  # type: ignore[arg-type]
    for _ in range(3):
        with pytest.raises(OSError, match="broken"):
            rows.load(job, shape[0], shape[0])
    fails[0] = False
    rows.load(job, shape[0].clone(), shape[0].clone())


def test_waves_are_all_that_can_be_computed_together(base: Path) -> None:
    with open_rank(base, 3) as rank:
        rank.tier.begin(None)
        waves = [[slot for slot, _ in wave] for wave in rank.tier.waves(0, list(range(8)))]
        assert sorted(np.concatenate(waves).tolist()) == list(range(8))
        assert len(waves) == 3
        assert [len(wave) for wave in rank.tier.waves(0, [int(waves[-1][0])])] == [1]
