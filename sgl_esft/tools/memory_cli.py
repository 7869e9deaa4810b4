"""The two subcommands about memory: `sgl-esft memory` of a running server, `sgl-esft plan` before.

cli.py -> [run_memory] -> server_client.call -> MemoryReport -> [report_lines], memory_svg
       -> [run_plan]   -> model_sizes, adapter_shapes, memory/plan.py; plan_speed.py with --speed
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sgl_esft.byte_size import gigabytes, parse_bytes
from sgl_esft.errors import ConfigError, ServerAnswerError
from sgl_esft.formats.adapter_shapes import AdapterShape, profile_shapes, read_adapter_shape
from sgl_esft.memory.model_sizes import ModelSizes, read_model_sizes
from sgl_esft.memory.report import (
    BASE_OWNER,
    DeviceMemory,
    ExpertTiers,
    LayerMemory,
    MemoryReport,
    PoolMemory,
)
from sgl_esft.tools import server_client
from sgl_esft.tools.memory_svg import report_svg

if TYPE_CHECKING:  # run_plan imports them: only planning needs the extension module, or traces
    from sgl_esft.memory.plan import MemoryPlan
    from sgl_esft.tools.plan_speed import SpeedPlan

_EXIT_OK: Final = 0
_ROUTE: Final = "/v1/memory"
_TIMEOUT_S: Final = 10.0


def configure_memory(parser: argparse.ArgumentParser) -> None:
    """Arguments of `sgl-esft memory`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw it into this file")
    server_client.add_flags(parser, _TIMEOUT_S)


def run_memory(arguments: argparse.Namespace) -> int:
    """Fetch, draw, print."""
    answer = server_client.call(server_client.read_flags(arguments), "GET", _ROUTE)
    if answer is None:
        raise ServerAnswerError(f"{arguments.url}{_ROUTE} answers with nothing.")
    report = MemoryReport.from_json(answer)
    if arguments.svg:
        arguments.svg.write_text(report_svg(report), encoding="utf-8")
    if arguments.json:
        print(json.dumps(report.to_json()))
    else:
        print("\n".join(report_lines(report)))
    return _EXIT_OK


def report_lines(report: MemoryReport) -> Iterator[str]:
    """A summary and a row for each layer, device after device."""
    for number, device in enumerate(report.devices):
        if number:
            yield ""
        yield from _summary(device)
        yield ""
        yield from _layer_rows(device)


def _summary(device: DeviceMemory) -> Iterator[str]:
    yield f"device    rank {device.rank}, {device.device}, {device.expert_memory} expert memory"
    yield (
        f"experts   {gigabytes(device.mapped_bytes)} mapped, {gigabytes(device.used_bytes)} used, "
        f"{gigabytes(device.shared_bytes)} on shared pages; "
        f"addresses for {gigabytes(device.reserved_bytes)}"
    )
    yield (
        f"F_mem     {device.fragmentation:.3f} now, {device.padded_fragmentation:.3f} with padding "
        f"({gigabytes(device.padded_bytes)})"
    )
    if device.pool:
        yield from _pool_lines(device.pool)
    if device.resident_bytes is not None:
        yield f"resident  {gigabytes(device.resident_bytes)} by the operating system's count"
    if device.tiers:
        yield from _tier_lines(device.tiers)
    if device.kv:
        yield (
            f"KV cache  {device.kv.num_tokens:,} tokens of {device.kv.bytes_per_token:,} B; "
            f"{device.kv_tokens_gained:,} tokens' memory saved over padding"
        )
    for name, adapter_slot in sorted(device.adapters.items(), key=lambda entry: entry[1]):
        held = gigabytes(device.owner_bytes(adapter_slot))
        yield f"adapter   slot {adapter_slot}: {name}, {held}"


def _tier_lines(tiers: ExpertTiers) -> Iterator[str]:
    hits = tiers.num_hits / max(1, tiers.num_requests)
    yield (
        f"tiers     {tiers.policy}, {tiers.num_rows} rows a layer: {hits:.1%} of "
        f"{tiers.num_requests:,} were there, {tiers.num_loads:,} read on demand"
    )
    yield (
        f"ahead     {tiers.num_prefetches:,} read, {tiers.num_useful:,} used; "
        f"{gigabytes(tiers.read_bytes)} read in all, {tiers.stall_s:.1f} s stalled, "
        f"{tiers.num_failed:,} reads failed"
    )


def _pool_lines(pool: PoolMemory) -> Iterator[str]:
    limit = "no budget" if pool.budget_bytes is None else f"budget {gigabytes(pool.budget_bytes)}"
    yield (
        f"pages     of {pool.page_bytes:,} B: {gigabytes(pool.used_bytes)} used "
        f"(peak {gigabytes(pool.peak_used_bytes)}), {gigabytes(pool.free_bytes)} free, {limit}; "
        f"{pool.num_created:,} created, {pool.num_destroyed:,} destroyed"
    )


def _layer_rows(device: DeviceMemory) -> Iterator[str]:
    yield "layer  slots  base  mapped        used          padded        by adapter slot"
    for layer in device.layers:
        sizes = (layer.mapped_bytes, layer.used_bytes, layer.padded_bytes)
        cells = "  ".join(f"{gigabytes(size):12}" for size in sizes)
        held = " ".join(f"{r.owner}:{r.count}" for r in layer.runs if r.owner != BASE_OWNER)
        row = f"{layer.layer_id:5}  {layer.num_slots:5}  {_num_base(layer):4}  {cells}  {held}"
        yield row.rstrip()


