"""The elastic flags: what they become, what is refused, and that help and documents know them."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from sgl_elastic import options
from sgl_elastic.errors import ElasticConfigError
from sgl_esft import launch_server
from sgl_esft.launch import flags

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "elastic.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GIB = 1 << 30


def own_flags() -> set[str]:
    parser = argparse.ArgumentParser(add_help=False)
    options.add_flags(parser)
    return set(re.findall(r"--[a-z-]+", parser.format_usage()))


def documented_commands() -> list[list[str]]:
    """Arguments of every elastic launch in a `bash` block."""
    text = "\n".join(document.read_text() for document in DOCUMENTS)
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if "--elastic" in line]
    return [shlex.split(line.partition("launch_server")[2], comments=True) for line in lines]


def test_defaults() -> None:
    found, rest = options.parse(["--elastic"])
    assert rest == []
    assert (found.max_devices, found.dp_size, found.standby_ranks) == (4, 1, 4)
    assert (found.device_bytes, found.kv_limit) == (GIB, options.DEFAULT_KV_TOKENS)
    assert found.autoscale is None


def test_what_is_not_elastic_is_left_over_in_order() -> None:
    argv = ["--port", "1", "--elastic", "--dp", "2", "--device-memory", "2GiB", "--no-esft"]
    found, rest = options.parse([*argv, "--max-total-tokens", "9", "--standby-ranks", "0"])
    assert rest == ["--port", "1", "--no-esft"]
    assert (found.dp_size, found.device_bytes, found.kv_limit) == (2, 2 * GIB, 9)
    assert found.standby_ranks == 0


@pytest.mark.parametrize(
    "argv",
    [
        ["--dp-size", "5"],
        ["--dp-size", "0"],
        ["--max-devices", "2000"],
        ["--max-total-tokens", "-1"],
        ["--standby-ranks", "-1"],
    ],
)
def test_what_cannot_work_is_refused_by_name(argv: list[str]) -> None:
    with pytest.raises(ElasticConfigError, match=f"{argv[0]} {argv[1]}"):
        options.parse(argv)


@pytest.mark.parametrize("argv", [["--help"], ["--elastic", "--help"], ["-h"]])
def test_help_of_the_launcher_shows_all_flags(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch_server.main(argv) == 0
    shown = capsys.readouterr().out
    assert own_flags() | {"--dp-size", "--device-memory"} <= set(re.findall(r"--[a-z-]+", shown))


def test_documented_launches_parse() -> None:
    commands = documented_commands()
    assert commands
    for argv in commands:
        assert flags.parse(options.parse(argv)[1])[1] == []


def test_every_flag_is_in_the_page_and_every_flag_of_its_table_exists() -> None:
    assert [flag for flag in own_flags() if f"`{flag}`" not in PAGE] == []
    table = re.findall(r"`(--[a-z-]+)`", PAGE.partition("## Flags")[2].partition("A standby")[0])
    assert set(table) <= own_flags() | {"--dp-size", "--device-memory"}
