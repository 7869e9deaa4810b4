"""zsh itself completes what is typed on a terminal, by the script that the command prints."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.servers import ROOT
from tests.support.terminal import Terminal, terminal

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed"),
]

TIMEOUT_S = 60.0
# As a person's own: completions of other programs are defined before ours.
_ZSHRC = """
autoload -U compinit && compinit -i
_other() { compadd one-of-theirs; }
compdef _other other
source "$ZDOTDIR/completion"
sgl-esft() { print -r -- "<$*>"; }
other() { print -r -- "<$*>"; }
setopt no_prompt_sp
unset zle_bracketed_paste
PS1=
cd "$ZDOTDIR"
print ready
"""


@pytest.fixture(scope="module")
def zsh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    folder = tmp_path_factory.mktemp("zsh")
    command = [sys.executable, "-m", "sgl_esft.tools.cli", "completion", "zsh"]
    script = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    (folder / "completion").write_bytes(script)
    (folder / ".zshrc").write_text(_ZSHRC)
    (folder / "keys.json").touch()
    with terminal("env", f"ZDOTDIR={folder}", "TERM=dumb", "zsh", "-i") as shell:
        shell.read_until(rb"ready\r\n", TIMEOUT_S)
        yield shell


@pytest.mark.parametrize(
    ("typed", "ran"),
    [
        ("sgl-esft ad", "adapters"),
        ("sgl-esft adapters unl", "adapters unload"),
        ("sgl-esft select --ki", "select --kind"),
        ("sgl-esft select --kind g", "select --kind gate"),
        ("sgl-esft serve --max-dev", "serve --max-devices"),
        ("sgl-esft serve --schedule-p", "serve --schedule-policy"),  # SGLang's
        ("sgl-esft serve --api-keys-file ke", "serve --api-keys-file keys.json"),
        ("other one", "one-of-theirs"),
    ],
)
def test_a_tab_completes(zsh: Terminal, typed: str, ran: str) -> None:
    os.write(zsh.descriptor, f"{typed}\t\n".encode())
    shown = zsh.read_until(rb"<[^>]*>", TIMEOUT_S)
    assert re.findall(rb"<([^>]*)>", shown) == [ran.encode()], shown
