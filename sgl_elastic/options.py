"""The elastic runtime's own flags; the rest of the command line is sgl_esft's and SGLang's.

argv --[parse]--> ElasticOptions + what is left
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sgl_elastic.autoscale.policy import AutoscalePolicy, parse_policy
from sgl_elastic.baselines.strategies import (
    AblationSwitches,
    ScaleStrategy,
    check_switches,
    parse_switches,
)
from sgl_elastic.coordinator.operations import check_file
from sgl_elastic.errors import ElasticConfigError
from sgl_elastic.front.rank_choice import RankStrategy
from sgl_esft.byte_size import parse_bytes

DEFAULT_KV_TOKENS = 65536  # of a rank, where the user has not chosen
DEFAULT_HANG_TIMEOUT_S = 20.0
DEFAULT_SPARES = 1  # it can be copied as often as need be
MAX_SPARES = 16
_DEFAULT_DEVICE_BYTES = 1 << 30


@dataclass(frozen=True)
class ElasticOptions:
    """What `--elastic` brings along."""

    max_devices: int
    dp_size: int
    device_bytes: int
    kv_limit: int  # the most KV tokens of a rank
    standby_ranks: int
    spare_ranks: int | None  # None: as many as there can be, see `spares_on`
    rank_strategy: str
    autoscale: AutoscalePolicy | None
    slo_ttft_s: float
    slo_tpot_s: float
    journal: str | None
    verify_copies: bool
    hang_timeout_s: float  # after so long a rank that does nothing is lost
    strategy: ScaleStrategy
    ablation: AblationSwitches
    nodes: str  # "one", or "ray": devices are on the nodes of a Ray cluster
    ray_address: str  # "" = the cluster that runs on this machine
    devices_per_node: int
    redundant_experts: int = 0  # copies of experts in each layer, over all devices

    @property
    def num_sources(self) -> int:
        """Ranks that tokens may come from, where who computes an expert depends on that; else 1."""
        return self.max_devices if self.redundant_experts else 1

    @property
    def spans_nodes(self) -> bool:
        """Whether memory workers and ranks are placed on several machines."""
        return self.nodes == "ray"

    def spares_on(self, backend: str) -> int:
        """How many spares there are with this backend of sgl_vmm: DEFAULT_SPARES where it can."""
        if self.spare_ranks is not None:
            return self.spare_ranks
        return DEFAULT_SPARES if backend == "host" and not self.spans_nodes else 0


class _Parser(argparse.ArgumentParser):
    """A bad value is one line, as every mistake."""

    def error(self, message: str) -> NoReturn:
        raise ElasticConfigError(f"{message.removeprefix('argument ')} (--help explains the flags)")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that are elastic's alone, for this parser and for the launcher's help."""
    group = parser.add_argument_group("elastic (with --elastic)")
    group.add_argument(
        "--elastic",
        action="store_true",
        help="weights and KV belong to memory workers, and POST /v1/scale changes the number of "
        "devices (DP = EP) while requests run",
    )
    group.add_argument(
        "--max-devices",
        type=int,
        default=4,
        metavar="N",
        help="devices that may be used, numbered from 0 (default: 4); --dp-size says how many at "
        "start",
    )
    _add_node_flags(group)
    _add_ready_flags(group)
    _add_placement_flags(group)
    group.add_argument(
        "--max-total-tokens",
        type=int,
        metavar="N",
        help=f"the most KV tokens of a rank, where memory allows (default: {DEFAULT_KV_TOKENS})",
    )
    group.add_argument(
        "--autoscale",
        metavar="JSON",
        help="scale by the SLO: the fields of AutoscalePolicy, docs/autoscaling.md (default: off)",
    )
    group.add_argument(
        "--slo-ttft",
        type=float,
        default=1.0,
        metavar="S",
        help="target for the time to the first token, in seconds (default: 1)",
    )
    group.add_argument(
        "--slo-tpot",
        type=float,
        default=0.1,
        metavar="S",
        help="target for the mean time per output token, in seconds (default: 0.1)",
    )
    group.add_argument(
        "--scale-journal", metavar="FILE", help="keep scale operations here (default: in memory)"
    )
    group.add_argument(
        "--verify-copies",
        action="store_true",
        help="compare the digests of all copied weights with those of their source",
    )
    group.add_argument(
        "--scale-strategy",
        choices=[str(strategy) for strategy in ScaleStrategy],
        default=str(ScaleStrategy.ELASTIC),
        help="how to scale; all but elastic are there to be compared with (default: elastic)",
    )
    group.add_argument(
        "--ablate",
        default="",
        metavar="LIST",
        help="parts of the elastic strategy to do without, to see what they are worth: some of "
        "no_shared_allocator, no_peer_copy, no_standby, no_zero_copy, separated by commas",
    )


def _add_ready_flags(group: argparse._ArgumentGroup) -> None:
    """What is kept ready for the next scale."""
    group.add_argument(
        "--standby-ranks",
        type=int,
        metavar="N",
        help="engine ranks kept parked and warm for the next scale; each costs host memory, on a "
        "CPU about 700 MiB (default: as many as --max-devices; 0: none)",
    )
    group.add_argument(
        "--spare-ranks",
        type=int,
        metavar="N",
        help="processes that have imported all an engine needs and are bound to nothing: instances "
        "of any size on any devices, standbys too, begin as copies of one; each costs host memory, "
        "about 700 MiB, most of which its copies share (default: 1 on a CPU, where one is enough "
        f"for all ranks; 0: none, each instance imports for itself; at most {MAX_SPARES})",
    )


