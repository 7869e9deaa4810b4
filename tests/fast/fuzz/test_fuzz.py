"""The fuzz targets: every input that is kept, a short search for more, a long one (`soak`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fast.fuzz import targets
from tests.fast.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
ROOT = Path(__file__).resolve().parents[3]
SEEDS = [path for name in sorted(TARGETS) for path in sorted((CORPUS / name).iterdir())]


@pytest.mark.parametrize("seed", SEEDS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_kept_inputs(seed: Path) -> None:
    """Their names say what must become of them; what a search has found is kept here too."""
    assert TARGETS[seed.parent.name](seed.read_bytes()) == seed.name.startswith("taken-")


def test_there_are_kept_inputs_of_both_kinds() -> None:
    for name in TARGETS:
        kinds = {seed.name.split("-")[0] for seed in SEEDS if seed.parent.name == name}
        assert kinds == {"taken", "refused"}


def search(name: str, seconds: int, seed: int, folder: Path) -> int:
    """Fuzz in a process of its own; the number of inputs tried."""
    found, scratch = folder / "found", folder / "scratch"
    found.mkdir()
    scratch.mkdir()
    command = [
        *(sys.executable, "-m", "tests.fast.fuzz.targets", "--seconds", str(seconds)),
        *("--seed", str(seed), name, str(found), str(CORPUS / name)),
    ]
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds + 60,
        check=False,
    )
    broken = {path.name: path.read_bytes() for path in found.glob("*-*")}
    assert done.returncode == 0, f"{broken}\n{done.stderr[-4000:]}"
    return int(done.stderr.rsplit("Done ", 1)[1].split()[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_search(name: str, tmp_path: Path) -> None:
    assert search(name, 4, seed=1, folder=tmp_path) > 200


@pytest.mark.soak
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_long_search(name: str, tmp_path: Path) -> None:
    assert search(name, 3600, seed=0, folder=tmp_path) > 100_000


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("body", b'{"lora_id": {"a": 1}, "text": "x"}'),
        ("body", b'{"n": 1000}'),
        ("keys", b'{"keys": [{"name": "SECRET", "key": "SECRET"}]}'),
    ],
)
def test_a_reader_that_took_anything_would_be_found(
    name: str, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The targets' own checks can fail."""

    def take_anything(*_: object) -> targets.bodies.Ask:
        return targets.bodies.Ask(1, 1)

    def refuse_loudly(path: Path) -> None:
        raise targets.ConfigError(path.read_text())

    monkeypatch.setattr(targets.bodies, "check_client_body", take_anything)
    monkeypatch.setattr(targets.keys, "read_keys_file", refuse_loudly)
    with pytest.raises(AssertionError):
        TARGETS[name](data)
