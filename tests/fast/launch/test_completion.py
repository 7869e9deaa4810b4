"""A shell completes what the parsers know: asked of the shell itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_esft.tools import cli
from sgl_esft_launch import completion
from sgl_esft_launch.server import build_whole_parser
from tests.support.servers import ROOT

_ASK = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_sgl_esft
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "bash"
    flags = ("--port", "--schedule-policy")
    path.write_text(completion.script("bash", cli.build_parser(), build_whole_parser(), flags))
    return path


def completed(script: Path, line: str) -> list[str]:
    """What bash offers for the last word of a line, of which a blank begins a new one."""
    command = ["bash", "--norc", "-c", _ASK, "bash", str(script), *line.split(" ")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return [word for word in done.stdout.split("\n") if word]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("sgl-esft ad", ["adapters"]),
        ("sgl-esft adapters un", ["unload", "unpin"]),
        ("sgl-esft plan --dev", ["--device-memory"]),
        ("sgl-esft plan --device-memory 1GiB --prof", ["--profile"]),
        ("sgl-esft select --kind ", ["token", "gate"]),
        ("sgl-esft select --kind g", ["gate"]),
        ("sgl-esft completion z", ["zsh"]),
        ("sgl-esft serve --max-dev", ["--max-devices"]),
        ("sgl-esft serve --schedule-p", ["--schedule-policy"]),
        ("sgl-esft serve --expert-memory p", ["padded"]),
        ("sgl-esft serve --port ", []),  # a value: bash offers files
        ("sgl-esft merge --base plan --o", ["--out"]),
        ("sgl-esft nonsense", []),
    ],
)
def test_bash_offers(script: Path, line: str, offered: list[str]) -> None:
    assert sorted(completed(script, line)) == sorted(offered)


def test_every_command_is_offered(script: Path) -> None:
    commands = {command.name for command in cli._COMMANDS} | {"serve"}
    assert {word for word in completed(script, "sgl-esft ") if word[0] != "-"} == commands


@pytest.mark.parametrize("shell", cli.SHELLS)
def test_the_command_prints_what_the_shell_can_read(shell: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sgl_esft.tools.cli", "completion", shell]
    path = tmp_path / shell
    path.write_bytes(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    reader = shutil.which(shell) or "bash"  # zsh reads all of it that bash does
    subprocess.run([reader, "-n", str(path)], check=True)
    if shell == "bash":
        assert completed(path, "sgl-esft serve --schedule-p") == ["--schedule-policy"]
