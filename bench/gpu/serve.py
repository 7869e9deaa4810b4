"""SGLang with this plugin serving DeepSeek-V2-Lite's shape on a GPU, for bench/gpu/run.py.

    free memory -> as many layers as both servers have room for (plan.py)
    checkpoint.py -> base, four published adapters -> a woven server with 20 names for them
                                                       -> a plain server of the same base
    the same requests to both in turns, by SGLang's own client (bench/common/load.py)
    -> TTFT and TPOT over the plain server's, by batch size and number of adapters, minus the floor

The plain server stands for the base alone and for a merged model: their bytes are the same. Where
the time runs out, the rounds that are left out are named.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.common.load import LoadFigures, Target, Workload, all_to_base, at_once, make_trace, play
from bench.common.record import spread
from bench.expertweave.floor import ModelBytes, expected_touched_at_random, floor_over_base
from bench.gpu import checkpoint, plan
from bench.gpu.servers import held
from sgl_esft.formats.adapter_config import EXPERT_CONFIG_NAME, read_expert_config
from sgl_esft.zoo import serving

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
PUBLISHED = ("gate-intent", "gate-law", "token-intent", "token-law")
KV_TOKENS = 65536
PAGE_BYTES = 2 << 20  # of the driver
FEW_LAYERS = 4
MARGIN_SECONDS = 20.0  # to stop the servers and to write

Figures = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """The model, its load, and how much time the parts may take.

    changes: of DeepSeek-V2-Lite's config.json. write_seconds: for the checkpoint.
    """

    name: str
    changes: Mapping[str, Any]
    num_adapters: int
    adapter_counts: tuple[int, ...]  # 0 = requests for the base only
    batch_sizes: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    rounds: int
    write_seconds: float
    start_seconds: float


FULL = Size(
    name="v2-lite",
    changes={},
    num_adapters=20,
    adapter_counts=(0, 1, 5, 20),
    batch_sizes=(1, 8, 64),
    prompt_tokens=128,
    output_tokens=64,
    rounds=5,
    write_seconds=90.0,
    start_seconds=180.0,
)
TINY = Size(
    name="tiny",
    changes={
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 512,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
    num_adapters=3,
    adapter_counts=(0, 3),
    batch_sizes=(2,),
    prompt_tokens=8,
    output_tokens=8,
    rounds=2,
    write_seconds=10.0,
    start_seconds=300.0,
)


def sized(*, tiny: bool, num_layers: int | None) -> Size:
    """FULL or TINY, of so many layers where that is said."""
    size = TINY if tiny else FULL
    changes = {} if num_layers is None else {"num_hidden_layers": num_layers}
    return replace(size, changes={**size.changes, **changes})


@dataclass(frozen=True)
class Files:
    """What the servers load."""

    config: Mapping[str, Any]
    base: Path
    adapters: Mapping[str, Path]  # adapter name -> folder; several names share one


def config_of(size: Size) -> dict[str, Any]:
    """The whole model's."""
    published = json.loads((DATA / "deepseek-v2-lite.json").read_text())
    return {**published, **checkpoint.SERVED, **size.changes}


def planned(size: Size, num_adapters: int) -> plan.Model:
    """What a server of this model takes, with so many names for the published adapters."""
    config = config_of(size)
    trunk, layer = checkpoint.bytes_by_layer(config)
    expert = ModelBytes.from_config(config).expert_bytes
    names = itertools.islice(itertools.cycle(PUBLISHED), num_adapters)
    adapters = [read_expert_config(DATA / "esft" / f"{name}.json") for name in names]
    # A run of slots may begin and end inside a page of 2 MiB, in both tensors.
    tuned = [
        sum(len(each.get(at, ())) * expert + 4 * PAGE_BYTES for each in adapters)
        for at in range(config["first_k_dense_replace"], config["num_hidden_layers"])
    ]
    kv = 2 * KV_TOKENS * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
    return plan.Model(trunk, layer, tuned, kv)


