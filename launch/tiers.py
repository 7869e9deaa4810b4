"""Flags of experts in tiers, and what they come to for one model.

--expert-cache ... -> TierFlags -> [plan_tiers] -> TierConfig -> every rank
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_esft.byte_size import parse_bytes
from sgl_esft.config import (
    DEFAULT_MAP_STORE_BYTES,
    DEFAULT_PREFETCH_DISTANCE,
    STORE_BY,
    RecordConfig,
    StoreBy,
    TierConfig,
)
from sgl_esft.errors import ConfigError, UnsupportedModelError
from sgl_esft.formats.model_spec import MoeSpec, refuse_quantised
from sgl_esft.formats.strict_json import read_object
from sgl_esft.offload.policies import AUTO, POLICY_NAMES
from sgl_esft.support import TIER_DEVICES, TIER_SCHEMES
from sgl_esft_launch.arguments import last_value

_EP_FLAGS = ("--ep-size", "--expert-parallel-size", "--ep")


@dataclass(frozen=True)
class TierFlags:
    """What the command line says; only there with --expert-cache."""

    cache: str  # experts a layer, or a size for all layers
    policy: str
    read_threads: int | None
    loads_per_layer: float | None
    prefetch_distance: int
    map_store_bytes: int
    map_store_file: str | None
    store_by: StoreBy
    probe_file: str | None
    pack_file: str | None
    read_bytes_per_s: int | None
    host_bytes: int


def add_flags(group: argparse._ArgumentGroup) -> None:
    """Of the launcher's parser."""
    group.add_argument(
        "--expert-cache",
        metavar="N|SIZE",
        help="keep only so many experts on the device, N of each layer or SIZE of all layers (of "
        "each rank), and read the others from the checkpoint when they are routed to: for models "
        "that are larger than the memory (default: all experts are on the device)",
    )
    group.add_argument(
        "--expert-host-memory",
        metavar="SIZE",
        help="keep so much of what was read in page-locked host memory of each rank, between the "
        "checkpoint and an accelerator (default: 0, nothing; on a CPU the rows are host memory)",
    )
    group.add_argument(
        "--expert-policy",
        choices=POLICY_NAMES,
        default=AUTO,
        help="which experts are kept and fetched ahead (docs/offload.md; default: %(default)s, "
        "which chooses by the storage's speed and the batch's size)",
    )
    group.add_argument(
        "--expert-read-threads",
        type=int,
        metavar="N",
        help="experts that are read at a time, each by a thread (default: as few as read about as "
        "fast as more, measured at start)",
    )
    group.add_argument(
        "--expert-read-bandwidth",
        metavar="SIZE",
        help="read at most so many bytes a second, such as 1GiB (default: what the storage gives)",
    )
    group.add_argument(
        "--expert-loads-per-layer",
        type=float,
        metavar="X",
        help="experts that can be read while one layer is computed: what is fetched ahead is "
        "bounded by it (default: measured at start)",
    )
    group.add_argument(
        "--expert-pack",
        metavar="FILE",
        help="read the base's experts from this file of `sgl-esft pack`, whose experts lie "
        "aligned and in one piece (default: from the checkpoint's own files)",
    )
    group.add_argument(
        "--prefetch-distance",
        type=int,
        default=DEFAULT_PREFETCH_DISTANCE,
        metavar="D",
        help="layers between what is predicted from and what is predicted, of finemoe and "
        "request-counts (default: %(default)s)",
    )
    group.add_argument(
        "--expert-map-memory",
        metavar="SIZE",
        help="memory of each rank for what is learned of routing: expert maps of earlier tokens, "
        "or moments of router outputs (default: 64MiB)",
    )
    group.add_argument(
        "--expert-map-file",
        metavar="FILE",
        help="keep what is learned of routing here across restarts (default: it is learned anew)",
    )
    group.add_argument(
        "--store-by",
        choices=STORE_BY,
        default="all",
        help="whose expert maps a request is compared with, of finemoe: `all`, or its own "
        "`adapter`'s and the base's, where each adapter that is used has an equal share of the "
        "memory (default: %(default)s)",
    )

    group.add_argument(
        "--expert-probe",
        metavar="FILE",
        help="for --expert-policy learned: what `sgl-esft offload train` made of a trace",
    )


def add_record_flags(group: argparse._ArgumentGroup) -> None:
    """Of a trace of the routing, with and without tiers."""
    group.add_argument(
        "--record-routing",
        metavar="DIR",
        help="write which experts each step was routed to into a new folder, for `sgl-esft "
        "offload`: no text and no token ids, but somebody who has the model can tell decoded "
        "tokens by it (default: nothing is recorded)",
    )
    group.add_argument(
        "--record-routing-limit",
        metavar="SIZE",
        help="stop recording after so many bytes (default: 1GiB)",
    )


def read_record(found: argparse.Namespace) -> RecordConfig | None:
    """Raises ConfigError."""
    if found.record_routing is None:
        if found.record_routing_limit is not None:
            raise ConfigError("--record-routing-limit without --record-routing: leave it out")
        return None
    limit = found.record_routing_limit or "1GiB"
    folder = str(Path(found.record_routing).resolve())
    return RecordConfig(folder, parse_bytes(limit, "--record-routing-limit"))


