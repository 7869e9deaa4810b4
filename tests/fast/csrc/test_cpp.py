"""The C++ tests of csrc/, each executable one case: as built, and with sanitizers."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.fast.csrc.csrc_build import CSRC, build_tests

# Built with sanitizers in every run: pages, tensors and backends, in any order, with failures. The
# others are in every run as they are built for use; with sanitizers they take minutes.
SANITIZED = "test_stress"
NAMES = sorted(path.stem for path in (CSRC / "tests").glob("test_*.cpp"))


def run(executable: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(executable), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@cache
def sanitizer_options(executable: Path) -> dict[str, str]:
    """LeakSanitizer stops the process with ptrace, which some containers forbid.

    Then leaks go unseen, and everything else is still checked. An executable that is asked for no
    test of its own tells which it is.
    """
    done = run(executable, "no_such_test", ASAN_OPTIONS="detect_leaks=1")
    can_see_leaks = "LeakSanitizer has encountered a fatal error" not in done.stderr
    return {
        "ASAN_OPTIONS": f"detect_leaks={int(can_see_leaks)}:detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def test_there_are_tests() -> None:
    assert len(NAMES) >= 6


@pytest.mark.parametrize("name", NAMES)
def test_plain(name: str) -> None:
    done = run(build_tests() / name)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == SANITIZED else pytest.mark.full) for name in NAMES],
)
def test_sanitized(name: str) -> None:
    executable = build_tests(name, sanitize=True) / name
    done = run(executable, **sanitizer_options(executable))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr, done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("sanitize", [False, True])
def test_long_random_runs(sanitize: bool) -> None:
    executable = build_tests("test_stress", sanitize=sanitize) / "test_stress"
    options = sanitizer_options(executable) if sanitize else {}
    steps = "10000" if sanitize else "100000"
    done = run(executable, SGL_VMM_STEPS=steps, **options)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_name_that_no_test_has_fails() -> None:
    done = run(build_tests() / NAMES[0], "no_such_test")
    assert done.returncode == 1
    assert done.stdout == "0 run, 0 failed\n"
