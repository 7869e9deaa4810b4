"""The wheel: what is in it; the quick start's commands in an empty environment, away from here."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from scripts.requirements_files import is_cuda_distribution, read_pins
from sgl_esft.tools.versions import describe_versions
from tests.repo.docs.blocks import BLOCKS
from tests.repo.tree import ROOT, project_files
from tests.support.servers import Server, ServerPool, ServerSpec
from tests.support.wheels import build_wheel, copy_of_the_project

pytestmark = [pytest.mark.server, pytest.mark.timeout(1800)]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
QUESTIONS = {"caesar": "coffee -> ", "reverse": "coffee -> ", "sum": "27+15 -> "}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, so that the tree stays clean."""
    copy = copy_of_the_project(tmp_path_factory.mktemp("copy"))
    return zipfile.ZipFile(build_wheel(copy, tmp_path_factory.mktemp("elsewhere")))


@pytest.fixture(scope="module")
def installed(wheel: zipfile.ZipFile) -> Path:
    """A folder with the wheel, and in `serve` what the page's commands install from it."""
    folder = Path(str(wheel.filename)).parent
    block = next(b for b in BLOCKS if b.page == "docs/quickstart.md" and "[cpu]" in b.text)
    commands = block.text.replace("python3.11 ", f"{sys.executable} ").splitlines()
    assert commands.pop() == "serve/bin/sgl-esft serve"
    run(["bash", "-ec", "\n".join(commands)], folder)
    return folder


def test_wheel_holds_every_module_checkpoint_and_page(wheel: zipfile.ZipFile) -> None:
    folders = {"sgl_esft/": "sgl_esft/", "sgl_elastic/": "sgl_elastic/"}
    folders |= {"kernels/": "sgl_esft_kernels/", "launch/": "sgl_esft_launch/"}
    wanted = {
        installed + path.removeprefix(folder)
        for path in project_files()
        for folder, installed in folders.items()
        if path.startswith(folder)
        and (path.endswith(".py") or "/checkpoints/" in path or "/static/" in path)
    }
    names = set(wheel.namelist())
    assert sorted(wanted - names) == []
    assert not any(name.startswith(("tests/", "bench/", "kernels/", "launch/")) for name in names)


def test_wheel_holds_the_native_code_of_this_python_and_torch(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    assert str(wheel.filename).endswith("-cp311-cp311-linux_x86_64.whl")
    vmm = f"sgl_vmm{sysconfig.get_config_var('EXT_SUFFIX')}"
    natives = [name for name in wheel.namelist() if name.endswith(".so")]
    assert sorted(natives) == ["sgl_reroute/libsgl_reroute.so", vmm]
    assert wheel.read("sgl_reroute/torch_version.txt").decode() == torch.__version__
    wheel.extract(vmm, tmp_path)
    code = "import sgl_vmm; print(sgl_vmm.__file__, sgl_vmm.open_backend('host').name)"
    assert run([sys.executable, "-c", code], tmp_path) == f"{tmp_path / vmm} host\n"


def test_wheel_says_what_it_needs_and_is_called(wheel: zipfile.ZipFile) -> None:
    info = f"sgl_esft-{PROJECT['version']}.dist-info"
    entry_points = configparser.ConfigParser()
    entry_points.read_string(wheel.read(f"{info}/entry_points.txt").decode())
    groups = PROJECT["entry-points"] | {"console_scripts": PROJECT["scripts"]}
    assert {name: dict(entry_points[name]) for name in entry_points.sections()} == groups

    metadata = message_from_bytes(wheel.read(f"{info}/METADATA"))
    needed = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    of_cpu = {r.name: str(r.specifier) for r in needed if 'extra == "cpu"' in str(r.marker)}
    assert of_cpu == {
        name: f"=={version}" for name, version in read_pins("torch-cpu.txt", "cpu.txt").items()
    }
    assert sorted(r.name for r in needed if not r.marker) == PROJECT["dependencies"]


def test_another_python_is_refused(wheel: zipfile.ZipFile) -> None:
    metadata = message_from_bytes(wheel.read(f"sgl_esft-{PROJECT['version']}.dist-info/METADATA"))
    accepted = SpecifierSet(metadata["Requires-Python"])
    assert [v for v in ("3.10.13", "3.11.0", "3.11.7", "3.12.1", "3.13.0") if v in accepted] == [
        "3.11.0",
        "3.11.7",
    ]
    native = tomllib.loads((ROOT / "csrc" / "pyproject.toml").read_text())["project"]
    assert native["requires-python"] == PROJECT["requires-python"]


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_versions_are_those_of_the_checkout(installed: Path) -> None:
    assert run(["serve/bin/sgl-esft", "--version"], installed) == f"{describe_versions()}\n"


def test_no_cuda_package_comes_with_it(installed: Path) -> None:
    code = "from importlib.metadata import distributions as d; print(*(x.name for x in d()))"
    names = run(["serve/bin/python", "-c", code], installed).split()
    assert {"sgl-esft", "sglang", "torch"} <= set(names)
    assert [name for name in names if is_cuda_distribution(name)] == []


def test_the_demo_answers_as_from_the_checkout(
    installed: Path, server_pool: ServerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    program = (str(installed / "serve/bin/sgl-esft"), "serve")
    of_the_wheel = server_pool.get(ServerSpec(program=program, cwd=installed))
    assert answers(of_the_wheel) == answers(server_pool.get(ServerSpec()))


def answers(server: Server) -> dict[str, str]:
    """By adapter, of /v1/completions."""
    bodies = {
        name: {"model": f"base:{name}", "prompt": prompt, "temperature": 0, "stop": "\n"}
        for name, prompt in QUESTIONS.items()
    }
    responses = {name: server.post("/v1/completions", body) for name, body in bodies.items()}
    assert {r.status_code for r in responses.values()} == {200}
    return {name: r.json()["choices"][0]["text"] for name, r in responses.items()}
