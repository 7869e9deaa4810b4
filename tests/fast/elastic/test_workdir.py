"""The folder of a server's sockets: removed at its end, or at the next start."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

from sgl_elastic import workdir

MAKE = """
import sys, time
from pathlib import Path
from sgl_elastic import workdir
made = workdir.make(Path(sys.argv[1]))
print(made.path, flush=True)
time.sleep(60)
"""


def test_it_is_private_and_goes_with_its_server(tmp_path: Path) -> None:
    made = workdir.make(tmp_path)
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    (made.path / "ranks.sock").touch()
    made.remove()
    made.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_server_left_is_removed_and_no_others(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        theirs = Path(process.stdout.readline().strip())
        mine = workdir.make(tmp_path)
        (tmp_path / "sgl-elastic-being-made").mkdir()
        (tmp_path / "something-else").mkdir()
        assert workdir.remove_stale(tmp_path) == []
    finally:
        process.kill()
        process.communicate()
    assert workdir.remove_stale(tmp_path) == [theirs]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [mine.path.name, "sgl-elastic-being-made", "something-else"]
    )
    mine.remove()