def free_bytes() -> int | None:
    """Of the GPU's memory; None without one."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None


def few_layers(size: Size) -> Size:
    """At most FEW_LAYERS: where many servers are on one GPU."""
    wanted = min(FEW_LAYERS, config_of(size)["num_hidden_layers"])
    return replace(size, changes={**size.changes, "num_hidden_layers": wanted})


@contextmanager
def started(commands: Sequence[Sequence[str]], wait_seconds: float) -> Iterator[tuple[str, ...]]:
    """URLs of servers that were started together. Raises ServerError where one does not come up."""
    with held({f"{at}": each for at, each in enumerate(commands)}, wait_seconds) as servers:
        if servers.failed:
            raise serving.ServerError("\n".join(servers.failed.values()))
        yield tuple(servers.urls[f"{at}"] for at in range(len(commands)))


def layers_of(size: Size) -> int | None:
    """That fit the GPU's free memory; None = all, without one."""
    free, wanted = free_bytes(), config_of(size)["num_hidden_layers"]
    return free and plan.layers_of_two_servers(free, wanted, planned(size, size.num_adapters))


def write_files(size: Size, root: Path, most_layers: int | None = None) -> Files:
    """Base and adapters below `root`, written once; None = all layers that disk and time allow."""
    folder = root / f"{size.name}-{most_layers or 'all'}"
    config_path = folder / "base" / "config.json"
    if not (folder / "complete").exists():
        config = config_of(size)
        fitting = checkpoint.layers_that_fit(config, folder, size.write_seconds)
        config["num_hidden_layers"] = min(fitting, most_layers or fitting)
        pool = checkpoint.Pool()
        checkpoint.write_base(folder / "base", config, pool)
        for name in PUBLISHED:
            source = DATA / "esft" / f"{name}.json"
            checkpoint.write_adapter(folder / name, source, config, pool)
        (folder / "complete").touch()
    names = itertools.islice(itertools.cycle(PUBLISHED), size.num_adapters)
    adapters = {f"a{number:02}": folder / name for number, name in enumerate(names)}
    return Files(json.loads(config_path.read_text()), folder / "base", adapters)


def common_arguments(device: str, max_batch: int) -> list[str]:
    """What both servers are given: no prefix cache, and on a GPU no kernel library but Triton."""
    arguments = [
        "--max-total-tokens",
        str(KV_TOKENS),
        "--log-level",
        "warning",
        "--disable-radix-cache",
    ]
    return arguments + device_arguments(device, max_batch)


def device_arguments(device: str, max_batch: int) -> list[str]:
    """Of every server here on a GPU: no kernel library but Triton, graphs up to a batch."""
    if device != "cuda":
        return []
    return [
        *("--attention-backend", "triton", "--sampling-backend", "pytorch"),
        *("--cuda-graph-max-bs-decode", str(max_batch)),
        *("--mem-fraction-static", str(plan.STATIC_SHARE)),
    ]


def woven_arguments(files: Files, device: str, max_batch: int) -> list[str]:
    """The launcher's, for the base with all adapters."""
    named = [f"{name}={folder}" for name, folder in files.adapters.items()]
    return [
        *("--model-path", str(files.base), "--esft-adapters", *named),
        *common_arguments(device, max_batch),
    ]


def plain_arguments(files: Files, device: str, max_batch: int) -> list[str]:
    """The launcher's, for the base alone."""
    return ["--model-path", str(files.base), "--no-esft", *common_arguments(device, max_batch)]


def measure(size: Size, root: Path = ROOT / "build" / "gpu-serve") -> Figures:
    """Start both servers and drive them until the rounds or the time are through."""
    end = time.monotonic() + float(os.environ.get("BENCH_STEP_SECONDS", "540")) - MARGIN_SECONDS
    device = "cuda" if torch.cuda.is_available() else "cpu"
    most_layers = layers_of(size)
    files, max_batch = write_files(size, root, most_layers), max(size.batch_sizes)
    # A step that is ended for its time leaves its servers behind: end before that.
    wait_seconds = max(1.0, min(size.start_seconds, end - time.monotonic()))
    commands = [each(files, device, max_batch) for each in (woven_arguments, plain_arguments)]
    with started(commands, wait_seconds) as urls:
        cells, missing = _drive(size, files, urls, lambda: time.monotonic() < end)
    return {
        "num_layers": files.config["num_hidden_layers"],
        "num_layers_that_fit": most_layers,
        "prompt_tokens": size.prompt_tokens,
        "output_tokens": size.output_tokens,
        "rounds_left_out": missing,
        "rows": [_row(files, cell, pairs, device) for cell, pairs in cells.items()],
    }


