"""An adapter of a woven server beside its merged model's server, for bench/gpu/run.py.

serve.py's files -> merged checkpoint of one adapter -> servers: woven, merged, plain base
the same prompts to all -> log-probabilities of each token
    rounding  woven base - plain base: the same weights, only kernels' tiles differ
    off       woven adapter - merged: to be no more than that
    distance  merged - plain base: what the adapter does; to be clearly more
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu import serve
from sgl_esft.tools.merge import merge_adapter
from sgl_esft.zoo import serving

NUM_PROMPTS = 8
MOST = 2.0  # of `off` over `rounding`: two roundings of the same size that add up
# Of `distance` over `rounding`. A server that ignores the adapter is off by at least the distance
# less one rounding: below three it would pass.
LEAST = 3.0

Figures = dict[str, Any]


def measure(size: serve.Size, root: Path = serve.ROOT / "build" / "gpu-serve") -> Figures:
    """Three servers, the same prompts: each difference as its root mean square over tokens.

    With `failed`, why they are no result, where `why_not` has something to say.
    """
    files = serve.write_files(size, root, serve.layers_of(size))
    name, folder = next(iter(files.adapters.items()))
    merged = _merged(files.base, folder)
    prompts = prompts_of(files.config["vocab_size"], size.prompt_tokens)
    commands = _commands(replace(files, adapters={name: folder}), merged)
    with serve.started(commands, size.start_seconds) as urls:
        found = differences(
            *(log_probabilities(url, prompts) for url in urls),
            log_probabilities(urls[0], prompts, name),
        )
    reason = why_not(found)
    figures = {"num_layers": files.config["num_hidden_layers"], "adapter": name, **found}
    return {**figures, "failed": reason} if reason else figures


def _merged(base: Path, adapter: Path) -> Path:
    shutil.rmtree(merged := base.parent / "merged", ignore_errors=True)
    merge_adapter(base, adapter, merged)
    return merged


def _commands(files: serve.Files, merged: Path) -> list[list[str]]:
    """Of the woven server, the merged one, the base's."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [
        serve.woven_arguments(files, device, NUM_PROMPTS),
        serve.plain_arguments(replace(files, base=merged), device, NUM_PROMPTS),
        serve.plain_arguments(files, device, NUM_PROMPTS),
    ]


def differences(
    woven_base: torch.Tensor, merged: torch.Tensor, base: torch.Tensor, woven: torch.Tensor
) -> Figures:
    """Of log-probabilities; all over the same tokens."""
    pairs = {
        "rounding": (woven_base, base),
        "off": (woven, merged),
        "distance": (merged, base),
    }
    root = math.sqrt(base.numel())
    found = {name: float((one - other).norm()) / root for name, (one, other) in pairs.items()}
    return {"tokens": base.numel(), **found}


def why_not(found: Mapping[str, float]) -> str | None:
    """Why an adapter does not answer as its merged model, or why this cannot be told; or None."""
    rounding, off, distance = (found[name] for name in ("rounding", "off", "distance"))
    seen = f"off {off:.3g}, rounding {rounding:.3g}, distance {distance:.3g} a token"
    if not off <= MOST * rounding:
        return f"the adapter is off its merged model by more than {MOST:g} roundings: {seen}"
    if not distance > LEAST * rounding:
        return f"the adapter is not {LEAST:g} roundings away from the base: {seen}"
    return None


def prompts_of(vocab_size: int, num_tokens: int) -> list[list[int]]:
    """NUM_PROMPTS of random tokens; the first few ids mark begins and ends."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(10, vocab_size, (NUM_PROMPTS, num_tokens), generator=generator)
    return drawn.tolist()


def log_probabilities(
    url: str, prompts: Sequence[Sequence[int]], adapter: str | None = None
) -> torch.Tensor:
    """[prompts x (their tokens - 1)] float64: of each token after those before it."""
    body = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
        **({} if adapter is None else {"lora_path": [adapter] * len(prompts)}),
    }
    answers = serving.post(f"{url}/generate", body)
    found = [
        value
        for answer in answers
        for value, *_ in answer["meta_info"]["input_token_logprobs"]
        if value is not None
    ]
    return torch.tensor(found, dtype=torch.float64)
