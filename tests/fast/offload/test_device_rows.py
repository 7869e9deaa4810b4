"""Rows of an accelerator, over simulated streams: no kernel reads what is not there yet."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sgl_esft.errors import ConfigError, InvariantError
from sgl_esft.offload.ahead import Ahead
from sgl_esft.offload.decisions import Decisions
from sgl_esft.offload.device_rows import DeviceRows, key_of, make_seats, page_lock, seat_bytes
from sgl_esft.offload.host_tier import HostTier
from sgl_esft.offload.link import make_loader
from sgl_esft.offload.loader import LoadJob, num_readers
from sgl_esft.offload.policies import POLICIES
from sgl_esft.offload.source import ExpertPlace
from sgl_esft.offload.tier import ExpertTier, TierLayer
from sgl_esft.platform.moe import FAILED
from tests.fast.offload.tiers import Rank, open_rank
from tests.support.streams import StreamRaceError, Streams

THREADS = 2


@contextmanager
def on_device(
    rank: Rank,
    num_rows: int,
    policy: str,
    rows_type: type[DeviceRows] = DeviceRows,
    num_kept: int = 0,
) -> Iterator[tuple[ExpertTier, DeviceRows, Streams]]:
    """The rank's experts once more, in rows that a copy stream fills.

    num_kept: experts that host memory has room for; 0 = it keeps none.
    """
    streams = Streams()
    first = rank.tier.layers[0]

    def read(place: ExpertPlace, *parts: torch.Tensor) -> None:
        streams.writes(parts)
        rank.reader.read(place, *parts)

    seats = make_seats((first.w13, first.w2), num_kept or num_readers(THREADS))
    rows = rows_type(streams, seats, read, HostTier(len(seats), keeps=num_kept > 0))
    layers = [_layer(of, num_rows) for of in rank.tier.layers]
    decisions = Decisions(
        len(layers), 16, num_rows, POLICIES[policy], num_base=8, loads_per_layer=2.0
    )
    ahead = Ahead(decisions, None, lambda layer, slot, ids: ids) if policy == "stream" else None
    tier = ExpertTier(
        layers, decisions, partial(make_loader, rank.reader, THREADS), rows.load, ahead
    )
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
@pytest.mark.parametrize(
    ("num_rows", "num_kept"), [(2, 0), (4, 0), (8, 0), (2, 4), (4, 9), (3, 24)]
)
def test_every_access_is_ordered(base: Path, num_rows: int, num_kept: int, policy: str) -> None:
    """Bits too: every row that a kernel reads is compared with the expert in the file."""
    with (
        open_rank(base, 2) as rank,
        on_device(rank, num_rows, policy, num_kept=num_kept) as (tier, rows, streams),
    ):
        num_waves = _run(rank, tier, rows, streams, num_rows)
        assert streams.num_copies > 0
        assert num_waves > 40 * 3 if num_rows == 2 else num_waves >= 40 * 3
        rows._tier.check_integrity()
        _check_counts(rank, tier, rows, streams, num_kept)


def _check_counts(
    rank: Rank, tier: ExpertTier, rows: DeviceRows, streams: Streams, num_kept: int
) -> None:
    """Every load came from storage or from host memory; with room for all, hardly from storage."""
    found, read = rows.host_counts, rank.reader.counts
    assert streams.num_copies == 2 * (found.num_experts + read.num_experts)
    assert found.num_bytes == found.num_experts * rows._seats[0].num_bytes
    assert len(rows._tier.held) <= num_kept
    if not num_kept:
        assert found.num_experts == 0
    if num_kept == 8 * len(tier.layers):  # two threads may have read the same
        assert read.num_experts <= 1.25 * num_kept < found.num_experts


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

    def load(self, job: LoadJob, *row: torch.Tensor) -> None:
        for seat in self._seats:
            seat.emptied = None
        super().load(job, *row)


@pytest.mark.parametrize("num_kept", [0, 4])
@pytest.mark.parametrize("broken", [BlindKernel, ForgetfulKernel, HastyRead])
def test_what_is_left_out_is_a_race(base: Path, broken: type[DeviceRows], num_kept: int) -> None:
    """Each of the three waits is needed, and the simulator sees that it is gone."""
    with (
        open_rank(base, 2) as rank,
        on_device(rank, 3, "lru", broken, num_kept) as (tier, rows, streams),
        pytest.raises((StreamRaceError, AssertionError)),
    ):
        _run(rank, tier, rows, streams, 1)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_read_that_fails_leaves_nothing(keeps: bool) -> None:
    """Its seat is free, and half of an expert is not found there by the next load."""
    streams, fails, reads = Streams(), [True], [0]

    def read(place: ExpertPlace, w13: torch.Tensor, w2: torch.Tensor) -> None:
        reads[0] += 1
        w13.fill_(float(reads[0]))
        if fails[0]:
            raise OSError(5, "broken")
        w2.fill_(float(reads[0]))

    row = torch.zeros((1, 4, 3))
    tier = HostTier(1, keeps=keeps)
    rows = DeviceRows(streams, make_seats((row, row), 1), read, tier, key=lambda place: "expert")
    job: Any = LoadJob(0, 0, 0, None, None)  # type: ignore[arg-type]
    w13, w2 = row[0].clone(), row[0].clone()
    for _ in range(3):
        with pytest.raises(OSError, match="broken"):
            rows.load(job, w13, w2)
        assert tier.held == ()
        assert not w13.any()
    fails[0] = False
    for _ in range(2):
        rows.load(job, w13, w2)
    assert reads[0] == (4 if keeps else 5)
    assert torch.equal(w13, w2)
    assert w13[0, 0].item() == reads[0]
    assert rows.host_counts.num_experts == (1 if keeps else 0)


def test_who_leaves_a_row_is_kept_longer_than_who_came_before(base: Path) -> None:
    """Leaving a row is a use: the expert may be asked for again, and is in no row any more."""
    row = torch.zeros((1, 4, 3))
    tier = HostTier(3, keeps=True)
    rows = DeviceRows(
        Streams(), make_seats((row, row), 3), lambda *_: None, tier, key=lambda place: place
    )

    def load(expert: str, into: int) -> None:
        job: Any = LoadJob(0, 0, into, None, expert)  # type: ignore[arg-type]
        rows.load(job, row[0].clone(), row[0].clone())

    load("a", 0)
    load("b", 1)
    load("c", 0)
    assert tier.held == ("b", "c", "a")


def test_the_same_expert_is_known_by_its_file(base: Path) -> None:
    """Also when its files were opened anew; and no key keeps one open."""
    with open_rank(base, 2) as one, open_rank(base, 2) as other:
        layers = one.spec.moe_layer_ids
        first, again = (rank.source.place(None, layers[0], 0) for rank in (one, other))
        assert first != again
        assert key_of(first) == key_of(again)
        places = [one.source.place(None, layer, e) for layer in layers for e in range(8)]
        assert len({key_of(place) for place in places}) == 8 * len(layers)


def test_seats_are_one_piece_of_whole_pages_and_no_more() -> None:
    locked: list[tuple[int, int]] = []
    rows = (torch.zeros((7, 6, 100), dtype=torch.bfloat16), torch.zeros((7, 5)))
    seats = make_seats(rows, 3, lambda address, num_bytes: locked.append((address, num_bytes)))
    assert seat_bytes(rows) == 2 * 4096
    [(address, num_bytes)] = locked
    assert num_bytes == 3 * seat_bytes(rows)
    places = [part.data_ptr() - address for seat in seats for part in seat.parts]
    assert places == [4096 * n for n in range(6)]
    assert [part.shape for part in seats[0].parts] == [(6, 100), (5,)]
    assert seats[0].num_bytes == 6 * 100 * 2 + 5 * 4
    with pytest.raises(InvariantError, match="3 seats, a tier of 2"):
        DeviceRows(Streams(), seats, lambda *_: None, HostTier(2, keeps=True))


def test_memory_that_cannot_be_locked_is_refused_by_name() -> None:
    class Runtime:
        """As `torch.cuda.cudart()`: an error code."""

        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            return 0 if num_bytes <= 4096 else 2

    page_lock(Runtime())(0, 4096)
    with pytest.raises(ConfigError, match=r"gave 2.*smaller --expert-host-memory"):
        page_lock(Runtime())(0, 8192)


def test_waves_are_all_that_can_be_computed_together(base: Path) -> None:
    with open_rank(base, 3) as rank:
        rank.tier.begin(None)
        waves = [[slot for slot, _ in wave] for wave in rank.tier.waves(0, list(range(8)))]
        assert sorted(np.concatenate(waves).tolist()) == list(range(8))
        assert len(waves) == 3
        assert [len(wave) for wave in rank.tier.waves(0, [int(waves[-1][0])])] == [1]
