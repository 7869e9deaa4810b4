"""The wheel alone: the quick start's commands in an empty environment, away from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.requirements_files import is_cuda_distribution
from sgl_esft.tools.versions import describe_versions
from tests.repo.docs.blocks import BLOCKS
from tests.support.servers import Server, ServerPool, ServerSpec
from tests.support.wheels import build_wheel, copy_of_the_project

pytestmark = [pytest.mark.server, pytest.mark.timeout(1800)]

QUESTIONS = {"caesar": "coffee -> ", "reverse": "coffee -> ", "sum": "27+15 -> "}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel, and in `serve` what the page's commands install from it."""
    folder = tmp_path_factory.mktemp("elsewhere")
    build_wheel(copy_of_the_project(tmp_path_factory.mktemp("copy")), folder)
    block = next(b for b in BLOCKS if b.page == "docs/quickstart.md" and "[cpu]" in b.text)
    commands = block.text.replace("python3.11 ", f"{sys.executable} ").splitlines()
    assert commands.pop() == "serve/bin/sgl-esft serve"
    run(["bash", "-ec", "\n".join(commands)], folder)
    return folder


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
