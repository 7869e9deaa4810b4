"""The load of the served figures: who asks what and when, sent and measured by SGLang's own client.

    Workload, adapters, alpha, seed -> [make_trace] -> arrivals
    arrivals, adapter -> Target       -> [play]       -> LoadFigures
    runs by name, rounds            -> [take_turns] -> LoadFigures of each run and round
    ServerCommand by name           -> [servers]    -> URLs, started together

Shares of adapters follow a power law with shape alpha, as S-LoRA and ExpertWeave 5.2 draw them:
adapter i of N gets ``((i + 1) / N) ** alpha - (i / N) ** alpha``. Alpha 1 is uniform, 0.32 is
80/20 between two. Each adapter's arrivals are a Poisson process. They are drawn as one process
of the whole rate whose arrivals pick an adapter by its share, which is the same thing; times,
prompts and lengths are then equal for every alpha and number of adapters.

Why not the command line of SGLang's client (``python -m sglang.bench_serving``): its shares are
equal or geometric with a ratio above 1, it talks to one server where figure 6 has two, and it
starts anew for each run, longer than a run takes. Its functions do the work here: sending
and timing a request (``async_request_sglang_generate``) and the metrics (``calculate_metrics``).

Answers are sampled at temperature 1: a random model's greedy answers end in loops, and tokens of a
loop touch few experts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.common.record import spread
from sgl_esft.zoo import serving  # sgl_esft comes before SGLang: it prepares for its imports

TIMEOUT_SECONDS = 240.0  # of a run
START_SECONDS = 600.0  # of a server, on a machine that is busy otherwise
LETTERS = "abcdefghijklmnopqrstuvwxyz "  # each is one token of the scaled model
NO_PREFIX_CACHE = ("--disable-radix-cache",)  # runs repeat their prompts


class LoadError(Exception):
    """A server did not answer a request as asked; its figures would be of something else."""


@dataclass(frozen=True)
class Workload:
    """What requests look like. Lengths are uniform in [half, one and a half] of the mean."""

    num_requests: int = 16
    mean_prompt_tokens: int = 32
    mean_output_tokens: int = 24

    def lasting(self, seconds: float, requests_per_second: float) -> Workload:
        """As many of these requests as arrive in `seconds`, at least 4."""
        return replace(self, num_requests=max(4, round(seconds * requests_per_second)))


@dataclass(frozen=True)
class Arrival:
    """One request of a trace. Adapter None is the base."""

    time_seconds: float  # since the start of the trace
    adapter: str | None
    prompt: str
    num_output_tokens: int


@dataclass(frozen=True)
class Target:
    """Where an adapter's requests go, and by which adapter name. None = the server's own model."""

    url: str
    adapter: str | None = None


@dataclass(frozen=True)
class ServerCommand:
    """How to start a server: the launcher's arguments, and the cores it may use (None = all)."""

    arguments: Sequence[str]
    cores: Sequence[int] | None = None

    def start(self, until: ExitStack) -> str:
        """Its URL once it is healthy; it ends with `until`. Raises serving.ServerError.

        Affinity is the calling thread's, and what it starts inherits it.
        """
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cores or before)
        try:
            arguments = [*self.arguments, *NO_PREFIX_CACHE]
            return until.enter_context(serving.server(arguments, START_SECONDS))
        finally:
            os.sched_setaffinity(0, before)


@dataclass(frozen=True)
class LoadFigures:
    """What the client saw in one run of a trace."""

    ttft: float  # seconds to the first token, median over requests
    ttft_p99: float
    tpot: float  # seconds for each further output token, median over requests
    tpot_p99: float
    prefill_throughput: float  # prompt tokens a second, first arrival to last answer
    decode_throughput: float  # output tokens a second
    decode_batch: float  # requests decoded together, as the average output token had it

    def over(self, base: LoadFigures) -> dict[str, float]:
        """Each figure divided by `base`'s."""
        return {
            name: getattr(self, name) / getattr(base, name)
            for name in (field.name for field in fields(self))
        }


