"""A memory report as lines for a terminal.

MemoryReport -> [report_lines] -> `sgl-esft memory`
"""

from __future__ import annotations

from collections.abc import Iterator

from sgl_esft.byte_size import gigabytes
from sgl_esft.memory.report import BASE_OWNER, DeviceMemory, LayerMemory, MemoryReport, PoolMemory


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
    if device.kv:
        yield (
            f"KV cache  {device.kv.num_tokens:,} tokens of {device.kv.bytes_per_token:,} B; "
            f"{device.kv_tokens_gained:,} tokens' memory saved over padding"
        )
    for name, adapter_slot in sorted(device.adapters.items(), key=lambda entry: entry[1]):
        held = gigabytes(device.owner_bytes(adapter_slot))
        yield f"adapter   slot {adapter_slot}: {name}, {held}"


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
