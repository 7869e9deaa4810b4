"""docs/health.md says what the code says: routes, flags, statuses, errors, limits."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

from sgl_elastic.options import DEFAULT_HANG_TIMEOUT_S
from sgl_esft import errors
from sgl_esft.health import faults, phases, readiness, service, watch
from sgl_esft.health.heartbeat import Beat
from sgl_esft.http.classes import TABLE
from sgl_esft_launch import flags, health

TEXT = (Path(__file__).parents[3] / "docs" / "health.md").read_text()


def rows(title: str, table: int = 0) -> list[list[str]]:
    text = TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    lines = tables[table].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_routes_and_their_classes() -> None:
    for route, route_class, _ in rows("Routes"):
        method, path = route.strip("`").split()
        declared = TABLE[path]
        assert (declared.methods, declared.route_class.value) == ({method}, route_class)
    assert f"`timeout_s`, 0 to {health.MAX_DRAIN_S:.0f}" in TEXT


def test_flags_and_defaults() -> None:
    found = {row[0].strip("`"): row[1] for row in rows("Flags")}
    group = next(g for g in flags.build_parser()._action_groups if g.title == "health")
    assert set(found) == {action.option_strings[0] for action in group._group_actions}
    assert found["--ready-timeout"] == f"{health.DEFAULT_READY_TIMEOUT_S:g}"
    assert found["--drain-timeout"] == f"{health.DEFAULT_DRAIN_TIMEOUT_S:g}"
    assert found["--hang-timeout"] == (
        f"{health.DEFAULT_HANG_TIMEOUT_S:g}, with `--elastic` {DEFAULT_HANG_TIMEOUT_S:g}"
    )


def test_exit_statuses() -> None:
    found = {row[0] for row in rows("Drain")}
    assert found == {"0", f"{phases.EXIT_CUT}", "2", f"{phases.EXIT_FAILED}", "130, 143"}


def test_errors() -> None:
    for name, status, _ in rows("Faults", 1):
        assert getattr(errors, name.strip("`")).http_status == int(status)


def test_the_shown_answer() -> None:
    shown = json.loads(re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)[0])
    now = time.monotonic_ns()
    ranks = [readiness.Loop("rank 0", Beat(now - 2_314_000_000, 1))]
    text = readiness.Loop("the detokenizer", Beat(now - 201_000_000, 1))
    found = readiness.judge(phases.Phase.SERVING, None, ranks, text, now, 2.0)
    assert found.to_json() == shown


def test_times() -> None:
    assert watch.PERIOD_S < 0.3
    assert f"{faults.STOPPED_S:g} s: lost" in TEXT
    assert f"within {service.FAIL_S + 2:g} s" in TEXT
