"""The launcher's own flags; everything else on the command line is SGLang's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn, get_args

from sgl_esft.byte_size import parse_bytes
from sgl_esft.config import (
    DEFAULT_HEAT_EVERY,
    DEFAULT_MAX_OVERTAKES,
    DEFAULT_QUANTISED_ADAPTERS_BYTES,
    DEFAULT_SLOT_OVERTAKES,
    EXPERT_MEMORY_KINDS,
    REROUTE_KINDS,
    ExpertMemoryKind,
    RecordConfig,
)
from sgl_esft.env import LogFormat
from sgl_esft.errors import ConfigError
from sgl_esft_launch import access, health, lora, tiers
from sgl_esft_launch.access import AccessFlags
from sgl_esft_launch.health import HealthFlags
from sgl_esft_launch.lora import LoraFlags
from sgl_esft_launch.tiers import TierFlags

DEFAULT_PORT = 30000
DEFAULT_HOST = "127.0.0.1"

_EPILOG = """\
every SGLang flag works too (python -m sglang.launch_server --help), for example --tp-size,
--ep-size, --attn-dp-size, --max-loaded-loras.

examples:
  python -m sgl_esft.launch_server
      the embedded demo: a small DeepSeek-V2 and its adapters
  python -m sgl_esft.launch_server --model-path BASE --esft-adapters math=DIR intent=DIR
  python -m sgl_esft.launch_server --elastic --max-devices 4 --dp-size 1
      the demo on one device of four; POST /v1/scale changes how many
"""


@dataclass(frozen=True)
class LaunchFlags:
    """The command line, less SGLang's part. None = not given."""

    model_path: str | None
    esft_adapters: tuple[str, ...]
    max_adapters: int | None
    max_experts_per_adapter: int | None
    expert_memory: ExpertMemoryKind
    expert_page_bytes: int | None
    adapter_memory_bytes: int | None
    adapter_host_bytes: int | None
    quantised_adapters: str | None
    quantised_adapters_bytes: int
    reroute: str
    max_overtakes: int | None
    adapter_root: str | None
    device_memory_bytes: int | None
    device_ledger: str | None
    weave: bool
    host: str
    port: int
    tp_size: int
    dp_size: int
    access: AccessFlags
    heat_every: int
    log_format: str
    verbose: bool
    health: HealthFlags
    lora: LoraFlags
    tiers: TierFlags | None = None  # None = no --expert-cache
    record: RecordConfig | None = None  # None = no --record-routing


class Parser(argparse.ArgumentParser):
    """A bad value is one line, as every mistake."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')} (--help explains the flags)")


def build_parser() -> argparse.ArgumentParser:
    """The parser; SGLang's own flags are left over by it."""
    parser = Parser(
        prog="python -m sgl_esft.launch_server",
        description="Serve one MoE base model and many ESFT adapters with SGLang.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version",
        action="store_true",
        help="show the versions of sgl-esft, SGLang and torch, and the device, and exit",
    )
    esft = parser.add_argument_group("ESFT")
    _add_esft_flags(esft)
    _add_quantised_flags(esft)
    lora.add_flags(parser.add_argument_group("LoRA beside ESFT"))
    tiers.add_flags(parser.add_argument_group("experts in tiers"))
    access.add_flags(parser.add_argument_group("access"))
    _add_observe_flags(parser.add_argument_group("to be seen"))
    health.add_flags(parser.add_argument_group("health"))
    _add_device_flags(parser.add_argument_group("the CPU reference platform"))
    _add_shared_flags(parser.add_argument_group("SGLang flags that the launcher reads too"))
    return parser


def _add_esft_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--esft-adapters",
        nargs="*",
        action="extend",
        default=[],
        metavar="NAME=DIR",
        help="adapters to load at start; more can be loaded later over HTTP",
    )
    group.add_argument(
        "--max-adapters",
        "--max-loras-per-batch",
        type=int,
        metavar="N",
        help="ESFT slots on the device: so many ESFT adapters can run in one batch "
        "(default: the number of --esft-adapters, 4 without any)",
    )
    group.add_argument(
        "--max-experts-per-adapter",
        type=int,
        metavar="E",
        help="slots reserved per adapter and MoE layer (default: what --esft-adapters need, "
        "13 without any)",
    )
    group.add_argument(
        "--expert-memory",
        choices=EXPERT_MEMORY_KINDS,
        default="virtual",
        help="virtual (default): pages come and go with adapters; padded: every slot is memory "
        "from the start (the paper's baseline)",
    )
    group.add_argument(
        "--adapter-memory",
        metavar="SIZE",
        help="device memory for adapters' experts, such as 4GiB, taken at start before the KV "
        "cache is sized (default: on a CPU as much as they want; where memory is limited what "
        "--esft-adapters need, or all slots without any)",
    )
    group.add_argument(
        "--adapter-host-memory",
        metavar="SIZE",
        help="host memory for loaded adapters' experts, of all ranks together, such as 16GiB "
        "(of each replica, with --dp-size and no DP attention): the idle adapter used longest ago "
        "leaves for a new one, and is read again when a request names it (default: no limit)",
    )
    group.add_argument(
        "--expert-page-size",
        metavar="SIZE",
        help="page size of virtual expert memory on a CPU, 4KiB to 2MiB (default: the largest "
        "that is not larger than an expert's smallest tensor); accelerators have their own",
    )
    group.add_argument(
        "--reroute",
        choices=REROUTE_KINDS,
        default="fused",
        help="fused (default): one kernel a layer; router: inside the router's top-k kernel, no "
        "launch of its own (CUDA); unfused: a chain of torch operations (the paper's baseline)",
    )
    group.add_argument(
        "--max-overtakes",
        type=int,
        metavar="B",
        help="requests of adapters that run already may go ahead of waiting ones, of which each is "
        "overtaken by at most B requests that came later (default: "
        f"{DEFAULT_MAX_OVERTAKES}, and {DEFAULT_SLOT_OVERTAKES} where it waits for an adapter's "
        "slot; 0: first come, first served)",
    )
    group.add_argument(
        "--adapter-root",
        metavar="DIR",
        help="load adapters from below this folder only; relative adapter paths start there",
    )
    group.add_argument(
        "--no-esft", action="store_true", help="serve the base model only, as plain SGLang does"
    )


