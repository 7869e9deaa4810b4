"""A memory report as a picture: a row for each layer, a stretch of slots for each owner.

    MemoryReport -> [report_svg] -> `sgl-esft memory --svg FILE`

The picture brings its own background, so it reads on a light page and on a dark one.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterator
from typing import Final
from xml.sax.saxutils import escape

from sgl_esft.byte_size import gigabytes
from sgl_esft.memory.report import BASE_OWNER, DeviceMemory, LayerMemory, MemoryReport, SlotRun

_WIDTH: Final = 980
_LEFT, _RIGHT = 76, 96  # beside the slots: layer numbers, bytes
_ROW, _BAR = 18, 14  # heights, pixels
_MAX_SLOT_WIDTH: Final = 24.0
_LEGEND_COLUMNS: Final = 3
_LEGEND_NAME: Final = 28  # characters; the rows' hints have names in full
_NOBODY: Final = BASE_OWNER - 1  # the owner of slots without memory of their own
_BASE_COLOUR: Final = ("#e5e7eb", "#6b7280")
_STYLE: Final = """\
text { font-family: "Segoe UI", "Helvetica Neue", Arial, sans-serif; font-size: 13px;
       fill: #111827; }
.small { font-size: 11.5px; fill: #4b5563; }
.head { font-weight: 600; font-size: 15px; }
.end { text-anchor: end; }
rect { stroke-width: 1; }
.page { fill: #ffffff; stroke: #d1d5db; rx: 10px; }
.empty { fill: url(#hatch); stroke: #9ca3af; stroke-dasharray: 3 3; }"""
_HATCH: Final = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="6" height="6" fill="#ffffff" stroke="none"/>'
    '<path d="M0 0 V6" stroke="#d1d5db" stroke-width="2"/></pattern></defs>'
)


def report_svg(report: MemoryReport) -> str:
    """The whole picture, one SVG document."""
    parts: list[str] = []
    owners: set[int] = set()
    y = 16
    for device in report.devices:
        parts += _heading(device, y)
        entries = _legend_entries(device)
        parts += _legend(entries, y + 66)
        y += 66 + 22 * math.ceil(len(entries) / _LEGEND_COLUMNS)
        parts += _rows(device, y)
        y += _ROW * len(device.layers) + 30
        owners |= {run.owner for layer in device.layers for run in layer.runs}
        owners |= set(device.adapters.values())
    title = "Expert memory: " + "; ".join(map(_fragmentation, report.devices))
    return "\n".join([*_opening(y, title, owners), *parts, "</svg>\n"])


def _opening(height: int, title: str, owners: set[int]) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img">'
    )
    yield f"<title>{_plain(title)}</title>"
    yield "<style>"
    yield _STYLE
    for owner in sorted({BASE_OWNER, *owners}):
        fill, stroke = _colours(owner)
        yield f".{_kind(owner)} {{ fill: {fill}; stroke: {stroke}; }}"
    yield "</style>"
    yield _HATCH
    yield f'<rect class="page" x="1" y="1" width="{_WIDTH - 2}" height="{height - 2}"/>'


def _fragmentation(device: DeviceMemory) -> str:
    return (
        f"rank {device.rank}, F_mem {device.fragmentation:.3f}, "
        f"{device.padded_fragmentation:.3f} with padding"
    )


def _heading(device: DeviceMemory, y: int) -> Iterator[str]:
    words = f"Expert memory of rank {device.rank} ({device.device}): {device.expert_memory}"
    yield _text(20, y + 14, words, "head")
    now, padded = gigabytes(device.mapped_bytes), gigabytes(device.padded_bytes)
    yield _text(
        20,
        y + 36,
        f"{now} mapped, F_mem {device.fragmentation:.3f}; with padding {padded}, "
        f"F_mem {device.padded_fragmentation:.3f}",
    )


def _legend_entries(device: DeviceMemory) -> list[tuple[str, str]]:
    """(class of rect, words) of everything that the rows show."""
    used = {run.owner for layer in device.layers for run in layer.runs}
    entries = [(_kind(BASE_OWNER), f"base, {gigabytes(device.owner_bytes(BASE_OWNER))}")]
    for owner in sorted((used | set(device.adapters.values())) - {BASE_OWNER}):
        name = _short(_name(device, owner))
        entries.append((_kind(owner), f"{name}, {gigabytes(device.owner_bytes(owner))}"))
    return [*entries, (_kind(_NOBODY), _name(device, _NOBODY))]


def _legend(entries: list[tuple[str, str]], y: int) -> Iterator[str]:
    for index, (kind, words) in enumerate(entries):
        row, column = divmod(index, _LEGEND_COLUMNS)
        x = 20 + column * (_WIDTH - 40) // _LEGEND_COLUMNS
        yield _rect(x, y + 22 * row - 12, 14, _BAR, kind)
        yield _text(x + 22, y + 22 * row, words)


def _rows(device: DeviceMemory, y: int) -> Iterator[str]:
    most = max((layer.num_slots for layer in device.layers), default=1)
    slot_width = min(_MAX_SLOT_WIDTH, (_WIDTH - _LEFT - _RIGHT) / most)
    for layer in device.layers:
        yield _text(_LEFT - 8, y + 11, f"layer {layer.layer_id}", "small end")
        for stretch in _stretches(layer):
            yield _rect(
                _LEFT + stretch.first * slot_width,
                y,
                stretch.count * slot_width,
                _BAR,
                _kind(stretch.owner),
                _hint(device, layer, stretch),
            )
        x = _LEFT + layer.num_slots * slot_width + 8
        yield _text(x, y + 11, gigabytes(layer.mapped_bytes), "small")
        y += _ROW


def _stretches(layer: LayerMemory) -> Iterator[SlotRun]:
    """The layer's runs and, between them, the slots of nobody."""
    end = 0
    for run in (*layer.runs, SlotRun(layer.num_slots, 0, _NOBODY)):
        if run.first > end:
            yield SlotRun(end, run.first - end, _NOBODY)
        if run.count:
            yield run
        end = run.first + run.count


def _hint(device: DeviceMemory, layer: LayerMemory, stretch: SlotRun) -> str:
    """What a browser shows when the pointer rests there."""
    last = stretch.first + stretch.count - 1
    whose = _name(device, stretch.owner)
    return f"layer {layer.layer_id}, slots {stretch.first} to {last}: {whose}"


def _name(device: DeviceMemory, owner: int) -> str:
    names = {slot: name for name, slot in device.adapters.items()}
    names |= {BASE_OWNER: "base", _NOBODY: "no memory of its own"}
    return names.get(owner, f"adapter slot {owner}")


def _kind(owner: int) -> str:
    return {_NOBODY: "empty", BASE_OWNER: "base"}.get(owner, f"adapter{owner}")


def _colours(owner: int) -> tuple[str, str]:
    """Fill and outline; hues of neighbouring adapter slots lie far apart (golden ratio)."""
    if owner == BASE_OWNER:
        return _BASE_COLOUR
    hue = (0.58 + owner * 0.618034) % 1.0
    return _hex(hue, 0.80), _hex(hue, 0.35)


def _hex(hue: float, lightness: float) -> str:
    channels = colorsys.hls_to_rgb(hue, lightness, 0.75)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


def _rect(
    x: float, y: float, width: float, height: float, kind: str, hint: str | None = None
) -> str:
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    if hint is None:
        return f'<rect class="{kind}" {place}/>'
    return f'<rect class="{kind}" {place}><title>{_plain(hint)}</title></rect>'


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{_plain(words)}</text>'


def _short(name: str) -> str:
    return name if len(name) <= _LEGEND_NAME else name[: _LEGEND_NAME - 1] + "…"


def _plain(words: str) -> str:
    """Escaped, and without the control characters that XML cannot hold."""
    return escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words))
