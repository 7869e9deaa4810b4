"""Every rank of a server has a place of its own on the heartbeats."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sgl_esft import sglang_api


def parallel(**fields: int | bool | None) -> SimpleNamespace:
    one = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "nnodes": 1, "attn_dp_enabled": False}
    return SimpleNamespace(**{**one, "tp_rank": 0, "pp_rank": 0, "dp_rank": None, **fields})


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({}, [{}]),
        ({"tp_size": 2}, [{"tp_rank": 0}, {"tp_rank": 1}]),
        # Under DP attention data parallel ranks are ranks of one TP group.
        (
            {"tp_size": 2, "attn_dp_enabled": True},
            [{"tp_rank": 0, "dp_rank": 0}, {"tp_rank": 1, "dp_rank": 1}],
        ),
        ({"dp_size": 2}, [{"dp_rank": 0}, {"dp_rank": 1}]),
        (
            {"tp_size": 2, "pp_size": 2, "dp_size": 2},
            [
                {"dp_rank": dp, "pp_rank": pp, "tp_rank": tp}
                for dp in range(2)
                for pp in range(2)
                for tp in range(2)
            ],
        ),
    ],
)
def test_numbers_of_ranks(
    sizes: dict[str, int], ranks: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for rank in ranks:
        monkeypatch.setattr(sglang_api, "get_parallel", lambda rank=rank: parallel(**sizes, **rank))
        found.append(sglang_api.rank_in_server())
    assert found == list(range(sglang_api.num_ranks()))