# In the order of the paper's rows; what `over` gives beside them is no result but a cause.
METRICS = tuple(field.name for field in fields(LoadFigures) if field.name != "decode_batch")


def power_law_shares(num_adapters: int, alpha: float) -> tuple[float, ...]:
    """Share of requests of each adapter, largest first. Raises LoadError: alpha not in (0, 1]."""
    if not 0 < alpha <= 1:
        raise LoadError(f"alpha is {alpha}: give a shape above 0, at most 1, which is uniform.")
    edges = [(i / num_adapters) ** alpha for i in range(num_adapters + 1)]
    return tuple(high - low for low, high in pairwise(edges))


def make_trace(
    workload: Workload,
    requests_per_second: float,
    adapters: Sequence[str],
    alpha: float,
    seed: int,
) -> tuple[Arrival, ...]:
    """Arrivals in order of time, the same for the same arguments.

    Of times, prompts and lengths nothing depends on `adapters` or `alpha`, and times are in
    proportion to 1 / requests_per_second.
    """
    shape, choice = random.Random(seed), random.Random(f"{seed} adapters")
    shares = power_law_shares(len(adapters), alpha)
    trace, now = [], 0.0
    for _ in range(workload.num_requests):
        num_prompt_tokens = _length(shape, workload.mean_prompt_tokens)
        trace.append(
            Arrival(
                time_seconds=now,
                adapter=choice.choices(adapters, shares)[0],
                prompt="".join(shape.choices(LETTERS, k=num_prompt_tokens)),
                num_output_tokens=_length(shape, workload.mean_output_tokens),
            )
        )
        now += shape.expovariate(1) / requests_per_second
    return tuple(trace)


def all_to_base(trace: Sequence[Arrival]) -> tuple[Arrival, ...]:
    """The same requests without adapters: the paper's base-only run."""
    return tuple(replace(arrival, adapter=None) for arrival in trace)


def at_once(trace: Sequence[Arrival]) -> tuple[Arrival, ...]:
    """The same requests, all at time 0."""
    return tuple(replace(arrival, time_seconds=0.0) for arrival in trace)


def play(
    trace: Sequence[Arrival], targets: Mapping[str | None, Target], tokenizer_folder: Path
) -> LoadFigures:
    """Send each request when it is due and wait for all answers.

    targets: for each adapter of the trace. Raises LoadError where an answer fails, is cut short, or
    is not there after TIMEOUT_SECONDS.
    """
    client = _sglang_client()
    start = time.perf_counter()
    try:
        outputs = asyncio.run(asyncio.wait_for(_send_all(client, trace, targets), TIMEOUT_SECONDS))
    except TimeoutError as error:
        raise LoadError(
            f"no answer to all of {len(trace)} requests in {TIMEOUT_SECONDS:.0f} s: "
            "lower the rate or the number of requests."
        ) from error
    seconds = time.perf_counter() - start
    for arrival, output in zip(trace, outputs, strict=True):
        _check(arrival, output)
    return _figures(client, trace, outputs, seconds, tokenizer_folder)


@contextmanager
def servers(commands: Mapping[str, ServerCommand]) -> Iterator[dict[str, str]]:
    """URLs by name. All start at once: most of a start is imports. Raises serving.ServerError."""
    with ExitStack() as until:
        with ThreadPoolExecutor(len(commands)) as pool:
            starts = {name: pool.submit(c.start, until) for name, c in commands.items()}
        yield {name: start.result() for name, start in starts.items()}