def read_flags(found: argparse.Namespace) -> TierFlags | None:
    """None without --expert-cache. Raises ConfigError for its flags without it."""
    if found.expert_cache is None:
        _refuse_alone(found)
        return None
    map_bytes, bandwidth = found.expert_map_memory, found.expert_read_bandwidth
    host = found.expert_host_memory
    return TierFlags(
        cache=found.expert_cache,
        policy=found.expert_policy,
        read_threads=found.expert_read_threads,
        loads_per_layer=found.expert_loads_per_layer,
        prefetch_distance=found.prefetch_distance,
        map_store_bytes=DEFAULT_MAP_STORE_BYTES
        if map_bytes is None
        else parse_bytes(map_bytes, "--expert-map-memory"),
        map_store_file=found.expert_map_file,
        store_by=found.store_by,
        probe_file=found.expert_probe,
        pack_file=found.expert_pack,
        read_bytes_per_s=None
        if bandwidth is None
        else parse_bytes(bandwidth, "--expert-read-bandwidth"),
        host_bytes=0 if host in (None, "0") else parse_bytes(host, "--expert-host-memory"),
    )


def _refuse_alone(found: argparse.Namespace) -> None:
    """A flag that does nothing would be believed to do something."""
    given = {
        "--expert-host-memory": found.expert_host_memory is not None,
        "--expert-policy": found.expert_policy != AUTO,
        "--expert-read-threads": found.expert_read_threads is not None,
        "--expert-read-bandwidth": found.expert_read_bandwidth is not None,
        "--expert-loads-per-layer": found.expert_loads_per_layer is not None,
        "--expert-pack": found.expert_pack is not None,
        "--prefetch-distance": found.prefetch_distance != DEFAULT_PREFETCH_DISTANCE,
        "--expert-map-memory": found.expert_map_memory is not None,
        "--expert-map-file": found.expert_map_file is not None,
        "--store-by": found.store_by != "all",
        "--expert-probe": found.expert_probe is not None,
    }
    alone = [flag for flag, is_given in given.items() if is_given]
    if alone:
        raise ConfigError(f"{', '.join(alone)} without --expert-cache: give it too, or leave out")


def check_device(device: str, config: TierConfig) -> None:
    """Raises ConfigError for a device type that tiers, or tiers of this kind, were not shown on."""
    if device == "cpu" and config.host_bytes:
        raise ConfigError(
            "--expert-host-memory on a CPU: there the rows are host memory; give the bytes to "
            "--expert-cache"
        )
    if device not in TIER_DEVICES:
        raise ConfigError(
            f"--expert-cache on {device}: experts in tiers were not shown on it (docs/offload.md); "
            "leave it out"
        )


def decode_backend(given: Any, device: str) -> str | None:
    """What --cuda-graph-backend-decode should say; None: leave what was given.

    given: SGLang's arguments, parsed and not resolved. Without a word SGLang would capture a whole
    step, which cannot hold what the host decides in every layer.
    """
    said = (given.cuda_graph_config or {}).get("decode", {})
    is_off = given.disable_cuda_graph or given.disable_decode_cuda_graph
    if device != "cuda" or is_off or "backend" in said:
        return None
    return "breakable" if given.cuda_graph_backend_decode is None else None


def argv(sglang_argv: Sequence[str]) -> tuple[str, ...]:
    """A step that could not read an expert must be over before the next one begins."""
    flag = "--disable-overlap-schedule"
    return () if flag in sglang_argv else (flag,)


def plan_tiers(
    flags: TierFlags, model_path: str, spec: MoeSpec, tp_size: int, sglang_argv: Sequence[str]
) -> TierConfig:
    """Rows of a layer on each rank, and the rest. Raises ConfigError, UnsupportedModelError."""
    refuse_quantised(spec, "--expert-cache", TIER_SCHEMES)
    if not Path(model_path).is_dir():
        raise ConfigError(
            f"--expert-cache reads experts from the checkpoint's files, and {model_path} is no "
            "folder: download it, and name the folder"
        )
    return TierConfig(
        num_rows=_num_rows(flags.cache, spec, tp_size // ep_size_of(sglang_argv)),
        top_k=_top_k(Path(model_path)),
        policy=flags.policy,
        read_threads=flags.read_threads,
        loads_per_layer=flags.loads_per_layer,
        prefetch_distance=flags.prefetch_distance,
        map_store_bytes=flags.map_store_bytes,
        map_store_file=_absolute(flags.map_store_file),
        store_by=flags.store_by,
        probe_file=_absolute(flags.probe_file),
        pack_file=_absolute(flags.pack_file),
        read_bytes_per_s=flags.read_bytes_per_s,
        host_bytes=flags.host_bytes,
    )


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).resolve())


def _num_rows(cache: str, spec: MoeSpec, moe_tp_size: int) -> int:
    """`cache`: experts of a layer, or bytes of all layers. moe_tp_size: ranks of one expert."""
    if cache.isascii() and cache.isdecimal():
        return int(cache)
    num_ranks = max(1, moe_tp_size)
    # Every rank has all scales of down, whose rows it has in part.
    num_whole = sum(part.num_bytes for part in spec.expert_parts("down")[1:])
    of_all_ranks = spec.expert_bytes + (num_ranks - 1) * num_whole
    num_bytes = parse_bytes(cache, "--expert-cache") * num_ranks
    return num_bytes // (of_all_ranks * len(spec.moe_layer_ids))


def ep_size_of(sglang_argv: Sequence[str]) -> int:
    """Ranks that whole experts are dealt to; 1 where the command line does not say."""
    values = [value for flag in _EP_FLAGS if (value := last_value(sglang_argv, flag)) is not None]
    return int(values[-1]) if values and values[-1].isdecimal() and int(values[-1]) else 1


def _top_k(model_path: Path) -> int:
    found = read_object(model_path / "config.json", UnsupportedModelError).get(
        "num_experts_per_tok"
    )
    if not isinstance(found, int) or found < 1:
        raise UnsupportedModelError(f"{model_path}/config.json: num_experts_per_tok {found!r}")
    return found
