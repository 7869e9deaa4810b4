"""`--version`: four facts in one line, looked up without importing what is heavy."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch

from sgl_esft.tools import cli, versions

LINE = (
    f"sgl-esft {version('sgl-esft')}, SGLang {version('sglang')}, torch {version('torch')}, "
    "device cpu\n"
)
COMMANDS = {
    "console script": "from sgl_esft.tools.cli import main; main(['--version'])",
    "launcher": "from sgl_esft.launch_server import main; main(['--version', '--elastic'])",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_versions_are_said_without_loading_what_they_are_of(command: str) -> None:
    code = (
        "import atexit, sys\n"
        "heavy = {'torch', 'sglang', 'sgl_vmm'}\n"
        "atexit.register(lambda: print(sorted(heavy & set(sys.modules))))\n"
        f"{COMMANDS[command]}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{LINE}[]\n"


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def version_of(name: str) -> str:
        raise versions.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", version_of)
    line = versions.describe_versions()
    assert line.endswith("SGLang not installed, torch not installed, device unknown")


@pytest.mark.parametrize(
    ("kind", "platform"), [("cuda", "auto"), ("npu", "native"), (None, "auto")]
)
def test_a_build_for_accelerators_is_asked_for_its_device(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, platform: str
) -> None:
    found = SimpleNamespace(type=kind) if kind else None
    monkeypatch.setattr(versions, "version", lambda _: "2.13.0")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setenv("ESFT_PLATFORM", platform)
    assert versions.describe_versions().endswith(f"device {kind or 'cpu'}")
    monkeypatch.setenv("ESFT_PLATFORM", "cpu")
    assert versions.describe_versions().endswith("device cpu")


def test_a_bad_platform_is_a_users_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "version", lambda _: "2.13.0")
    monkeypatch.setenv("ESFT_PLATFORM", "gpu")
    assert cli.main(["--version"]) == cli.EXIT_USER
    assert "ESFT_PLATFORM='gpu'" in capsys.readouterr().err
