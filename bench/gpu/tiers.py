"""Experts in tiers on a GPU beside all experts in its memory, for bench/gpu/run.py.

    serve.py's files, some adapters -> servers: the plain base, all experts resident, and tiers
    the same prompts to all, of the base and of each adapter
    -> log-probabilities of prompts (prefill, in waves), and of greedy answers (decode, in graphs):
       those by the server that gave them, and by the resident one that reads them as a prompt
    off to be no more than rounding, an adapter clearly another model (equality.why_not)
    -> milliseconds a token at batch 1, and what the tiers counted

A prompt's rounding is that of the base, resident beside plain; an answer's, the resident server's
own, decoded beside read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.common.record import spread
from bench.finemoe.tier_servers import read_counted
from bench.gpu import equality, serve
from bench.gpu.servers import held, wait_seconds
from sgl_esft.zoo import serving

NUM_ADAPTERS = 3
NUM_NEW_TOKENS = 24
PLAIN, RESIDENT = "plain", "resident"
_ROUNDS = 5
_TIMED_TOKENS = 64

Figures = dict[str, Any]
Model = str | None  # an adapter's name; None = the base
Prompts = Sequence[Sequence[int]]


def servers_of(files: serve.Files, device: str) -> dict[str, list[str]]:
    """Arguments of each server; with rows for some of the base's experts, and for one token's."""
    few, some = files.config["num_experts_per_tok"], files.config["n_routed_experts"] * 3 // 8
    tiers = {
        f"{some} rows": ["--expert-cache", f"{some}"],
        f"{few} rows": ["--expert-cache", f"{few}"],
    }
    if device == "cuda":
        cached = tiers[f"{some} rows"]
        tiers[f"{some} rows, host memory"] = [*cached, "--expert-host-memory", "4GiB"]
        tiers[f"{some} rows, no graphs"] = [*cached, "--disable-cuda-graph"]
    woven = [*serve.woven_arguments(files, device, equality.NUM_PROMPTS), "--enable-metrics"]
    return {
        PLAIN: serve.plain_arguments(files, device, equality.NUM_PROMPTS),
        RESIDENT: woven,
        **{name: [*woven, *flags] for name, flags in tiers.items()},
    }


def measure(size: serve.Size, root: Path = serve.ROOT / "build" / "gpu-serve") -> Figures:
    """Every server with tiers beside the resident one.

    With `failed`, why they are no result: a server that did not come up, or a row's reason.
    """
    size = serve.few_layers(size)
    files = serve.write_files(size, root, serve.layers_of(size))
    names = tuple(itertools.islice(files.adapters, NUM_ADAPTERS))
    files = replace(files, adapters={name: files.adapters[name] for name in names})
    prompts = equality.prompts_of(files.config["vocab_size"], size.prompt_tokens)
    commands = servers_of(files, "cuda" if torch.cuda.is_available() else "cpu")
    rows: list[Figures] = []
    counted, timed = {}, {}
    with held(commands, wait_seconds(size.start_seconds)) as servers:
        failed = [f"{name}: {why}" for name, why in servers.failed.items()]
        if {PLAIN, RESIDENT} <= servers.urls.keys():
            reference = reference_of(servers.urls, names, prompts)
            tiers = {n: url for n, url in servers.urls.items() if n not in (PLAIN, RESIDENT)}
            for name, url in tiers.items():
                rows += [{"server": name, **row} for row in compared(url, reference)]
                counted[name] = asdict(read_counted(url))
            timed = {
                name: milliseconds_a_token(url, prompts[0]) for name, url in servers.urls.items()
            }
    failed += [f"{row['server']}, {row['model']}: {row['why']}" for row in rows if "why" in row]
    figures = {
        "num_layers": files.config["num_hidden_layers"],
        "rows": rows,
        "counted": counted,
        "milliseconds_a_token": timed,
    }
    return {**figures, "failed": "; ".join(failed)} if failed else figures


# ---- what is compared ----


@dataclass(frozen=True)
class Answers:
    """What a server says of `model`: [prompts x their tokens - 1] float64, and of the tokens that
    it answers [prompts x NUM_NEW_TOKENS], decoded, and read by the resident server.
    """

    prompts: torch.Tensor
    decoded: torch.Tensor
    read: torch.Tensor


@dataclass(frozen=True)
class Reference:
    """The resident server and what it says; `plain`: of the base's prompts."""

    url: str
    asked: Prompts
    plain: torch.Tensor
    answers: Mapping[Model, Answers]


def reference_of(urls: Mapping[str, str], names: Sequence[str], prompts: Prompts) -> Reference:
    """Of the base and of each adapter."""
    url = urls[RESIDENT]
    answers = {model: answers_of(url, url, prompts, model) for model in (None, *names)}
    plain = equality.log_probabilities(urls[PLAIN], prompts)
    return Reference(url, prompts, plain, answers)


def answers_of(url: str, resident: str, prompts: Prompts, model: Model) -> Answers:
    """Greedy, all prompts in one batch."""
    body = _body(prompts, model, NUM_NEW_TOKENS)
    given = serving.post(f"{url}/generate", body)
    steps = [each["meta_info"]["output_token_logprobs"] for each in given]
    texts = [[*p, *(token for _, token, _ in s)] for p, s in zip(prompts, steps, strict=True)]
    read = equality.log_probabilities(resident, texts, model).reshape(len(texts), -1)
    return Answers(
        equality.log_probabilities(url, prompts, model),
        torch.tensor([[value for value, *_ in each] for each in steps], dtype=torch.float64),
        read[:, -NUM_NEW_TOKENS:],
    )


def _body(prompts: Prompts, model: Model, num_tokens: int) -> dict[str, Any]:
    return {
        "input_ids": prompts,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": num_tokens,
            "ignore_eos": True,
        },
        "return_logprob": True,
        **({} if model is None else {"lora_path": [model] * len(prompts)}),
    }


def compared(url: str, reference: Reference) -> Iterator[Figures]:
    """Rows of a server with tiers: prompts and answers of the base and of each adapter; with `why`
    where one is no result.
    """
    base = reference.answers[None]
    first = next(model for model in reference.answers if model is not None)
    for model, resident in reference.answers.items():
        tiered = answers_of(url, reference.url, reference.asked, model)
        other = reference.answers[first] if model is None else base
        prompts = {
            "rounding": _off(base.prompts, reference.plain),
            "off": _off(tiered.prompts, resident.prompts),
            "distance": _off(resident.prompts, other.prompts),
        }
        # As far apart as their prompts are: no other model reads these answers.
        answers = {
            "rounding": _off(resident.decoded, resident.read),
            "off": _off(tiered.decoded, tiered.read),
            "distance": prompts["distance"],
        }
        for phase, found in (("prompts", prompts), ("answers", answers)):
            why = equality.why_not(found)
            row = {"model": model or "base", "phase": phase, **found}
            yield {**row, "why": why} if why else row


def _off(one: torch.Tensor, other: torch.Tensor) -> float:
    """Root mean square over tokens."""
    return float((one - other).square().mean().sqrt())


# ---- how long ----


def milliseconds_a_token(url: str, prompt: Sequence[int]) -> Figures:
    """Of one request for the base, decoding; the first round is left out."""
    found = []
    for _ in range(1 + _ROUNDS):
        seconds = [
            serving.post(f"{url}/generate", _body([prompt], None, count))[0]["meta_info"][
                "e2e_latency"
            ]
            for count in (1, 1 + _TIMED_TOKENS)
        ]
        found.append(1e3 * (seconds[1] - seconds[0]) / _TIMED_TOKENS)
    return spread(found[1:])
