"""Tags under DP attention: as many rows as the batch says, whatever SGLang's globals hold."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_esft.errors import InvariantError
from sgl_esft.plugin.build import _gather_tags
from sgl_esft.weave.batch_tags import PADDING

RANK = 1  # of three


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """What this rank hands to the gather, whose other ranks have nothing but padding."""
    from sglang.srt.layers import dp_attention

    from sgl_esft import sglang_api

    handed: list[list[float]] = []

    def gather(whole: torch.Tensor, local: torch.Tensor, forward_batch: Any) -> None:
        handed.append(local[:, 0].tolist())
        counts = forward_batch.global_num_tokens_cpu
        whole.view(-1).split(counts)[RANK].copy_(local[:, 0])

    monkeypatch.setattr(sglang_api, "dp_gather", gather)
    monkeypatch.setattr(sglang_api, "dp_slot_in", lambda counts: RANK)
    # Of the batch before: a replay never sets them, and neither does a graph's first batch.
    dp_attention.set_dp_buffer_len(7, 1, True, [1, 1, 5])
    return handed


def batch(counts: Sequence[int] | None) -> SimpleNamespace:
    return SimpleNamespace(global_num_tokens_cpu=counts, input_ids=torch.zeros(1))


@pytest.mark.parametrize(
    ("counts", "tags"),
    [
        ([4, 4, 4], [2, -1]),  # a captured batch: all ranks as long as the longest
        ([3, 2, 6], [2, -1]),
        ([3, 2, 0], []),  # an idle rank among padding, and one without a row
        ([3, 0, 2], []),  # no row at all, and still part of the gather
    ],
)
def test_lengths_are_the_batchs_own(
    gathered: list[list[float]], counts: list[int], tags: list[int]
) -> None:
    found = _gather_tags()(torch.tensor(tags, dtype=torch.int32), batch(counts))
    own = tags + [PADDING] * (counts[RANK] - len(tags))
    others = [[PADDING] * count for count in counts]
    assert found.tolist() == [*others[0], *own, *others[2]]
    assert len(gathered) == 1
    assert len(gathered[0]) == counts[RANK]


def test_a_batch_without_lengths_is_refused(gathered: list[list[float]]) -> None:
    with pytest.raises(InvariantError, match="how many tokens each rank has"):
        _gather_tags()(torch.tensor([0], dtype=torch.int32), batch(None))
    assert not gathered