Cell = tuple[int, int]  # batch size, number of adapters
Pair = tuple[LoadFigures, LoadFigures]  # woven, plain


def _drive(
    size: Size, files: Files, urls: tuple[str, ...], has_time: Callable[[], bool]
) -> tuple[dict[Cell, list[Pair]], int]:
    """Every cell once a round, so that short time costs rounds and not cells; round 0 warms up."""
    cells: dict[Cell, list[Pair]] = {
        cell: [] for cell in itertools.product(size.batch_sizes, size.adapter_counts)
    }
    missing = 0
    for number in range(size.rounds + 1):
        for cell, pairs in cells.items():
            if not has_time():
                missing += 1
                continue
            pair = _run_pair(size, files, urls, cell, number)
            if number:
                pairs.append(pair)
    return cells, missing


def _run_pair(size: Size, files: Files, urls: tuple[str, ...], cell: Cell, number: int) -> Pair:
    """The same requests to the woven server and to the plain one, in turns as to which is first."""
    batch_size, num_adapters = cell
    names = list(files.adapters)[: max(num_adapters, 1)]
    workload = Workload(batch_size, size.prompt_tokens, size.output_tokens)
    trace = at_once(make_trace(workload, 1.0, names, 1.0, seed=number))
    woven_trace = trace if num_adapters else all_to_base(trace)
    targets: dict[str | None, Target] = {name: Target(urls[0], name) for name in names}
    runs = {
        "woven": lambda: play(woven_trace, {**targets, None: Target(urls[0])}, files.base),
        "plain": lambda: play(all_to_base(trace), {None: Target(urls[1])}, files.base),
    }
    order = list(runs) if number % 2 else list(reversed(runs))
    found = {name: runs[name]() for name in order}
    return found["woven"], found["plain"]


def _row(files: Files, cell: Cell, pairs: Sequence[Pair], device: str) -> Figures:
    """Over the plain server; times only on a GPU."""
    floor = floor_of(files, *cell)
    row: Figures = {"batch_size": cell[0], "num_adapters": cell[1], "floor": floor}
    if len(pairs) < 2:
        return {**row, "reason": f"{len(pairs)} rounds in the time: too few"}
    row["rounds"] = len(pairs)
    for metric in ("ttft", "tpot"):
        ratios = [getattr(woven, metric) / getattr(plain, metric) for woven, plain in pairs]
        row[f"{metric}_over_plain"] = spread(ratios)
    row["tpot_points_over_floor"] = row["tpot_over_plain"]["median"] - floor
    if device == "cuda":
        row["woven"], row["plain"] = (asdict(each) for each in pairs[-1])
    return row


def floor_of(files: Files, batch_size: int, num_adapters: int) -> float:
    """Bytes of a decode step with these adapters over those of the base; routing as if uniform."""
    config = files.config
    sizes = {"num_experts": config["n_routed_experts"], "top_k": config["num_experts_per_tok"]}
    folders = list(files.adapters.values())[:num_adapters]
    adapters = [read_expert_config(folder / EXPERT_CONFIG_NAME) for folder in folders]
    shares = [0.0, *[1 / num_adapters] * num_adapters] if num_adapters else [1.0]
    layers = range(config["first_k_dense_replace"], config["num_hidden_layers"])
    woven = [
        expected_touched_at_random(
            [adapter.get(layer, ()) for adapter in adapters], shares, batch_size, **sizes
        )
        for layer in layers
    ]
    base = expected_touched_at_random([], [1.0], batch_size, **sizes)
    return floor_over_base(woven, [base] * len(layers), ModelBytes.from_config(config))
