"""Inputs of rerouting for the tests of every implementation, and where each value came from.

    cases() -> Case -> make(device) -> topk_ids, token_adapter_slots, expert_map
    those -> where_asked, where_drawn -> where: the rows of a smaller tensor, for experts in tiers

A map's values name their cell, so that no wrong lookup gives a right answer; so do the rows.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from sgl_esft_kernels import NOT_HERE

TOKEN_COUNTS = (0, 1, 2, 3, 7, 133, 4096)
POPULARITIES = ("all base", "one adapter", "distinct", "uniform", "zipf", "skewed")
TOP_KS = tuple(range(1, 9))
ADAPTER_COUNTS = (0, 1, 2, 5, 20, 64)
EXPERT_COUNTS = (8, 64, 160)
DTYPES = (torch.int32, torch.int64)
SHARES_OF_NONE = (0.0, 0.2, 1.0)

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One batch and one map. The same case always has the same numbers.

    popularity: how often each adapter is asked for, of POPULARITIES.
    share_of_none: share of expert ids that are -1.
    num_padding: tokens at the end with tag -1 and no expert at all; at most num_tokens.
    """

    popularity: str = "uniform"
    num_tokens: int = 7
    k: int = 6
    num_adapters: int = 5
    num_experts: int = 64
    dtype: torch.dtype = torch.int32
    is_expert_parallel: bool = False
    share_of_none: float = 0.0
    num_padding: int = 0

    def __str__(self) -> str:
        marks = ["ep"] * self.is_expert_parallel
        marks += [f"none{self.share_of_none}"] * (self.share_of_none > 0)
        marks += [f"pad{self.num_padding}"] * (self.num_padding > 0)
        sizes = f"T{self.num_tokens}-k{self.k}-N{self.num_adapters}-M{self.num_experts}"
        dtype = str(self.dtype).removeprefix("torch.")
        return "-".join([self.popularity.replace(" ", "_"), sizes, dtype, *marks])

    def make(self, device: str | torch.device = "cpu") -> Inputs:
        """topk_ids [num_tokens, k], token_adapter_slots [num_tokens], expert_map [N + 1, M]."""
        rng = random.Random(str(self))
        topk_ids, tags = self._topk_ids(rng), self._tags(rng)
        if self.num_padding:
            topk_ids[-self.num_padding :] = -1
            tags[-self.num_padding :] = -1
        return topk_ids.to(device), tags.to(device), self._expert_map(rng).to(device)

    def _topk_ids(self, rng: random.Random) -> torch.Tensor:
        shape = (self.num_tokens, self.k)
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        ids = torch.randint(0, self.num_experts, shape, generator=generator, dtype=self.dtype)
        return ids.masked_fill_(torch.rand(shape, generator=generator) < self.share_of_none, -1)

    def _tags(self, rng: random.Random) -> torch.Tensor:
        slots = range(-1, self.num_adapters)
        if self.popularity == "distinct":
            tags = [slots[i % len(slots)] for i in range(self.num_tokens)]
        else:
            tags = rng.choices(slots, _weights(self.popularity, slots), k=self.num_tokens)
        return torch.tensor(tags, dtype=torch.int32)

    def _expert_map(self, rng: random.Random) -> torch.Tensor:
        shape = (self.num_adapters + 1, self.num_experts)
        cells = torch.arange(shape[0] * shape[1], dtype=torch.int32).view(shape)
        if self.is_expert_parallel:
            foreign = torch.tensor([rng.random() < 0.5 for _ in range(self.num_experts)])
            cells = cells.masked_fill(foreign, -1)
        return cells


def _weights(popularity: str, slots: range) -> list[float]:
    """How often each of slots -1, 0, 1, ... is drawn."""
    return {
        "all base": [float(slot == -1) for slot in slots],
        "one adapter": [float(slot == slots[-1]) for slot in slots],
        "uniform": [1.0 for _ in slots],
        "zipf": [1 / (2 + slot) for slot in slots],
        "skewed": [100.0 if slot == 0 or len(slots) == 1 else 1.0 for slot in slots],
    }[popularity]


def naive(topk_ids: torch.Tensor, tags: torch.Tensor, table: torch.Tensor) -> list[list[int]]:
    """The definition, one lookup at a time in Python."""
    rows = table.tolist()
    base = len(rows) - 1
    return [
        [rows[base if tag == -1 else tag][expert] if expert >= 0 else -1 for expert in experts]
        for tag, experts in zip(tags.tolist(), topk_ids.tolist(), strict=True)
    ]


def naive_rows(inputs: Inputs, where: torch.Tensor) -> list[list[int]]:
    """The definition with `where`: -1 stays -1, and NOT_HERE is found as it lies there."""
    rows = where.tolist()
    return [[rows[slot] if slot >= 0 else -1 for slot in slots] for slots in naive(*inputs)]


def where_asked(inputs: Inputs) -> torch.Tensor:
    """[num_slots] int32: of all slots of the map only those that this batch asks for are here.

    The last slot's row is 0 and the first's the last: no row is its slot, but for the middle one's.
    """
    num_slots = inputs[2].numel()
    where = torch.full((num_slots,), NOT_HERE, dtype=torch.int32)
    for slot in {slot for slots in naive(*inputs) for slot in slots} - {-1}:
        where[slot] = num_slots - 1 - slot
    return where.to(inputs[0].device)


def where_drawn(inputs: Inputs) -> torch.Tensor:
    """[num_slots] int32: every third slot of the map is not here, whoever asks for it."""
    num_slots = inputs[2].numel()
    where = torch.arange(num_slots - 1, -1, -1, dtype=torch.int32)
    where[::3] = NOT_HERE
    return where.to(inputs[0].device)


def cases() -> list[Case]:
    """A covering set: every value of every axis, and every popularity at every token count."""
    axes = zip(
        itertools.product(POPULARITIES, TOKEN_COUNTS),
        itertools.cycle(TOP_KS),
        itertools.cycle((*ADAPTER_COUNTS[::-1], 1)),
        itertools.cycle((*EXPERT_COUNTS, 64, 8)),
        itertools.cycle((*DTYPES, torch.int32)),
        itertools.cycle((False, True, True, False, True)),
        itertools.cycle((*SHARES_OF_NONE[:2], 0.0, 0.2)),
        itertools.cycle((0, 2, 0)),
        strict=False,
    )
    found = [
        Case(popularity, tokens, k, adapters, experts, dtype, ep, none, min(padding, tokens))
        for (popularity, tokens), k, adapters, experts, dtype, ep, none, padding in axes
    ]
    extremes = [
        Case(share_of_none=1.0),
        Case(num_tokens=3, num_padding=3, dtype=torch.int64),
        Case("distinct", 133, 6, 64, 160, is_expert_parallel=True, share_of_none=0.2),
        Case("one adapter", 1, 1, 1, 8),
    ]
    return found + extremes


@st.composite
def random_cases(draw: st.DrawFn, *, max_tokens: int = 300) -> Case:
    """Any case. Shrinks towards few tokens of the base."""
    num_tokens = draw(st.integers(0, max_tokens))
    return Case(
        popularity=draw(st.sampled_from(POPULARITIES)),
        num_tokens=num_tokens,
        k=draw(st.integers(1, 8)),
        num_adapters=draw(st.integers(0, 64)),
        num_experts=draw(st.integers(1, 160)),
        dtype=draw(st.sampled_from(DTYPES)),
        is_expert_parallel=draw(st.booleans()),
        share_of_none=draw(st.sampled_from(SHARES_OF_NONE)),
        num_padding=draw(st.integers(0, min(num_tokens, 5))),
    )
