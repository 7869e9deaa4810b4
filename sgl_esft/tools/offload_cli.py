"""`sgl-esft offload`: what experts in tiers would do, before a server is started.

cli.py -> [configure, run] -> simulate: a recorded trace against caches and policies
                           -> advise: a machine, measured, and a base
                           -> calibrate: a running server, for `sgl-esft plan --speed`
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from sgl_esft.config import DEFAULT_PREFETCH_DISTANCE, STORE_BY
from sgl_esft.offload.policies import POLICIES
from sgl_esft.tools import server_client

_EXIT_OK: Final = 0
_MEASURED_S: Final = 20.0
_BATCH_SIZES: Final = (1, 2, 4, 8)
_TIMEOUT_S: Final = 120.0  # until a stream's next token
SIMULATED: Final = tuple(
    name
    for name, policy in POLICIES.items()
    if policy.predictor in (None, "finemoe", "regression", "request-counts")
)


def configure(parser: argparse.ArgumentParser) -> None:
    """The commands below `sgl-esft offload`."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    simulate = commands.add_parser(
        "simulate",
        help="replay a trace of --record-routing against a cache and a policy",
        description="The counts are exactly those of a server with the same flags: it decides by "
        "the same code. Stall is in layers' computing times, for a load that takes R of one.",
    )
    _add_simulate(simulate)
    train = commands.add_parser(
        "train",
        help="train a probe a layer from a trace, for --expert-policy learned",
        description="Least squares from a layer's router to that of a layer further on, by the "
        "decoded tokens of a trace.",
    )
    _add_train(train)
    advised = commands.add_parser(
        "advise",
        help="measure this machine, and propose a cache and a policy for a base",
        description="Reads experts and computes one for some seconds. With --trace hit rates are "
        "those of the trace; without, as if all experts were asked for alike.",
    )
    _add_advise(advised)
    calibrated = commands.add_parser(
        "calibrate",
        help="measure what a step of a running server takes, for `sgl-esft plan --speed`",
        description="Asks a server, which has nothing else to do, for streams at some batch sizes, "
        "of its base and then of its loaded adapters too. Start it with --expert-cache N "
        "--expert-policy lfu --enable-metrics. What it finds is for this machine: a second one "
        "with another --expert-cache makes it surer.",
    )
    _add_calibrate(calibrated)


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="folder of --record-routing")
    parser.add_argument(
        "--cache", type=int, nargs="+", required=True, metavar="N", help="rows of each layer"
    )
    parser.add_argument(
        "--policy", nargs="+", choices=SIMULATED, default=["lfu"], help="default: lfu"
    )
    parser.add_argument(
        "--loads-per-layer",
        type=float,
        default=1.0,
        metavar="X",
        help="as --expert-loads-per-layer (default: %(default)s)",
    )
    parser.add_argument(
        "--prefetch-distance", type=int, default=DEFAULT_PREFETCH_DISTANCE, metavar="D"
    )
    parser.add_argument("--expert-map-memory", metavar="SIZE", help="default: 64MiB")
    parser.add_argument("--store-by", choices=STORE_BY, default="all", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(report="simulate")


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="folder of --record-routing")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="file to make")
    parser.add_argument(
        "--prefetch-distance", type=int, default=DEFAULT_PREFETCH_DISTANCE, metavar="D"
    )
    parser.add_argument(
        "--ridge", type=float, default=1e-4, help="penalty of weights (default: %(default)s)"
    )
    parser.set_defaults(report="train")


def _add_advise(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", type=Path, metavar="BASE", help="base checkpoint")
    parser.add_argument(
        "--memory", required=True, metavar="SIZE", help="for experts on the device, such as 16GiB"
    )
    parser.add_argument("--trace", type=Path, metavar="DIR", help="folder of --record-routing")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="that read at a time (default: as a server would)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=_MEASURED_S,
        metavar="S",
        help="read for so long (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(report="advise")


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="file to make")
    parser.add_argument(
        "--batch-sizes",
        type=int,
        nargs="+",
        default=list(_BATCH_SIZES),
        metavar="B",
        help="requests at a time, three sizes or more (default: 1 2 4 8)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=_MEASURED_S,
        metavar="S",
        help="of each batch size, at most, in three windows (default: %(default)s)",
    )
    parser.add_argument("--base-only", action="store_true", help="ask no adapter")
    server_client.add_flags(parser, _TIMEOUT_S)
    parser.set_defaults(report="calibrate")


def run(arguments: argparse.Namespace) -> int:
    """Print one of them."""
    from sgl_esft.tools import offload_reports  # torch, which no other tool needs

    lines_of = {
        "simulate": offload_reports.simulate_lines,
        "train": offload_reports.train_lines,
        "calibrate": offload_reports.calibrate_lines,
        "advise": offload_reports.advise_lines,
    }
    for line in lines_of[arguments.report](arguments):
        print(line, flush=True)
    return _EXIT_OK
