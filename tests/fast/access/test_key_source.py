"""The keys file is followed while the server runs; a broken one changes nothing but the log."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from sgl_esft.access.keys import CHECK_EVERY_S
from sgl_esft_launch import access, flags
from sgl_esft_launch.access import AccessPlan

FIRST, SECOND = "first-key-0123456789", "second-key-0123456789"
ADMIN = "admin-key-0123456789"


class Clock:
    """A clock that stands still until it is told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(access.time, "monotonic", clock)
    return clock


def write(path: Path, text: str) -> None:
    """Replace the file, as an editor does."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(0o600)
    new.rename(path)


def keys_text(**keys: str) -> str:
    listed: list[dict[str, Any]] = [{"name": name, "key": key} for name, key in keys.items()]
    return json.dumps({"keys": listed})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    write(path, keys_text(first=FIRST))
    return path


def plan_of(path: Path, *, weave: bool = True) -> AccessPlan:
    argv = ["--api-keys-file", str(path), "--admin-key-env", "ADMIN"]
    parsed, rest = flags.parse(argv)
    return access.plan_access(
        parsed.access, parsed.host, rest, weave=weave, environment={"ADMIN": ADMIN}
    )


def opened(plan: AccessPlan) -> set[str]:
    ring = plan.keys()
    return {key for key in (FIRST, SECOND, ADMIN) if ring.find(key) is not None}


def test_a_changed_file_is_read_again(path: Path, clock: Clock) -> None:
    plan = plan_of(path)
    assert opened(plan) == {FIRST, ADMIN}
    write(path, keys_text(second=SECOND))
    assert opened(plan) == {FIRST, ADMIN}  # looked at a moment ago
    clock.now += CHECK_EVERY_S
    assert opened(plan) == {SECOND, ADMIN}


def test_what_changes_between_reading_and_serving_is_seen(path: Path, clock: Clock) -> None:
    plan = plan_of(path)
    write(path, keys_text(second=SECOND))
    assert opened(plan) == {SECOND, ADMIN}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "keys.json is not valid JSON"),
        ('{"keys": []}', "at least one key"),
        (keys_text(admin=SECOND), "two keys are named 'admin'"),
        (None, "cannot read keys.json"),
        (json.dumps({"keys": [{"name": "x", "key": SECOND, "adapters": []}]}), "has no adapters"),
        ("others can read it", "keys.json"),
    ],
)
def test_a_broken_file_keeps_the_old_keys(
    text: str | None, said: str, path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_of(path, weave=False)  # the rules of the start hold later
    assert opened(plan) == {FIRST, ADMIN}
    if text is None:
        path.unlink()
    elif text == "others can read it":
        write(path, keys_text(second=SECOND))
        path.chmod(0o644)
    else:
        write(path, text)
    for _ in range(3):
        clock.now += CHECK_EVERY_S
        assert opened(plan) == {FIRST, ADMIN}
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    assert errors[0].startswith("ConfigError: ")
    assert said in errors[0]
    assert SECOND not in caplog.text
    write(path, keys_text(second=SECOND))
    clock.now += CHECK_EVERY_S
    assert opened(plan) == {SECOND, ADMIN}


def test_without_a_file_keys_stay() -> None:
    parsed, rest = flags.parse([f"--api-key={FIRST}"])
    plan = access.plan_access(parsed.access, parsed.host, rest, weave=True, environment={})
    assert plan.keys() is plan.policy.keys
