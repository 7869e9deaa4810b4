"""Which tests one process runs, where several do: a file's stay together, in their order.

So do those of files that ask the same servers, which take half a minute to start. (xdist's own
`loadgroup` is undone by the pinned pytest, which forgets the names that it gives tests.)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling

# File -> its group, where several files share servers (`ServerPool` keeps a few alive).
GROUPS: Mapping[str, str] = {
    "test_commands.py": "demo",
    "test_readme.py": "demo",
    "test_zoo_served.py": "demo",
    "test_zoo_lifecycle.py": "demo",
    "test_lifecycle_load.py": "demo",
    "test_adapter_replacement.py": "demo",
    "test_bounded.py": "guarded",
    "test_doors.py": "guarded",
    "test_hostile.py": "guarded",
    "test_prefix_isolation.py": "guarded",
    "test_request_fuzz.py": "guarded",
    "test_request_ids.py": "guarded",
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


class GroupScheduling(LoadScopeScheduling):
    """xdist's scheduling by scope, where a scope is a file or a group of files."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return GROUPS.get(PurePosixPath(file).name, file)
