"""The README and docs/ say what is so: programs are run, commands parsed, words looked up.

Commands are run, and generated parts compared, by tests/repo/docs. A `python` block prints what
its comments say.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sgl_elastic import errors as elastic_errors
from sgl_elastic import options
from sgl_esft import errors
from sgl_esft.formats.model_spec import SUPPORTED
from sgl_esft.tools import cli
from sgl_esft_launch import flags
from tests.repo.docs import session
from tests.repo.docs.blocks import BLOCKS, COMMAND_LANGUAGES, DOCUMENTS, README
from tests.server.test_equality import CASES, LAYOUTS
from tests.support.servers import ROOT, Server, ServerPool, ServerSpec

INLINE = re.compile(r"`([^`\n]+)`")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)

PROGRAMS = [block.text for block in BLOCKS if block.language == "python"]


@pytest.fixture
def server(server_pool: ServerPool) -> Server:
    return server_pool.get(ServerSpec())


def address(server: Server) -> str:
    return f"127.0.0.1:{server.port}"


@pytest.mark.server
def test_the_first_session_gives_the_shown_answers(server: Server) -> None:
    """The requests themselves, as JSON, whatever client sends them."""
    shown, given = [], []
    first = next(block for block in BLOCKS if block.page == "README.md" and block.kind)
    for step in session.steps_of([first]):
        if step.command.startswith("ask '"):
            body = json.loads(shlex.split(step.command)[1])
            shown.append(json.loads(f"{{{step.shown}}}")["text"])
            given.append(server.post("/generate", body).json()["text"])
    assert given == shown
    assert len(set(shown)) == len(shown) == 3


@pytest.mark.server
@pytest.mark.parametrize("code", PROGRAMS)
def test_python_prints_what_its_comments_say(code: str, server: Server) -> None:
    shown = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code.replace(session.ADDRESS, address(server))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert shown
    assert done.stdout.splitlines() == shown


def commands() -> Iterator[str]:
    """Every command of all documents, in a block or between backticks."""
    for block in BLOCKS:
        if block.language in ("", *COMMAND_LANGUAGES):
            for step in session.steps_of([block]):
                for line in step.command.replace("\\\n", " ").splitlines():
                    yield line.partition("  #")[0].partition(" | ")[0]
    for document in DOCUMENTS:
        yield from INLINE.findall(FENCED.sub("", document.read_text()))


def arguments_of(program: str) -> list[list[str]]:
    """The arguments of every command that is, or ends in, `program ...`."""
    pattern = re.compile(rf"(?:^|/|\s){re.escape(program)}\s+(\S.*)")
    found = (pattern.search(command) for command in commands())
    return [shlex.split(match[1].removesuffix(" 2> /dev/null")) for match in found if match]


SGLANGS_OWN = {"--enable-metrics", "--ep-size", "8", "--disable-cuda-graph"}


def test_launcher_commands_parse() -> None:
    lines = arguments_of("python -m sgl_esft.launch_server")
    assert len(lines) > 2
    for arguments in lines:
        rest = options.parse(arguments)[1] if "--elastic" in arguments else arguments
        assert set(flags.parse(rest)[1]) <= SGLANGS_OWN


def test_tool_commands_parse() -> None:
    lines = arguments_of("sgl-esft")
    named = {arguments[0] for arguments in lines}
    assert named == {command.name for command in cli._COMMANDS} | {"serve", "--version"}
    for arguments in lines:
        if len(arguments) > 1 and arguments[0] != "serve":  # the launcher's own flags
            cli.build_parser().parse_args(arguments)


def test_flags_that_documents_name_exist() -> None:
    """Ours are known to the launcher; `--help` of SGLang is not asked for here."""
    own = set(re.findall(r"--[a-z-]+", flags.build_parser().format_help()))
    first_section = README.read_text().partition("Our own:")[2].partition("explains them")[0]
    assert set(re.findall(r"--[a-z-]+", first_section)) <= own


def test_errors_that_documents_name_exist() -> None:
    for document in DOCUMENTS:
        for name in re.findall(r"`(\w+Error)\b", document.read_text()):
            assert hasattr(errors, name) or hasattr(elastic_errors, name), (
                f"{document.name}: {name}"
            )


def test_models_table_claims_what_the_equality_test_runs() -> None:
    rows = re.findall(r"^\| [^|]+ \(`(\w+)`\) \|(.*)\|$", README.read_text(), re.MULTILINE)
    claimed = {
        (architecture, layout)
        for architecture, cells in rows
        for layout, cell in zip(LAYOUTS, cells.split("|"), strict=True)
        if cell.strip() == "equal"
    }
    assert {architecture for architecture, _ in rows} == set(SUPPORTED)
    assert claimed == {case for case in CASES if case[1] in LAYOUTS}


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 160