def _add_placement_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--redundant-experts",
        type=int,
        default=0,
        metavar="N",
        help="expert slots more in each layer, over all devices: copies of the experts that most "
        "tokens went to lately (default: 0)",
    )
    group.add_argument(
        "--rank-choice",
        choices=[str(strategy) for strategy in RankStrategy],
        default=str(RankStrategy.ADAPTER),
        help="which DP rank a request goes to (default: adapter)",
    )


def _add_node_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--nodes",
        choices=["one", "ray"],
        default="one",
        help="ray: memory workers and ranks run on the nodes of a Ray cluster (default: one, this "
        "machine)",
    )
    group.add_argument(
        "--ray-address",
        default="",
        metavar="HOST:PORT",
        help="with --nodes ray: the cluster (default: the one that runs on this machine)",
    )
    group.add_argument(
        "--devices-per-node",
        type=int,
        default=1,
        metavar="N",
        help="with --nodes ray: devices of each node; they are numbered over the nodes in order "
        "(default: 1)",
    )


def _add_shared_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that the launcher has too, and explains."""
    parser.add_argument("--device-memory")
    parser.add_argument("--hang-timeout", type=float, default=DEFAULT_HANG_TIMEOUT_S)
    parser.add_argument("--dp-size", "--data-parallel-size", "--dp", type=int, default=1)


def parse(argv: Sequence[str]) -> tuple[ElasticOptions, list[str]]:
    """The options, and what is left for sgl_esft and SGLang. Raises ElasticConfigError."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_flags(parser)
    _add_shared_flags(parser)
    found, rest = parser.parse_known_args(argv)
    device_bytes = (
        parse_bytes(found.device_memory, "--device-memory")
        if found.device_memory
        else _DEFAULT_DEVICE_BYTES
    )
    strategy, ablation = ScaleStrategy(found.scale_strategy), parse_switches(found.ablate)
    check_switches(strategy, ablation)
    standby_ranks = found.max_devices if found.standby_ranks is None else found.standby_ranks
    has_standbys = strategy is ScaleStrategy.ELASTIC and ablation.standby
    options = ElasticOptions(
        max_devices=found.max_devices,
        dp_size=found.dp_size,
        device_bytes=device_bytes,
        kv_limit=DEFAULT_KV_TOKENS if found.max_total_tokens is None else found.max_total_tokens,
        standby_ranks=standby_ranks if has_standbys else 0,
        spare_ranks=found.spare_ranks if has_standbys else 0,
        rank_strategy=found.rank_choice,
        autoscale=parse_policy(found.autoscale),
        slo_ttft_s=found.slo_ttft,
        slo_tpot_s=found.slo_tpot,
        journal=found.scale_journal,
        verify_copies=found.verify_copies,
        hang_timeout_s=found.hang_timeout,
        strategy=strategy,
        ablation=ablation,
        nodes=found.nodes,
        ray_address=found.ray_address,
        devices_per_node=found.devices_per_node,
        redundant_experts=found.redundant_experts,
    )
    _check(options)
    if options.journal is not None:
        check_file(Path(options.journal))
    return options, rest


def _check(options: ElasticOptions) -> None:
    if not 1 <= options.dp_size <= options.max_devices <= 1024:
        raise ElasticConfigError(
            f"--dp-size {options.dp_size} and --max-devices {options.max_devices}: there must be "
            "at least one device and at most 1024, and no more ranks than devices"
        )
    if options.kv_limit < 1 or options.standby_ranks < 0:
        raise ElasticConfigError(
            f"--max-total-tokens {options.kv_limit}, --standby-ranks {options.standby_ranks}: "
            "must be positive"
        )
    if not 0 <= (options.spare_ranks or 0) <= MAX_SPARES:
        raise ElasticConfigError(f"--spare-ranks {options.spare_ranks}: 0 to {MAX_SPARES}")
    _check_nodes(options)
    _check_redundancy(options)
    for flag, seconds in (
        ("--hang-timeout", options.hang_timeout_s),
        ("--slo-ttft", options.slo_ttft_s),
        ("--slo-tpot", options.slo_tpot_s),
    ):
        if not 0 < seconds < math.inf:
            raise ElasticConfigError(f"{flag} {seconds:g}: must be a number of seconds above 0")


def _check_redundancy(options: ElasticOptions) -> None:
    num_copies = options.redundant_experts
    if num_copies < 0 or (num_copies and options.max_devices < 2):
        raise ElasticConfigError(
            f"--redundant-experts {num_copies}: at least 0, and copies need --max-devices 2 or more"
        )
    is_plain = options.strategy is ScaleStrategy.ELASTIC and options.ablation == AblationSwitches()
    if num_copies and (options.spans_nodes or not is_plain):
        raise ElasticConfigError(
            "--redundant-experts: on one machine and with the elastic strategy only; leave "
            "--nodes, --scale-strategy and --ablate out"
        )


def _check_nodes(options: ElasticOptions) -> None:
    if options.devices_per_node < 1:
        raise ElasticConfigError(f"--devices-per-node {options.devices_per_node}: at least 1")
    if not options.spans_nodes:
        if options.ray_address or options.devices_per_node != 1:
            raise ElasticConfigError("--ray-address, --devices-per-node: they need --nodes ray")
        return
    if options.strategy is not ScaleStrategy.ELASTIC or options.ablation != AblationSwitches():
        raise ElasticConfigError(
            "--nodes ray: the baselines and ablations are for one machine; leave --scale-strategy "
            "and --ablate out"
        )
    if options.spare_ranks:
        raise ElasticConfigError(
            f"--spare-ranks {options.spare_ranks} with --nodes ray: spares are for one machine so "
            "far; leave it out"
        )
