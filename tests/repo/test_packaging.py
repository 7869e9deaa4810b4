"""What gets installed: names and entry points; and what setup refuses."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import sgl_esft
import sgl_esft_kernels
from tests.repo.tree import ROOT
from tests.support.terminal import OF_SETUP

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

PATH = "/usr/local/bin:/usr/bin:/bin"


def run(*command: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """With nothing else in the environment, where there is something in it."""
    env = environment or None
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def run_setup(checkout: Path, python: str) -> subprocess.CompletedProcess[str]:
    return run("scripts/setup.sh", cwd=checkout, PATH=PATH, PYTHON=python)


def test_kernels_folder_does_not_pose_as_the_package_of_that_name() -> None:
    """With the checkout as working directory `import kernels` finds our folder.

    transformers then asks for its version, and cannot parse the version of a package that has
    neither metadata nor `__version__`: every import of a model class would fail. A low
    `__version__` in kernels/__init__.py makes it answer "too old, not available".
    """
    code = "from transformers.utils import is_kernels_available; print(is_kernels_available())"
    done = run(sys.executable, "-W", "ignore", "-c", code)
    assert done.stdout.strip() == "False", done.stderr[-500:]


def test_version_is_one_and_kernels_have_their_own_name() -> None:
    assert Path(str(sgl_esft_kernels.__file__)).parent == ROOT / "kernels"
    assert sgl_esft.__version__ == PROJECT["version"] == importlib.metadata.version("sgl-esft")


GROUPS = {**PROJECT["entry-points"], "console_scripts": PROJECT["scripts"]}


@pytest.mark.parametrize("group", GROUPS)
def test_installed_entry_points_are_those_of_pyproject_and_load(group: str) -> None:
    installed = {e.name: e for e in importlib.metadata.entry_points(group=group)}
    for name, value in GROUPS[group].items():
        assert installed[name].value == value
        assert callable(installed[name].load())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Only what setup.sh reads, with no .venv."""
    for folder in ("requirements", "csrc"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "scripts").mkdir()
    for path in ("pyproject.toml", "setup.py", "scripts/setup.sh"):
        shutil.copy(ROOT / path, tmp_path / path)
    return tmp_path


def test_setup_refuses_a_python_that_does_not_fit(checkout: Path) -> None:
    newer = checkout / "python3.12"
    as_if = "import sys; sys.version_info = (3, 12, 1); exec(sys.argv[1])"
    newer.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{as_if}' \"$2\"\n")
    newer.chmod(0o755)
    for python in ("/bin/false", str(newer)):
        done = run_setup(checkout, python)
        assert done.returncode == 1
        wanted = f"needs Python 3.11, the one its pins were tried with, tried: {python}"
        assert wanted in done.stderr
        assert not (checkout / ".venv").exists()


def test_setup_does_nothing_when_the_stamp_fits(checkout: Path) -> None:
    hashes = "source scripts/setup.sh; wanted_hash; wanted_csrc_hash"
    done = run("bash", "-c", hashes, cwd=checkout)
    (checkout / ".venv").mkdir()
    for kind, stamp in zip(("setup", "csrc"), done.stdout.split(), strict=True):
        (checkout / f".venv/.{kind}-{stamp}").touch()
    done = run_setup(checkout, python="/bin/false")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    (checkout / "requirements/cpu.txt").write_text("other==1\n")
    assert run_setup(checkout, python="/bin/false").returncode == 1


_SETUP_WITHOUT_INSTALLING = """
source scripts/setup.sh
make_venv() { mkdir -p .venv/bin && ln -s /bin/true .venv/bin/python; }
pip_install() { [[ $* != *torch-cpu* || $* == *index-url* ]]; }  # the longest way: a second index
build_csrc() { touch "$1"; }
main
"""


def test_a_first_setup_is_few_lines(checkout: Path) -> None:
    """With those of the server, which tests/full/test_terminal.py counts, 15 at most."""
    done = run(
        "bash", "-c", _SETUP_WITHOUT_INSTALLING, cwd=checkout, PATH=PATH, PYTHON=sys.executable
    )
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr, len(lines)) == (0, "", OF_SETUP), lines
    numbers = [line.split()[1] for line in lines if line.startswith("setup: [")]
    assert numbers == [f"[{number}/{len(numbers)}]" for number in range(1, len(numbers) + 1)]
    assert run_setup(checkout, python="/bin/false").stdout == "", "the second finds its stamps"


@pytest.mark.parametrize("name", (ROOT / "scripts/browsers.txt").read_text().split())
def test_any_of_the_browsers_will_do(tmp_path: Path, name: str) -> None:
    browser = tmp_path / name
    browser.write_text("#!/bin/sh\n")
    browser.chmod(0o755)
    path = str(tmp_path)
    assert run("/bin/bash", "scripts/browser.sh", PATH=path).returncode == 0
    find = "from scripts.browsers import find; print(find())"
    assert run(sys.executable, "-c", find, PATH=path).stdout == f"{browser}\n"


def test_without_a_browser_the_remedy_is_said(tmp_path: Path) -> None:
    pictures = (sys.executable, "-m", "scripts.dashboard_pictures", "http://127.0.0.1:9", "x.png")
    done = run(*pictures, PATH=str(tmp_path))
    assert done.returncode == 2
    assert "run `make browser`" in done.stderr
    assert "Traceback" not in done.stderr
    no_root = tmp_path / "id"  # the only tool there is
    no_root.write_text("#!/bin/sh\necho 1000\n")
    no_root.chmod(0o755)
    done = run("/bin/bash", "scripts/browser.sh", PATH=str(tmp_path))
    assert done.returncode == 1
    assert "apt-get install chromium" in done.stderr
