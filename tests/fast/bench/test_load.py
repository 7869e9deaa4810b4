"""The load of the served figures: shares, traces, figures, and a client that notices failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest

from bench.common import load
from bench.common.load import Arrival, LoadError, LoadFigures, Target, Workload
from tests.support.loopback import JsonHandler, served, url_of

NAMES = [f"a{i:02}" for i in range(20)]
MANY = Workload(num_requests=4000)


def figures(scale: float) -> LoadFigures:
    return LoadFigures(*(scale * i for i in range(1, 8)))


@pytest.mark.parametrize(
    ("num_adapters", "alpha", "hot"),
    [(2, 1.0, 0.5), (2, 0.32, 0.801), (2, 0.2, 0.871), (2, 0.1, 0.933), (20, 0.1, 0.741)],
)
def test_shares_are_those_of_the_power_law(num_adapters: int, alpha: float, hot: float) -> None:
    shares = load.power_law_shares(num_adapters, alpha)
    assert sum(shares) == pytest.approx(1)
    assert shares[0] == pytest.approx(hot, abs=5e-4)
    assert list(shares) == sorted(shares, reverse=True) or alpha == 1.0


def test_a_trace_has_the_shares_and_the_rate_it_was_asked_for() -> None:
    trace = load.make_trace(MANY, 5.0, NAMES, 0.3, seed=1)
    counts = Counter(arrival.adapter for arrival in trace)
    found = [counts[name] / len(trace) for name in NAMES]
    assert found == pytest.approx(load.power_law_shares(20, 0.3), abs=0.02)
    gaps = [later.time_seconds - sooner.time_seconds for sooner, later in pairwise(trace)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 5.0, rel=0.05)
    # Of a Poisson process: the gaps' standard deviation is their mean.
    assert (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.1)


@pytest.mark.parametrize(
    ("decodes", "expected"),
    [
        ([], 0.0),
        ([(1.0, 1.0)], 0.0),  # one token: nothing is decoded
        ([(0.0, 2.0)], 1.0),
        ([(0.0, 2.0), (2.0, 3.0)], 1.0),
        ([(0.0, 2.0)] * 3, 3.0),
        # Half of the first one's tokens, and all of the other's, are of steps of two.
        ([(0.0, 2.0), (1.0, 2.0)], (1 * 1 + 2 * 2) / 3),
    ],
)
def test_decode_batch_is_what_the_average_token_had(
    decodes: list[tuple[float, float]], expected: float
) -> None:
    assert load.decode_batch(decodes) == pytest.approx(expected)


def test_runs_take_turns_and_are_compared_within_their_round() -> None:
    asked: list[tuple[str, int]] = []

    def run(name: str, seed: int) -> LoadFigures:
        asked.append((name, seed))
        return figures({"base": 1.0, "woven": 2.0}[name] * (1 + seed))

    taken = load.take_turns(
        {"base": lambda seed: run("base", seed), "woven": lambda seed: run("woven", seed)}, 3
    )
    assert asked == [
        *(("base", 0), ("woven", 0)),
        *(("woven", 1), ("base", 1)),
        *(("base", 2), ("woven", 2)),
    ]
    ratios = load.ratio_spreads(taken["woven"], taken["base"])
    assert set(ratios) == set(load.METRICS)
    all_two = dict.fromkeys(("min", "q1", "median", "q3", "max"), 2.0)
    assert ratios["tpot"] == {"runs": len(taken["base"]), **all_two}


class Answers(JsonHandler):
    """A server of SGLang's stream format: `x` at each token asked for, or what goes wrong."""

    bodies: list[dict[str, object]]

    def do_POST(self) -> None:
        body = self.read_json()
        self.bodies.append(body)
        if body["lora_path"] == "missing":
            self.send_error(404, "not loaded")
            return
        tokens = 1 if body["lora_path"] == "short" else body["sampling_params"]["max_new_tokens"]
        self.send_events(
            {"text": "x" * i, "meta_info": {"completion_tokens": i}} for i in range(1, tokens + 1)
        )


@pytest.fixture
def url() -> Iterator[str]:
    Answers.bodies = []
    with served(ThreadingHTTPServer(("127.0.0.1", 0), Answers)) as server:
        yield url_of(server)


def tokenizer_folder(folder: Path) -> Path:
    from sgl_esft.zoo import tokenizer

    tokenizer.save(folder)
    return folder


def test_sglangs_client_sends_each_request_to_its_target(url: str, tmp_path: Path) -> None:
    trace = (Arrival(0.0, "a", "abc", 3), Arrival(0.05, None, "de", 2))
    targets = {"a": Target(url, "adapter"), None: Target(url)}
    found = load.play(trace, targets, tokenizer_folder(tmp_path))
    assert [(b["text"], b["lora_path"]) for b in Answers.bodies] == [
        ("abc", "adapter"),
        ("de", None),
    ]
    assert [b["sampling_params"]["max_new_tokens"] for b in Answers.bodies] == [3, 2]
    assert found.decode_throughput / found.prefill_throughput == pytest.approx(1)  # 5 tokens each
    assert 0 < found.ttft <= found.ttft_p99
    assert 0 < found.tpot <= found.tpot_p99


@pytest.mark.parametrize(
    ("adapter", "said"), [("missing", "for missing failed: not loaded"), ("short", "got 1 tokens")]
)
def test_a_bad_answer_is_an_error_and_not_a_figure(
    url: str, tmp_path: Path, adapter: str, said: str
) -> None:
    trace = (Arrival(0.0, adapter, "abc", 3),)
    with pytest.raises(LoadError, match=said):
        load.play(trace, {adapter: Target(url, adapter)}, tokenizer_folder(tmp_path))
