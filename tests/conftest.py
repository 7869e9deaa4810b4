"""What every test shares: one hypothesis profile. Markers and paths are in pyproject.toml.

`make test` runs two processes of tests side by side, and then those that are marked `alone`. A
file's tests stay together, and with them those of the files that ask the same servers.
"""

import gc
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import settings

# No deadline: two shared cores make single examples slow at random. Derandomised, so that a red
# run is red again; long random searches are the `soak` tests' job.
settings.register_profile("repo", deadline=None, derandomize=True)
settings.load_profile("repo")

# File -> its group, where several files share servers (`ServerPool` keeps a few alive).
GROUPS: Mapping[str, str] = {
    "test_commands.py": "demo",
    "test_readme.py": "demo",
    "test_zoo_served.py": "demo",
    "test_zoo_lifecycle.py": "demo",
    "test_lifecycle_load.py": "demo",
    "test_adapter_replacement.py": "demo",
    "test_hostile.py": "guarded",
    "test_schema_fuzz.py": "guarded",
    "test_equality.py": "families",
    "test_frontend_language.py": "families",
    "test_adapter_memory.py": "families",
    "test_one_rank_bad_input.py": "families",
    "test_one_rank_cache.py": "families",
    "test_one_rank_clients.py": "families",
    "test_one_rank_memory.py": "families",
    "test_one_rank_slots.py": "families",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `--dist loadgroup`: what one process runs, in this order."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(GROUPS.get(item.path.name, str(item.path))))


pytest_plugins = ["tests.servers", "tests.families", "tests.one_rank", "tests.guarded"]


@pytest.fixture
def no_automatic_gc() -> Iterator[None]:
    """Collect garbage after the test, not in it.

    SGLang's frontend joins a thread in a destructor. When the collector runs that destructor
    while another thread is being started, the two wait for each other for ever.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()
