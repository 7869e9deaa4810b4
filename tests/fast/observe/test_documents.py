"""docs/observability.md and the Grafana dashboard say what the code says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from sgl_esft.config import DEFAULT_HEAT_EVERY
from sgl_esft.memory.metrics import MemoryMetrics
from sgl_esft.observe.expert_tier_metrics import ExpertTierMetrics
from sgl_esft.observe.labels import MAX_ADAPTERS
from sgl_esft.observe.request_metrics import OUTCOMES, RequestMetrics, ready_gauge
from sgl_esft.observe.tier_metrics import DeviceTierMetrics, HostTierMetrics
from sgl_esft.plugin import heat_hooks
from sgl_esft.plugin.lora_store import LoraMetrics
from sgl_esft.plugin.schedule_hooks import BatchingMetrics
from sgl_esft.weave.heat import MAX_NAMES, HeatSampler
from sgl_esft_launch import flags

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "observability.md").read_text()
DASHBOARD: dict[str, Any] = json.loads((DOCS / "grafana" / "sgl-esft.json").read_text())
ELASTIC = (DOCS / "elastic.md").read_text() + (DOCS / "autoscaling.md").read_text()
_METRIC = re.compile(r"\b(?:sgl_esft|sgl_elastic|sglang):\w+")
# SGLang's gauges that the panels show; the server test finds them at /metrics.
SGLANGS = {"sglang:token_usage", "sglang:num_running_reqs", "sglang:num_queue_reqs"}


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> dict[str, list[str]]:
    """First cell -> the others, of all tables of a section, less their heads."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section(title).splitlines()
        if line.startswith("| `")
    ]
    return {first.strip("`"): rest for first, *rest in cells}


def documented() -> dict[str, set[str]]:
    """Metric -> its labels."""
    return {
        name: set(re.findall(r"`(\w+)`", labels))
        for name, (labels, *_) in rows("Metrics").items()
        if name.startswith("sgl_esft:")
    }


def of_the_code() -> dict[str, set[str]]:
    registry = CollectorRegistry()
    made = [
        RequestMetrics(registry),
        DeviceTierMetrics(0, registry),
        ExpertTierMetrics(0, registry),
        HostTierMetrics(registry),
        MemoryMetrics(registry),
        BatchingMetrics(0, registry),
        LoraMetrics(0, registry),
    ]
    assert made
    heat_hooks.distinct_summary((), registry)
    ready_gauge(registry)
    collectors = set(registry._collector_to_names)
    return {
        f"{c._name}_total" if c._type == "counter" else c._name: set(c._labelnames)  # type: ignore[attr-defined]
        for c in collectors
    }


def test_metrics_and_their_labels_are_those_of_the_code() -> None:
    assert documented() == of_the_code()


def test_outcomes() -> None:
    assert [name for name in rows("Metrics") if ":" not in name] == list(OUTCOMES)


def test_flags_defaults_and_bounds() -> None:
    options = {
        option
        for group in flags.build_parser()._action_groups
        if group.title == "to be seen"
        for action in group._group_actions
        for option in action.option_strings
    }
    assert options
    assert [option for option in options if f"`{option}" not in TEXT] == []
    assert f"At most {MAX_NAMES} adapters are told apart" in TEXT
    assert f"at most {MAX_ADAPTERS} adapters" in TEXT
    assert f"`--heat-every N`, default {DEFAULT_HEAT_EVERY}," in TEXT


def test_the_heat_of_the_page_is_shaped_as_the_codes() -> None:
    shown = json.loads(re.findall(r"```json\n(.*?)```", section("Heat"), re.DOTALL)[0])
    made = HeatSampler((1, 2), 1, 4, 1, dict, "cpu").report()
    assert shown.keys() == made.keys()
    assert shown["distinct_experts_per_step"].keys() == made["distinct_experts_per_step"].keys()
    for counts in shown["adapters"].values():
        assert [len(layer) for layer in counts] == [shown["num_experts"]] * len(shown["layers"])


def test_the_access_lines_keys() -> None:
    shown = {key for cell in rows("Logs") for key in cell.replace("`", "").split(", ")}
    source = (DOCS.parent / "sgl_esft" / "observe" / "middleware.py").read_text()
    written = set(re.findall(r"^                (\w+)=", source, re.MULTILINE))
    assert shown == written | {"method", "path", "status"}


# ---- Grafana ----

# (panel's title and type, expression) of everything that the dashboard asks for.
TARGETS = [
    (panel["title"], panel["type"], target["expr"])
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
]


def test_the_dashboard_asks_for_what_there_is_and_for_all_of_it() -> None:
    assert len(TARGETS) > 30
    asked = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for *_, expr in TARGETS
        for name in _METRIC.findall(expr)
    }
    assert asked - SGLANGS - set(_METRIC.findall(ELASTIC)) - set(documented()) == set()
    assert set(documented()) - asked == set()
    section_of_elastic = ELASTIC.partition("## Metrics")[2].partition("## ")[0]
    assert set(_METRIC.findall(section_of_elastic)) - asked == set()


def test_a_tile_divides_by_nothing_that_may_be_zero() -> None:
    """An idle server's rates are 0: the tile would show NaN, where a line only has a gap."""
    divisors = [e.split(" / ")[1] for _, kind, e in TARGETS if kind == "stat" and " / " in e]
    assert divisors
    assert [divisor for divisor in divisors if not divisor.endswith(" > 0) or vector(0)")] == []


def test_variables_are_used_and_defined() -> None:
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "instance", "adapter"}
    text = json.dumps(DASHBOARD["panels"])
    assert set(re.findall(r"\$\{?([a-z]\w*)", text)) == variables
    sources = re.findall(r'"uid": "([^"]*)"', text)
    assert set(sources) == {"${datasource}"}


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_expressions_are_balanced_and_choose_a_server() -> None:
    for title, _, expr in TARGETS:
        for opening, closing in ("()", "{}", "[]"):
            assert expr.count(opening) == expr.count(closing), title
        assert expr.count('instance=~"$instance"') == len(_METRIC.findall(expr)), title
        assert title
