"""Quantised experts on a GPU, woven beside merged and quantised, for bench/gpu/run.py.

    serve.py's files, one adapter -> for each scheme: the base quantised, and the merged model
    -> servers: woven (the adapter in bfloat16, quantised when it is loaded), merged, plain base
    the same prompts to all -> equality.py's differences: rounding, off, distance

All schemes' servers run at once: a lent machine has many cores and few minutes.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu import equality, serve
from bench.gpu.servers import Held, held, wait_seconds
from sgl_esft.formats.expert_scheme import SCHEME_NAMES
from sgl_esft.quant.write import quantise_checkpoint
from sgl_esft.tools.merge import merge_adapter

WOVEN, MERGED, BASE = "woven", "merged", "base"
# What plain SGLang must be told; a checkpoint says the rest.
PLAIN_FLAGS: Mapping[str, Sequence[str]] = {"int4": ("--quantization", "moe_wna16")}

Figures = dict[str, Any]
Server = tuple[str, str]  # scheme, which of the three


def measure(
    size: serve.Size,
    root: Path = serve.ROOT / "build" / "gpu-serve",
    schemes: Sequence[str] = SCHEME_NAMES,
) -> Figures:
    """A row for each scheme. With `failed`, why they are no result."""
    size = serve.few_layers(size)
    files = serve.write_files(size, root, serve.layers_of(size))
    name, folder = next(iter(files.adapters.items()))
    made = checkpoints(files.base, folder, schemes)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    commands = {
        f"{scheme}, {which}": arguments
        for scheme in schemes
        for which, arguments in commands_of(files, name, made, scheme, device).items()
    }
    prompts = equality.prompts_of(files.config["vocab_size"], size.prompt_tokens)
    with held(commands, wait_seconds(size.start_seconds)) as servers:
        rows = [row_of(scheme, name, servers, prompts) for scheme in schemes]
    failed = [f"{row['scheme']}: {row['why']}" for row in rows if "why" in row]
    figures = {"num_layers": files.config["num_hidden_layers"], "adapter": name, "rows": rows}
    return {**figures, "failed": "; ".join(failed)} if failed else figures


def checkpoints(base: Path, adapter: Path, schemes: Sequence[str]) -> dict[Server, Path]:
    """Quantised bases and merged models, beside the base; made anew."""
    root = base.parent / "quantised"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    merge_adapter(base, adapter, root / "bfloat16")
    sources = {BASE: base, MERGED: root / "bfloat16"}
    made = {(s, which): root / f"{s}-{which}" for s in schemes for which in sources}
    with ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(quantise_checkpoint, sources[which], scheme, folder)
            for (scheme, which), folder in made.items()
        ]
    for job in jobs:
        job.result()
    return made


def commands_of(
    files: serve.Files, name: str, made: Mapping[Server, Path], scheme: str, device: str
) -> dict[str, list[str]]:
    """The three servers of a scheme."""
    base, merged = made[scheme, BASE], made[scheme, MERGED]
    kept = ["--quantised-adapters", str(base.parent / f"{scheme}-adapters")]
    woven = replace(files, base=base, adapters={name: files.adapters[name]})
    plain = {MERGED: replace(files, base=merged), BASE: replace(files, base=base)}
    # Of fp8 SGLang would choose a kernel that only some GPUs have.
    runner = ["--moe-runner-backend", "triton"] if device == "cuda" else []
    flags = PLAIN_FLAGS.get(scheme, ())
    most = equality.NUM_PROMPTS
    return {
        WOVEN: [*serve.woven_arguments(woven, device, most), *kept, *runner],
        **{
            n: [*serve.plain_arguments(each, device, most), *flags, *runner]
            for n, each in plain.items()
        },
    }


def row_of(scheme: str, name: str, servers: Held, prompts: Sequence[Sequence[int]]) -> Figures:
    """With `why` where it is no result."""
    every = {which: f"{scheme}, {which}" for which in (WOVEN, MERGED, BASE)}
    failed = [
        f"{server}: {servers.failed[server]}"
        for server in every.values()
        if server in servers.failed
    ]
    if failed:
        return {"scheme": scheme, "why": "; ".join(failed)}
    woven, merged, base = (servers.urls[each] for each in every.values())
    found = equality.differences(
        *(equality.log_probabilities(url, prompts) for url in (woven, merged, base)),
        equality.log_probabilities(woven, prompts, name),
    )
    why = equality.why_not(found)
    return {"scheme": scheme, **found, **({"why": why} if why else {})}