def end_on_sigterm() -> None:
    """Leave by SystemExit, so that servers end too: they are in sessions of their own."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def saturated_rate(workload: Workload, target: Target, tokenizer_folder: Path) -> float:
    """Requests a second that a server answers when all come at once; a first run warms it up."""
    trace = at_once(make_trace(workload, 1.0, [""], 1.0, seed=0))
    num_tokens = sum(arrival.num_output_tokens for arrival in trace)
    runs = [play(trace, {"": target}, tokenizer_folder) for _ in range(2)]
    return runs[-1].decode_throughput * len(trace) / num_tokens


def take_turns(
    runs: Mapping[str, Callable[[int], LoadFigures]], rounds: int
) -> dict[str, list[LoadFigures]]:
    """Each run once a round, forth and back in turn; a run is given the round as its seed.

    None of them warms up: call `saturated_rate` on each server before.
    """
    taken: dict[str, list[LoadFigures]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in reversed(list(runs)) if number % 2 else list(runs):
            taken[name].append(runs[name](number))
    return taken


def ratio_spreads(
    runs: Sequence[LoadFigures], base: Sequence[LoadFigures]
) -> dict[str, dict[str, float]]:
    """Metric -> spread over rounds of run / base, each within its round."""
    ratios = [run.over(other) for run, other in zip(runs, base, strict=True)]
    return {metric: spread([ratio[metric] for ratio in ratios]) for metric in METRICS}


def decode_batch(decodes: Sequence[tuple[float, float]]) -> float:
    """Requests being decoded at once, averaged over output tokens.

    decodes: (first token, last token) of each request, in seconds. At least 1 where there are any
    of some length, else 0.
    """
    total = sum(end - start for start, end in decodes)
    together = sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for start, end in decodes
        for other_start, other_end in decodes
    )
    return together / total if total else 0.0


def _length(rng: random.Random, mean: int) -> int:
    return rng.randint(max(2, mean // 2), mean + mean // 2)


def _sglang_client() -> Any:
    """SGLang's client module, with the settings it keeps in a global."""
    from sglang.benchmark import serving

    serving.set_global_args(
        argparse.Namespace(
            temperature=1.0,
            top_p=1.0,
            disable_stream=False,
            disable_ignore_eos=False,
            return_logprob=False,
            return_routed_experts=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
        )
    )
    return serving


async def _send_all(
    client: Any, trace: Sequence[Arrival], targets: Mapping[str | None, Target]
) -> list[Any]:
    start = time.perf_counter()

    async def send(arrival: Arrival) -> Any:
        await asyncio.sleep(arrival.time_seconds - (time.perf_counter() - start))
        return await client.async_request_sglang_generate(
            _request(client, arrival, targets[arrival.adapter])
        )

    return await asyncio.gather(*map(send, trace))


def _request(client: Any, arrival: Arrival, target: Target) -> Any:
    sampling = {
        "temperature": 1.0,
        "max_new_tokens": arrival.num_output_tokens,
        "ignore_eos": True,
        "skip_special_tokens": False,  # a token without text would not count as the first one
    }
    return client.RequestFuncInput(
        prompt=arrival.prompt,
        api_url=f"{target.url}/generate",
        prompt_len=len(arrival.prompt),
        output_len=arrival.num_output_tokens,
        model="",
        lora_name=target.adapter,
        image_data=None,
        extra_request_body={"sampling_params": sampling},
    )


def _check(arrival: Arrival, output: Any) -> None:
    asked = f"a request of {arrival.num_output_tokens} tokens for {arrival.adapter or 'the base'}"
    if not output.success:
        raise LoadError(f"{asked} failed: {output.error[-800:]}")
    if output.output_len != arrival.num_output_tokens:
        raise LoadError(f"{asked} got {output.output_len} tokens: it ended early.")


def _figures(
    client: Any, trace: Sequence[Arrival], outputs: Sequence[Any], seconds: float, folder: Path
) -> LoadFigures:
    from sglang.benchmark.datasets.common import DatasetRow
    from transformers import AutoTokenizer

    rows = [DatasetRow(a.prompt, len(a.prompt), a.num_output_tokens) for a in trace]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found, _ = client.calculate_metrics(rows, list(outputs), seconds, tokenizer, "sglang")
    decodes = [(o.start_time + o.ttft, o.start_time + o.latency) for o in outputs]
    return LoadFigures(
        ttft=float(found.median_ttft_ms) / 1e3,
        ttft_p99=float(found.p99_ttft_ms) / 1e3,
        tpot=float(found.median_tpot_ms) / 1e3,
        tpot_p99=float(found.p99_tpot_ms) / 1e3,
        prefill_throughput=found.input_throughput,
        decode_throughput=found.output_throughput,
        decode_batch=decode_batch(decodes),
    )
