"""What every test shares: one hypothesis profile. Markers and paths are in pyproject.toml.

`make test` runs two processes of tests side by side (scheduling.py), and then those that are marked
`alone`.
"""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# No deadline: two shared cores make single examples slow at random. Derandomised, so that a red
# run is red again; long random searches are the `soak` tests' job.
settings.register_profile("repo", deadline=None, derandomize=True)
settings.load_profile("repo")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `-n`: which tests one process runs."""
    from tests.support.scheduling import GroupScheduling

    return GroupScheduling(config, log)


# What fails in them is written down in a line, which says what was compared.
pytest.register_assert_rewrite("tests.server.elastic_faults", "tests.server.fault_cells")

pytest_plugins = [
    "tests.support.servers",
    "tests.support.families",
    "tests.support.one_rank",
    "tests.support.quantised_zoo",
    "tests.support.guarded",
]


@pytest.fixture
def no_automatic_gc() -> Iterator[None]:
    """Collect garbage after the test, not in it.

    SGLang's frontend joins a thread in a destructor. When the collector runs that destructor
    while another thread is being started, the two wait for each other for ever.
    """
    gc.freeze()  # what was there before is not this test's garbage, and takes seconds to walk
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()
        gc.unfreeze()
