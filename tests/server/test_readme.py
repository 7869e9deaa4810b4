"""The README and docs/ say what is so: programs are run, commands parsed, generated parts compared.

Commands are run by tests/repo/docs. A `python` block prints what its comments say.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.report import draw_memory, readme_tables
from scripts import hooks_page
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
LINK = re.compile(r"\]\(([^)\s]+)\)")
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
    return [shlex.split(match[1]) for match in found if match]


def test_launcher_commands_parse() -> None:
    lines = arguments_of("python -m sgl_esft.launch_server")
    assert len(lines) > 2
    for arguments in lines:
        rest = options.parse(arguments)[1] if "--elastic" in arguments else arguments
        assert set(flags.parse(rest)[1]) <= {"--enable-metrics"}  # SGLang's own


def test_tool_commands_parse() -> None:
    lines = arguments_of("sgl-esft")
    named = {arguments[0] for arguments in lines}
    assert named == {command.name for command in cli._COMMANDS} | {"serve", "--version"}
    for arguments in lines:
        if len(arguments) > 1 and arguments[0] != "serve":  # the launcher's own flags
            cli.build_parser().parse_args(arguments)


def test_make_targets_exist() -> None:
    targets = {arguments[0] for arguments in arguments_of("make")}
    assert {"serve", "test"} <= targets
    for target in targets:
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == 0, target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_resolve(document: Path) -> None:
    links = [link.partition("#")[0] for link in LINK.findall(document.read_text())]
    local = [link for link in links if link and "://" not in link]
    assert [link for link in local if not (document.parent / link).exists()] == []


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


def test_every_adapter_error_is_explained() -> None:
    text = (ROOT / "docs" / "adapters.md").read_text()
    kinds = {name for name in vars(errors) if re.fullmatch(r"\w*Adapter\w*Error", name)}
    kinds.remove("UnknownAdapterError")  # of requests: http.md
    assert len(kinds) > 5
    assert [kind for kind in kinds if f"`{kind}`" not in text] == []


@pytest.mark.parametrize("document", readme_tables.DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_those_of_the_results(document: Path) -> None:
    assert document.read_text() == readme_tables.filled(document.read_text())


def test_every_table_is_shown() -> None:
    text = "".join(document.read_text() for document in readme_tables.DOCUMENTS)
    assert sorted(re.findall(r"<!-- table: (\w+) -->", text)) == sorted(readme_tables.TABLES)


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


def test_tables_without_results_say_so(tmp_path: Path) -> None:
    for document in readme_tables.DOCUMENTS:
        text = readme_tables.filled(document.read_text(), tmp_path)
        assert text.count("Not yet measured.") == text.count("<!-- table: ") > 0


def test_tables_show_results_and_where_they_come_from(tmp_path: Path) -> None:
    spread = {"min": 0.9, "q1": 0.98, "median": 0.99, "q3": 1.01, "max": 1.1}
    row = {
        "num_requests": 8,
        "pairs": 21,
        "woven_over_plain": spread,
        "woven_over_plain_cpu": {**spread, "median": 0.97},
    }
    machine = {"cpu": "Some CPU", "cores": 2, "device": "none"}
    overhead = {"rows": [row], "machine": machine, "command": "python -m b", "commit": "0123456789"}
    (tmp_path / "overhead.json").write_text(json.dumps(overhead))
    rows = [{"task": "sum", "base": 0.0, "merged": 0.915, "woven": 0.915, "same": None}]
    (tmp_path / "zoo.json").write_text(json.dumps(rows))
    documents = [document.read_text() for document in readme_tables.DOCUMENTS]
    text = readme_tables.filled("".join(documents), tmp_path)
    assert "| 8 | 0.990 (0.980 to 1.010) | 0.970 (0.980 to 1.010) | 21 |" in text
    assert "`python -m b`, commit 0123456, 2 cores of Some CPU, none." in text
    assert "| sum | 0.0 | 91.5 | 91.5 | - |" in text


def test_hooks_page_is_that_of_the_ledger() -> None:
    assert hooks_page.PAGE.read_text() == hooks_page.page()


def test_memory_picture_is_drawn_anew() -> None:
    assert draw_memory.PICTURE.read_text() == draw_memory.memory_picture()


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 160