def _add_quantised_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--quantised-adapters",
        metavar="DIR",
        help="over a quantised base: folder in which adapters are kept quantised, so that each is "
        "quantised once (default: sgl-esft/quantised-adapters in $XDG_CACHE_HOME or ~/.cache)",
    )
    group.add_argument(
        "--quantised-adapters-bytes",
        metavar="SIZE",
        default=f"{DEFAULT_QUANTISED_ADAPTERS_BYTES // 10**9}GB",
        help="disk space of that folder: copies used longest ago are removed for new ones "
        "(default: %(default)s)",
    )


def _add_observe_flags(group: argparse._ArgumentGroup) -> None:
    tiers.add_record_flags(group)
    group.add_argument(
        "--heat-every",
        type=int,
        metavar="N",
        default=DEFAULT_HEAT_EVERY,
        help="count the tokens of every expert in every Nth step, for GET /v1/heat "
        "(default: %(default)s; 0: never)",
    )
    group.add_argument(
        "--log-format",
        choices=get_args(LogFormat),
        default="text",
        help="text (default): SGLang's lines; json: a JSON object a line, and one for each request "
        "with its id, adapters, tokens and times",
    )
    group.add_argument(
        "--verbose",
        action="store_true",
        help="everything that SGLang and its libraries say: the same as --log-level info "
        "(default: warnings, less those of every start; with --config, what its log-level says)",
    )


def _add_device_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--device-memory",
        metavar="SIZE",
        help="memory of each rank's device, such as 512MiB: model, expert pages and KV cache must "
        "fit, and SGLang sizes the KV cache by it (default: the machine's memory); with --elastic "
        "the bytes of weights and KV on each device, on an accelerator too (default: 1GiB)",
    )
    group.add_argument(
        "--device-ledger",
        metavar="FILE",
        help="several servers that name the same file share the devices, as processes on one GPU "
        "do (default: each has devices of its own)",
    )


def _add_shared_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model-path", "--model", metavar="DIR", help="the base model (default: the demo zoo)"
    )
    group.add_argument(
        "--host", default=DEFAULT_HOST, help="default: %(default)s; give keys with any other"
    )
    group.add_argument("--port", type=int, default=DEFAULT_PORT, help="default: %(default)s")
    group.add_argument("--tp-size", "--tensor-parallel-size", "--tp", type=int, default=1)
    group.add_argument(
        "--dp-size",
        "--data-parallel-size",
        "--dp",
        type=int,
        default=1,
        help="data parallel ranks; with --elastic: at start (default: %(default)s)",
    )


def parse(argv: Sequence[str] | None) -> tuple[LaunchFlags, list[str]]:
    """The launcher's flags, and what is left for SGLang. Raises ConfigError."""
    found, rest = build_parser().parse_known_args(argv)
    if found.no_esft and found.esft_adapters:
        raise ConfigError("--no-esft and --esft-adapters exclude each other")
    if found.no_esft and found.max_loras is not None:
        raise ConfigError(
            "--no-esft and --max-loras: without weaving SGLang's LoRA has no such flag"
        )
    found.access = access.read_flags(found)
    found.health = health.read_flags(found)
    found.lora = lora.read_flags(found)
    found.tiers = tiers.read_flags(found)
    found.record = tiers.read_record(found)
    found.esft_adapters = tuple(found.esft_adapters)
    found.weave = not found.no_esft
    found.expert_page_bytes = _bytes_of("--expert-page-size", found.expert_page_size)
    found.adapter_memory_bytes = _bytes_of("--adapter-memory", found.adapter_memory)
    found.adapter_host_bytes = _bytes_of("--adapter-host-memory", found.adapter_host_memory)
    found.quantised_adapters_bytes = parse_bytes(
        found.quantised_adapters_bytes, "--quantised-adapters-bytes"
    )
    found.device_memory_bytes = _bytes_of("--device-memory", found.device_memory)
    own = {each.name: getattr(found, each.name) for each in fields(LaunchFlags)}
    return LaunchFlags(**own), [*rest, *(() if found.weave else _for_sglang(found))]


def _for_sglang(found: Any) -> list[str]:
    """What SGLang's own LoRA takes of the flags that are ours where there is weaving."""
    slots = found.max_adapters
    return [*found.lora.argv, *(() if slots is None else ("--max-loras-per-batch", str(slots)))]


def _bytes_of(flag: str, text: str | None) -> int | None:
    return None if text is None else parse_bytes(text, flag)
