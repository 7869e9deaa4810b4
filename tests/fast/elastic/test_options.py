"""The elastic flags: defaults, what is left for others, what cannot work."""

from __future__ import annotations

import pytest

from sgl_elastic import options
from sgl_elastic.errors import ElasticConfigError
from sgl_elastic.front.rank_choice import RankStrategy
from sgl_esft.errors import ConfigError


def test_defaults() -> None:
    found, rest = options.parse(["--elastic"])
    assert rest == []
    assert (found.dp_size, found.max_devices) == (1, 4)
    assert found.device_bytes == 1 << 30
    assert found.kv_limit == options.DEFAULT_KV_TOKENS
    assert found.rank_strategy == RankStrategy.ADAPTER
    assert found.autoscale is None
    assert not found.verify_copies
    assert not found.spans_nodes


def test_what_is_not_ours_is_left_in_its_order() -> None:
    line = "--model-path BASE --elastic --dp-size 2 --esft-adapters a=A b=B --port 1 --max 9"
    found, rest = options.parse(line.split())
    assert found.dp_size == 2
    assert " ".join(rest) == "--model-path BASE --esft-adapters a=A b=B --port 1 --max 9"


def test_values() -> None:
    line = (
        "--elastic --max-devices 8 --dp 3 --device-memory 64MiB --max-total-tokens 100 "
        "--standby-ranks 0 --rank-choice round_robin --slo-ttft 2 --slo-tpot 0.5 "
        "--scale-journal J --verify-copies --nodes ray --ray-address h:1 --devices-per-node 2"
    )
    policy = '{"min_devices": 1, "max_devices": 3}'
    found, rest = options.parse([*line.split(), "--autoscale", policy])
    assert rest == []
    assert (found.max_devices, found.dp_size, found.device_bytes) == (8, 3, 64 << 20)
    assert (found.kv_limit, found.standby_ranks) == (100, 0)
    assert found.rank_strategy == RankStrategy.ROUND_ROBIN
    assert (found.slo_ttft_s, found.slo_tpot_s) == (2.0, 0.5)
    assert (found.journal, found.verify_copies) == ("J", True)
    assert (found.autoscale.min_devices, found.autoscale.max_devices) == (1, 3)
    assert found.spans_nodes
    assert (found.ray_address, found.devices_per_node) == ("h:1", 2)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("--dp-size 0", "--dp-size 0 and --max-devices 4"),
        ("--dp-size 5", "no more ranks than devices"),
        ("--max-devices 0", "--max-devices 0"),
        ("--max-devices 1025", "at most 1024"),
        ("--max-total-tokens -1", "--max-total-tokens -1"),
        ("--standby-ranks -1", "--standby-ranks -1"),
        ("--spare-ranks -1", "--spare-ranks -1"),
        ("--spare-ranks 17", "--spare-ranks 17: 0 to 16"),
        ("--nodes ray --spare-ranks 1", "spares are for one machine"),
        ("--autoscale {", "autoscale policy is '{'"),
        ("--autoscale []", "Give a JSON object of numbers"),
        ("--ray-address h:1", "they need --nodes ray"),
        ("--devices-per-node 2", "they need --nodes ray"),
        ("--nodes ray --devices-per-node 0", "--devices-per-node 0"),
        ("--nodes ray --scale-strategy cold_restart", "for one machine"),
        ("--nodes ray --ablate no_standby", "for one machine"),
        ("--redundant-experts -1", "--redundant-experts -1"),
        ("--redundant-experts 2 --max-devices 1", "--max-devices 2 or more"),
        ("--redundant-experts 2 --nodes ray", "on one machine"),
        ("--redundant-experts 2 --scale-strategy cold_restart", "elastic strategy only"),
        ("--redundant-experts 2 --ablate no_peer_copy", "elastic strategy only"),
    ],
)
def test_what_cannot_work(line: str, complaint: str) -> None:
    with pytest.raises(ElasticConfigError) as raised:
        options.parse(["--elastic", *line.split()])
    assert complaint in str(raised.value)


@pytest.mark.parametrize(
    ("line", "backend", "number"),
    [
        ("", "host", 1),
        ("", "cuda", 0),
        ("--nodes ray", "host", 0),
        ("--spare-ranks 0", "host", 0),
        ("--spare-ranks 3", "host", 3),
        ("--ablate no_standby", "host", 0),
        ("--scale-strategy cold_restart --spare-ranks 2", "host", 0),
    ],
)
def test_spares_are_where_they_can_be_and_never_with_a_baseline(
    line: str, backend: str, number: int
) -> None:
    found, _ = options.parse(["--elastic", *line.split()])
    assert found.spares_on(backend) == number


def test_only_with_copies_does_it_matter_where_a_token_comes_from() -> None:
    for line, num_copies, num_sources in (("", 0, 1), ("--redundant-experts 3", 3, 8)):
        found, _ = options.parse(["--elastic", "--max-devices", "8", *line.split()])
        assert (found.redundant_experts, found.num_sources) == (num_copies, num_sources)


def test_a_size_that_is_none() -> None:
    with pytest.raises(ConfigError, match="--device-memory"):
        options.parse(["--device-memory", "lots"])


@pytest.mark.parametrize(
    "line",
    [
        "--max-devices four",
        "--spare-ranks some",
        "--max-devices",
        "--rank-choice fastest",
        "--slo-ttft 0",
        "--slo-tpot nan",
        "--hang-timeout inf",
    ],
)
def test_a_bad_value_names_its_flag(line: str) -> None:
    with pytest.raises(ElasticConfigError) as raised:
        options.parse(line.split())
    assert str(raised.value).startswith(line.split(maxsplit=1)[0])
    assert "\n" not in str(raised.value)
