"""Runs the commands of one document as a reader would: in one shell, from top to bottom.

    blocks --[steps_of]--> steps --[script]--> bash --[Step.matches]--> what differs

The shell's folder looks like the checkout: everything in it is a link, so what the commands write
lies beside it. `...` in a shown output stands for any text, alone in a line for any lines. A
command with an output must print it; one without must succeed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_esft.ports import pick_free_port
from tests.repo.docs.blocks import Block
from tests.support.servers import ROOT

ADDRESS = "127.0.0.1:30000"  # the documents' server
END = "--end of step--"
FAILED = "--failed--"
TIMEOUT_S = 240
NOT_LINKED = {".git", "build", ".venv"}

_LAUNCHER = "-m sgl_esft.launch_server"
_WAIT = """\
for _ in $(seq 900); do
  curl -sf -m 5 -o /dev/null http://{address}/health && break
  kill -0 $server 2>/dev/null || break
  sleep 0.2
done
curl -sf -m 5 -o /dev/null http://{address}/health || {{
  echo "{failed} server"; tail -n 20 server.log | cut -c 1-300
}}
"""


@dataclass(frozen=True)
class Step:
    """Commands, and the output that the document shows, if it shows any."""

    where: str
    command: str
    shown: str | None
    starts_server: bool = False

    def fault(self, printed: str) -> str | None:
        """What is wrong with what was printed, if anything is."""
        if FAILED in printed:
            return f"{self.where}: failed:\n{self.command}\nprinted:\n{printed}"
        if self.shown is not None and not _pattern(self.shown).fullmatch(printed):
            return f"{self.where}: {self.command}\nshown:\n{self.shown}\nprinted:\n{printed}"
        return None


def steps_of(blocks: Sequence[Block]) -> list[Step]:
    """A step for each `$ ` of a console block, one for a whole bash block."""
    return [step for block in blocks for step in _steps(block)]


def _steps(block: Block) -> Iterator[Step]:
    if block.language != "console":
        yield Step(block.where, block.text, None, block.kind == "own server")
        return
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        while command.endswith("\\"):
            more, _, shown = shown.partition("\n")
            command = f"{command}\n{more}"
        yield Step(block.where, command + "\n", shown or None)


def run(steps: Sequence[Step], folder: Path, address: str | None = None) -> list[str]:
    """Run the steps in a new shell in `folder`; what differs from the document.

    `address` is that of a running server; without it the steps start their own, or need none.
    """
    _look_like_checkout(folder)
    own = f"127.0.0.1:{pick_free_port()}"
    source = script(steps, address or own)
    process = subprocess.Popen(
        ["bash", "-c", source],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        printed = process.communicate(timeout=TIMEOUT_S)[0]
    finally:
        _end_group(process)
    return compare(steps, printed.replace(str(ROOT), "...").replace(str(folder), "..."))


def script(steps: Sequence[Step], address: str) -> str:
    """The shell's program: after each step a line that says it has ended."""
    parts = [f"trap 'echo \"{FAILED} $BASH_COMMAND\"' ERR\n"]
    for step in steps:
        command = step.command.replace(ADDRESS, address)
        if step.starts_server:
            port = address.rpartition(":")[2]
            command = command.replace(_LAUNCHER, f"{_LAUNCHER} --port {port}")
            command = f"{{\n{command}}} > server.log 2>&1 &\nserver=$!\n"
            command += _WAIT.format(address=address, failed=FAILED)
        elif (
            step.shown is not None
        ):  # its output is compared, its status may say that it is an error
            command = f"trap - ERR\n{command}trap 'echo \"{FAILED} $BASH_COMMAND\"' ERR\n"
        parts.append(f"{command}echo '{END}'\n")
    if any(step.starts_server for step in steps):
        # If the document has ended its server, the end must have been a good one.
        parts.append(
            f"curl -s -m 5 -o /dev/null http://{address}/healthz || wait $server "
            f'|| echo "{FAILED} the server ended with $?"\n'
        )
    return "".join(parts)


def compare(steps: Sequence[Step], printed: str) -> list[str]:
    """What differs between what was printed and what is shown."""
    outputs = printed.split(f"{END}\n")
    if len(outputs) != len(steps) + 1:
        return [f"ended after {len(outputs) - 1} of {len(steps)} steps:\n{printed[-4000:]}"]
    faults = [step.fault(output) for step, output in zip(steps, outputs, strict=False)]
    rest = [outputs[-1]] if FAILED in outputs[-1] else []
    return [fault for fault in faults if fault] + rest


def _pattern(shown: str) -> re.Pattern[str]:
    parts = re.split(r"(^\.\.\.\n|\.\.\.)", shown, flags=re.MULTILINE)
    wild = {"...\n": r"(?:.*\n)*", "...": r".*"}
    return re.compile("".join(wild.get(part, re.escape(part)) for part in parts))


def _look_like_checkout(folder: Path) -> None:
    for entry in ROOT.iterdir():
        link = folder / entry.name
        if entry.name not in NOT_LINKED and not link.exists():
            link.symlink_to(entry)
    (folder / ".venv").symlink_to(Path(sys.prefix))


def _end_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
