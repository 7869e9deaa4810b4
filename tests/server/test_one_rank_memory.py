"""GET /v1/memory and expert memory as a whole: pages come with adapters and go with them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import requests

from sgl_esft.memory.report import DeviceMemory, MemoryReport
from tests.support.one_rank import NUM_SLOTS, OneRank

pytestmark = pytest.mark.server

SVG = "{http://www.w3.org/2000/svg}"


def device(one_rank: OneRank) -> DeviceMemory:
    response = requests.get(f"{one_rank.server.url}/v1/memory", timeout=60)
    assert response.status_code == 200
    (found,) = MemoryReport.from_json(response.json()).devices
    return found


def warm(one_rank: OneRank) -> DeviceMemory:
    """The report with a0 and a1 on the device and nothing else."""
    for adapter in ("a0", "a1"):
        one_rank.ask(0, adapter)
    return device(one_rank)


def test_pages_counted_are_pages_resident(one_rank: OneRank) -> None:
    report = warm(one_rank)
    assert report.expert_memory == "virtual"
    assert report.pool.page_bytes == 128 << 10
    assert report.mapped_bytes == report.pool.used_bytes
    assert report.resident_bytes == report.pool.used_bytes + report.pool.free_bytes


def test_only_mapped_slots_take_memory(one_rank: OneRank) -> None:
    report = warm(one_rank)
    assert set(report.adapters) == {"a0", "a1"}
    family = one_rank.family
    for name, slot in report.adapters.items():
        folder = family.adapters[name]
        tensors = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
        # The files have headers beside the experts.
        assert 0 <= tensors - report.owner_bytes(slot) < 64 << 10
    assert report.used_bytes <= report.mapped_bytes < report.padded_bytes
    assert report.shared_bytes > 0, "experts that end within a page share it with a neighbour"
    assert report.fragmentation < report.padded_fragmentation
    gained = (report.padded_bytes - report.mapped_bytes) // report.kv.bytes_per_token
    assert report.kv_tokens_gained == gained > 0


def test_an_exchange_gives_the_pages_back(one_rank: OneRank) -> None:
    """Three adapters on two slots, again and again: nothing grows."""
    before = warm(one_rank)
    for adapter in ("a2", "a0", "a1", "a2", "a0", "a1"):
        assert one_rank.ask(0, adapter) == one_rank.expected[adapter][0]
    after = warm(one_rank)
    assert after.mapped_bytes == before.mapped_bytes
    assert len(after.adapters) == NUM_SLOTS
    assert after.pool.used_bytes == before.pool.used_bytes


def test_load_and_unload_leave_nothing_behind(one_rank: OneRank) -> None:
    before = warm(one_rank)
    for _ in range(3):
        assert one_rank.server.load("a3", one_rank.family.adapters["a3"]).status_code == 200
        assert one_rank.ask(0, "a3") == one_rank.expected["a3"][0]
        assert "a3" in device(one_rank).adapters
        assert one_rank.server.unload("a3").status_code == 200
        assert "a3" not in device(one_rank).adapters
    assert warm(one_rank).mapped_bytes == before.mapped_bytes


def test_the_route_is_described(one_rank: OneRank) -> None:
    paths = requests.get(f"{one_rank.server.url}/openapi.json", timeout=60).json()["paths"]
    assert list(paths["/v1/memory"]) == ["get"]


def test_metrics_say_what_the_report_says(one_rank: OneRank) -> None:
    report = warm(one_rank)
    text = requests.get(f"{one_rank.server.url}/metrics", timeout=60).text
    ours = dict(re.findall(r'^sgl_esft:(\S+),?rank="0"\} (\S+)$', text, re.MULTILINE))
    assert float(ours['expert_memory_bytes{kind="mapped",']) == report.mapped_bytes
    assert float(ours['expert_memory_bytes{kind="padded",']) == report.padded_bytes
    assert float(ours["expert_memory_fragmentation{"]) == report.fragmentation
    assert float(ours["adapters_on_device{"]) == len(report.adapters)


def test_the_tool_prints_and_draws_it(one_rank: OneRank, tmp_path: Path) -> None:
    picture = tmp_path / "memory.svg"
    command = [sys.executable, "-m", "sgl_esft.tools.cli", "memory", "--url", one_rank.server.url]
    done = subprocess.run(
        [*command, "--svg", str(picture)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "F_mem" in done.stdout
    assert ElementTree.parse(picture).getroot().tag == f"{SVG}svg"
