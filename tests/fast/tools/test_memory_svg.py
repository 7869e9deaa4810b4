"""The picture of a memory report: valid XML, every stretch of slots in its owner's colour."""

import itertools
import re
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace

import pytest

from sgl_esft.memory.report import MemoryReport
from sgl_esft.tools.memory_svg import report_svg
from tests.support import memory_reports

SVG = "{http://www.w3.org/2000/svg}"


def parsed(report: MemoryReport) -> ET.Element:
    return ET.fromstring(report_svg(report))


def rects(root: ET.Element) -> list[ET.Element]:
    pattern = set(root.findall(f"{SVG}defs//{SVG}rect"))
    return [rect for rect in root.iter(f"{SVG}rect") if rect not in pattern]


def words(root: ET.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def test_a_rect_for_each_stretch_and_one_in_the_legend() -> None:
    device = memory_reports.virtual_device()
    kinds = Counter(rect.get("class") for rect in rects(parsed(MemoryReport((device,)))))
    runs = Counter(run.owner for layer in device.layers for run in layer.runs)
    assert runs == {-1: 2, 0: 2, 2: 1}
    assert kinds == {"page": 1, "base": 3, "adapter0": 3, "adapter2": 2, "empty": 2 + 1}


def test_rects_lie_in_a_row_without_gaps() -> None:
    device = memory_reports.virtual_device()
    by_row: dict[str, list[ET.Element]] = {}
    for rect in rects(parsed(MemoryReport((device,)))):
        if rect.find(f"{SVG}title") is not None:
            by_row.setdefault(rect.get("y", ""), []).append(rect)
    assert len(by_row) == len(device.layers)
    for row in by_row.values():
        edges = [
            (float(r.get("x", "")), float(r.get("x", "")) + float(r.get("width", ""))) for r in row
        ]
        assert all(a[1] == pytest.approx(b[0]) for a, b in itertools.pairwise(edges))
        slot_width = (edges[0][1] - edges[0][0]) / 8
        assert edges[-1][1] - edges[0][0] == pytest.approx(20 * slot_width)


def test_hints_say_whose_slots_they_are() -> None:
    root = parsed(MemoryReport((memory_reports.virtual_device(),)))
    hints = {hint.text for rect in rects(root) if (hint := rect.find(f"{SVG}title")) is not None}
    assert "layer 1, slots 0 to 7: base" in hints
    assert 'layer 1, slots 16 to 19: in<t&"ent' in hints
    assert any(hint and hint.endswith("no memory of its own") for hint in hints)


def test_title_and_legend() -> None:
    report = memory_reports.report()
    root = parsed(report)
    title = root.findtext(f"{SVG}title") or ""
    virtual, padded = report.devices
    assert f"rank 0, F_mem {virtual.fragmentation:.3f}, 1.667 with padding" in title
    assert f"rank 1, F_mem {padded.fragmentation:.3f}" in title
    assert 'in<t&"ent, 0.06 MB' in words(root)
    assert "base, 0.25 MB" in words(root)


def test_every_class_has_a_colour_of_its_own() -> None:
    device = replace(
        memory_reports.virtual_device(), adapters={f"a{slot}": slot for slot in range(40)}
    )
    text = report_svg(MemoryReport((device,)))
    colours = re.findall(
        r"^\.(?:base|adapter\d+) \{ fill: (#\w{6}); stroke: #\w{6}; \}$", text, re.M
    )
    assert len(colours) == len(set(colours)) == 41


def test_everything_lies_on_the_page() -> None:
    root = parsed(memory_reports.report())
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    for rect in rects(root):
        assert float(rect.get("x", "")) + float(rect.get("width", "")) <= width
        assert float(rect.get("y", "")) + float(rect.get("height", "")) <= height
    for text in root.iter(f"{SVG}text"):
        assert 0 < float(text.get("y", "")) < height


def test_names_that_xml_cannot_hold() -> None:
    device = replace(
        memory_reports.virtual_device(), device="npu\x00:0\x1b]]>", adapters={"\x07": 0}
    )
    heading = words(parsed(MemoryReport((device,))))
    assert any(
        "npu\N{REPLACEMENT CHARACTER}:0\N{REPLACEMENT CHARACTER}]]>" in text for text in heading
    )


def test_long_names_are_cut_in_the_legend_only() -> None:
    name = "n" * 64
    root = parsed(MemoryReport((replace(memory_reports.virtual_device(), adapters={name: 0}),)))
    assert f"{'n' * 27}…, 0.06 MB" in words(root)
    hints = [rect.findtext(f"{SVG}title") or "" for rect in rects(root)]
    assert any(hint.endswith(f": {name}") for hint in hints)


def test_no_devices_and_no_layers() -> None:
    assert parsed(MemoryReport(())).tag == f"{SVG}svg"
    bare = replace(memory_reports.padded_device(), layers=(), adapters={})
    assert Counter(r.get("class") for r in rects(parsed(MemoryReport((bare,))))) == {
        "page": 1,
        "base": 1,
        "empty": 1,
    }
