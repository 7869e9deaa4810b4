"""docs/elastic.md says what the code says: plan, fields, errors, states and metrics."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from sgl_elastic import errors
from sgl_elastic.autoscale.metrics import CopyMetrics, ScaleMetrics, SpareMetrics
from sgl_elastic.coordinator.app import ROUTES
from sgl_elastic.coordinator.operations import ErrorRecord, Operation, PhaseRecord, StepRecord
from sgl_elastic.coordinator.schemas import ScaleBody
from sgl_elastic.plan.placement import place
from sgl_elastic.plan.planner import plan
from sgl_elastic.plan.text import describe
from sgl_elastic.types import OperationState, Plan, ScaleRequest
from tests.fast.elastic.plan_samples import GIB, PAGE, v2_lite
from tests.fast.elastic.plan_table import table

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "elastic.md").read_text()
SHAPE = v2_lite()
BUDGETS = dict.fromkeys(range(3), 22 * GIB // PAGE)
KV_LIMIT = 400_000


def shown_plan() -> Plan:
    old = place(SHAPE, (0, 1), None, BUDGETS, (), KV_LIMIT)
    new = place(SHAPE, (0, 1, 2), old, BUDGETS, (), KV_LIMIT)
    return plan(old, new, SHAPE, (), BUDGETS)


def json_blocks() -> list[str]:
    return re.findall(r"^```json\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def keys(value: Any) -> set[str]:
    """All keys, at any depth."""
    if isinstance(value, dict):
        return set(value).union(*map(keys, value.values()))
    return set[str]().union(*map(keys, value)) if isinstance(value, list | tuple) else set()


def test_shown_plan_is_the_planners() -> None:
    assert f"```text\n{table(shown_plan(), SHAPE)}\n```" in TEXT


def test_plan_as_json_has_the_shown_fields_and_numbers() -> None:
    shown, known = json_blocks()[1], describe(shown_plan(), SHAPE)
    assert set(re.findall(r'"(\w+)":', shown)) <= keys(known)
    assert [key for key in known if f'"{key}":' not in shown] == []
    numbers = [int(number) for number in re.findall(r"\d+", shown)]
    assert [number for number in numbers if str(number) not in str(known)] == []


def test_operation_has_the_shown_fields() -> None:
    operation = Operation(
        "scale-0c5f1e9a7b21",
        ScaleRequest(3),
        steps=tuple(map(StepRecord.of, shown_plan().before)),
        phases=(PhaseRecord("plan"),),
        error=ErrorRecord("a", "b"),
    )
    shown, known = json_blocks()[0], operation.to_json()
    found = set(re.findall(r'"(\w+)":', shown)) - {"old", "new"}  # of the plan
    assert found <= keys(known)
    missing = keys({**known, "error": None, "undo_errors": []}) - found
    assert missing == set()


def test_body_fields_routes_and_states_are_in_the_page() -> None:
    assert [name for name in ScaleBody.model_fields if f"| `{name}` |" not in TEXT] == []
    paths = {route.path.replace("{operation_id}", "{id}") for route in ROUTES}
    assert [path for path in paths if path not in TEXT] == []
    assert [state for state in OperationState if f"`{state}`" not in TEXT] == []


def test_errors_of_the_table_exist_with_their_status() -> None:
    rows = re.findall(r"^\| (\d+) \| (\w+Error) \|", TEXT, re.MULTILINE)
    assert len(rows) > 3
    for status, name in rows:
        assert getattr(errors, name).http_status == int(status)


def test_metrics_are_those_of_the_code() -> None:
    registry = CollectorRegistry()
    ScaleMetrics(registry)
    SpareMetrics(registry)
    CopyMetrics(registry)
    known = {m.name + ("_total" if m.type == "counter" else "") for m in registry.collect()}
    section = TEXT.partition("## Metrics")[2].partition("## ")[0]
    assert set(re.findall(r"`(sgl_elastic:\w+)", section)) == known
