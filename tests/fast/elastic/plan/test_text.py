"""A plan as JSON and as a table; and the planner's modules import nothing that does things."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

import sgl_elastic.plan
from sgl_elastic.plan.placement import place
from sgl_elastic.plan.planner import plan
from sgl_elastic.plan.text import describe, ranges, table
from sgl_elastic.types import Plan
from tests.fast.elastic.plan_samples import GIB, PAGE, make_shape, v2_lite

SHAPE = v2_lite()


def two_to_three() -> Plan:
    """DeepSeek-V2-Lite on devices of 64 GiB, 1 -> 2 -> 3."""
    budget = dict.fromkeys(range(3), 64 * GIB // PAGE)
    placement = None
    for devices in [(0,), (0, 1)]:
        placement = place(SHAPE, devices, placement, budget, (), 1_000_000)
    assert placement is not None
    new = place(SHAPE, (0, 1, 2), placement, budget, (), None)
    return plan(placement, new, SHAPE, (), budget)


EXPECTED = """
scale 2 -> 3: devices 0-1 -> 0-2; 20 of 64 experts move, 11.6 GB copied

device  experts kept   in  out    KV tokens    at switch        after  memory peak     after
     0            24    0    8    1,000,000    1,000,000    1,776,752      68.7 GB   68.7 GB
     1            20    0   12    1,000,000    1,000,000    1,835,007      68.7 GB   68.7 GB
     2             0   20    0            0    1,835,007    1,835,007      68.7 GB   68.7 GB

before the switch
  add_device     2
  map_trunk      2
  map_experts    2         experts 24-31, 52-63
  map_kv         2         1,835,007 tokens
  copy_trunk     0 -> 2    2.6 GB
  copy_experts   0 -> 2    3.6 GB, experts 24-31
  copy_experts   1 -> 2    5.4 GB, experts 52-63
after it
  unmap_experts  0         experts 24-31
  grow_kv        0         1,776,752 tokens
  unmap_experts  1         experts 52-63
  grow_kv        1         1,835,007 tokens
"""


def test_table() -> None:
    lines = table(two_to_three(), SHAPE).splitlines()
    assert lines == EXPECTED.strip("\n").splitlines()


def test_description_is_json_and_adds_up() -> None:
    made = two_to_three()
    described = describe(made, SHAPE)
    assert json.loads(json.dumps(described)) == described
    assert described["experts"] == {"moved": 20, "kept": 44}
    assert described["new"]["device_ids"] == [0, 1, 2]
    assert sum(link["num_bytes"] for link in described["links"]) == made.copied_bytes
    assert [(link["source_id"], link["device_id"]) for link in described["links"]] == [
        (0, 2),
        (1, 2),
    ]
    assert len(described["before"]) == len(made.before)
    for row in described["devices"]:
        assert row["peak_bytes"] == made.peak_pages[row["device_id"]] * PAGE
        assert row["final_bytes"] <= row["peak_bytes"]
    gained = sum(row["kv_tokens"] - row["kv_tokens_before"] for row in described["devices"])
    assert described["kv_tokens"] == {"gained": gained, "freed": 0}


def test_leaving_device_is_described_as_empty_in_the_end() -> None:
    shape = make_shape(expert_bytes=(64,))
    budget = dict.fromkeys(range(2), 1000)
    old = place(shape, (0, 1), None, budget, (), None)
    made = plan(old, place(shape, (0,), old, budget, (), None), shape, (), budget)
    described = describe(made, shape)
    leaving = next(row for row in described["devices"] if row["device_id"] == 1)
    assert leaving["experts_out"] == 4
    assert leaving["kv_tokens"] == leaving["kv_tokens_at_switch"] == leaving["final_bytes"] == 0
    assert described["kv_tokens"]["freed"] == old.kv_tokens_of(1)
    assert described["kv_moves"] == [{"source_id": 1, "device_id": 0}]
    assert table(made, shape).splitlines()[-1] == "KV of running requests moves 1 -> 0"


def test_empty_plan_says_so() -> None:
    shape = make_shape(expert_bytes=(64,))
    old = place(shape, (0,), None, {0: 1000}, (), None)
    lines = table(plan(old, old, shape, (), {0: 1000}), shape).splitlines()
    assert lines[-2:] == ["before the switch: nothing", "after it: nothing"]


@pytest.mark.parametrize(
    ("ids", "text"),
    [((), ""), ((3,), "3"), ((0, 1, 2), "0-2"), ((0, 2, 3, 9), "0, 2-3, 9"), ((2, 1), "2, 1")],
)
def test_ranges(ids: tuple[int, ...], text: str) -> None:
    assert ranges(ids) == text


# Standard modules that only compute; anything else of the library could read a clock or a file.
PURE = {
    "__future__",
    "bisect",
    "collections",
    "dataclasses",
    "itertools",
    "math",
    "typing",
}
MODULES = sorted(Path(sgl_elastic.plan.__file__).parent.glob("*.py"))


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found.add(str(node.module))
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_planner_is_pure(path: Path) -> None:
    for name in imports_of(path):
        ours = name in {"sgl_elastic.types", "sgl_elastic.errors"}
        ours = ours or name.startswith("sgl_elastic.plan.")
        assert ours or name.split(".")[0] in PURE & sys.stdlib_module_names | {"__future__"}, name


def test_there_are_modules_to_look_at() -> None:
    assert {"pages", "placement", "planner", "check", "request", "text"} <= {
        p.stem for p in MODULES
    }