def _num_base(layer: LayerMemory) -> int:
    return sum(run.count for run in layer.runs if run.owner == BASE_OWNER)


def configure_plan(parser: argparse.ArgumentParser) -> None:
    """Arguments of `sgl-esft plan`."""
    parser.add_argument(
        "--model-config",
        type=Path,
        required=True,
        metavar="DIR|FILE",
        help="base checkpoint, or its config.json alone",
    )
    adapters = parser.add_mutually_exclusive_group(required=True)
    adapters.add_argument(
        "--adapters",
        type=Path,
        nargs="+",
        metavar="DIR|FILE",
        help="adapter folders, or expert_cfg.json files alone",
    )
    adapters.add_argument(
        "--profile",
        metavar="table1[:NAME,...]",
        help="adapters with as many experts as those of the ExpertWeave paper's table 1",
    )
    parser.add_argument(
        "--device-memory", required=True, metavar="SIZE", help="of one accelerator, e.g. 64GiB"
    )
    parser.add_argument(
        "--memory-fraction",
        type=float,
        default=0.9,
        metavar="F",
        help="for weights and KV cache; default: %(default)s",
    )
    parser.add_argument(
        "--reserve", metavar="SIZE", help="taken off that for each engine; default: nothing"
    )
    parser.add_argument("--page-size", default="2MiB", metavar="SIZE", help="default: %(default)s")
    parser.add_argument("--kv-dtype", metavar="DTYPE", help="default: the checkpoint's")
    parser.add_argument(
        "--max-experts-per-adapter",
        type=int,
        metavar="E",
        help="slots of an adapter; default: what the adapters need",
    )
    parser.add_argument(
        "--counts",
        default="1,2,3,10,20",
        metavar="N,...",
        help="numbers of adapters; default: %(default)s",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    _add_speed(parser)


def _add_speed(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "speed",
        "Tokens a second of a server with --expert-cache, predicted where --speed is given.",
    )
    group.add_argument(
        "--speed",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="files of `sgl-esft offload calibrate`, of one machine and this base",
    )
    group.add_argument(
        "--trace", type=Path, metavar="DIR", help="folder of --record-routing: what is asked"
    )
    group.add_argument(
        "--expert-cache",
        type=int,
        nargs="+",
        metavar="N",
        help="rows of each layer; default: those of the files, and all",
    )
    group.add_argument(
        "--batch-sizes",
        type=int,
        nargs="+",
        metavar="B",
        help="requests that decode together; default: 1 2 4 8",
    )
    group.add_argument(
        "--expert-policy", metavar="NAME", help="one that fetches nothing ahead; default: lfu"
    )
    group.add_argument(
        "--expert-read-bandwidth",
        metavar="SIZE",
        help="of a link that carries at most so many bytes a second; default: as measured",
    )


def run_plan(arguments: argparse.Namespace) -> int:
    """Read, lay out, print."""
    sizes = read_model_sizes(arguments.model_config)
    plan = _plan(arguments, sizes, _shapes(arguments, sizes))
    speed = _speed(arguments, sizes)
    if arguments.json:
        told = {} if speed is None else {"speed": speed.as_json()}
        print(json.dumps(plan.as_json() | told))
    else:
        print("\n".join([*plan.as_table(), *(() if speed is None else ("", *speed.table()))]))
    return _EXIT_OK


def _speed(arguments: argparse.Namespace, sizes: ModelSizes) -> SpeedPlan | None:
    """None where it is not asked for. Raises ConfigError for its flags without it."""
    if arguments.speed is not None:
        from sgl_esft.tools.plan_speed import plan_speed

        return plan_speed(arguments, sizes.spec)
    names = ("trace", "expert_cache", "batch_sizes", "expert_policy", "expert_read_bandwidth")
    given = [f"--{n.replace('_', '-')}" for n in names if getattr(arguments, n) is not None]
    if given:
        raise ConfigError(f"{', '.join(given)} without --speed: give it too, or leave out")
    return None


def _shapes(arguments: argparse.Namespace, sizes: ModelSizes) -> list[AdapterShape]:
    if arguments.profile is not None:
        return profile_shapes(arguments.profile, sizes.spec)
    return [read_adapter_shape(path, sizes.spec) for path in arguments.adapters]


def _plan(
    arguments: argparse.Namespace, sizes: ModelSizes, shapes: list[AdapterShape]
) -> MemoryPlan:
    try:
        from sgl_esft.memory.plan import Device, plan_memory
    except ImportError as error:
        raise ConfigError(
            f"planning needs the extension module of csrc/ ({error}): run `make setup`."
        ) from error
    device = Device(
        memory_bytes=parse_bytes(arguments.device_memory, "--device-memory"),
        memory_fraction=arguments.memory_fraction,
        reserve_bytes=parse_bytes(arguments.reserve, "--reserve") if arguments.reserve else 0,
        page_bytes=parse_bytes(arguments.page_size, "--page-size"),
    )
    return plan_memory(
        sizes,
        shapes,
        device,
        _counts(arguments.counts),
        kv_bytes_per_token=sizes.kv_bytes_per_token(arguments.kv_dtype),
        max_experts=arguments.max_experts_per_adapter,
    )


def _counts(text: str) -> list[int]:
    try:
        return [int(count) for count in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--counts is {text!r}, not a list such as 1,2,3.") from error
