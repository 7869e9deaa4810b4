"""A woven server beside one of the merged checkpoint, both real, for bench/gpu/run.py.

serve.py's files -> merged checkpoint of one adapter -> a woven server, a plain server
the same prompts to both -> log-probabilities of each token -> how far woven is off
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu import serve
from sgl_esft.tools.merge import merge_adapter
from sgl_esft.zoo import serving

NUM_PROMPTS = 8
ROUNDING = 0.25  # of bfloat16, over the base's distance; another adapter gives about 1.4

Figures = dict[str, Any]


def measure(size: serve.Size, root: Path = serve.ROOT / "build" / "gpu-serve") -> Figures:
    """A woven server beside one of a merged checkpoint: log-probabilities of the same prompts.

    off: |woven - merged| / |base - merged| over all prompts' tokens, 0 = equal to the bit; kernels
    choose their tiles by the number of slots and round otherwise. Raises RuntimeError where it is
    no rounding.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    files = serve.write_files(size, root, serve.layers_of(size))
    name, folder = next(iter(files.adapters.items()))
    shutil.rmtree(merged := files.base.parent / "merged", ignore_errors=True)
    merge_adapter(files.base, folder, merged)
    commands = (
        serve.woven_arguments(replace(files, adapters={name: folder}), device, NUM_PROMPTS),
        serve.plain_arguments(replace(files, base=merged), device, NUM_PROMPTS),
    )
    with serve.started(commands, size.start_seconds) as (woven, plain):
        prompts = prompts_of(files.config["vocab_size"], size.prompt_tokens)
        expected = log_probabilities(plain, prompts)
        distance = (log_probabilities(woven, prompts) - expected).norm()
        off = float((log_probabilities(woven, prompts, name) - expected).norm() / distance)
    if not off < ROUNDING:
        raise RuntimeError(f"adapter {name} is off the merged model by {off:.3g} of the base's way")
    return {
        "num_layers": files.config["num_hidden_layers"],
        "tokens": expected.numel(),
        "base_distance_a_token": float(distance) / math.sqrt(expected.numel()),
        "off": off,
    }


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
