"""`sgl-esft quantise` on a command line: its arguments, what it prints, and where."""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path

import pytest

from sgl_esft.errors import ConfigError
from sgl_esft.formats.expert_scheme import SCHEME_NAMES
from sgl_esft.tools.base_cli import configure_quantise, run_quantise
from tests.fast.quant.test_write import load, small_base


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_base(tmp_path_factory.mktemp("cli") / "base")


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sgl-esft quantise")
    configure_quantise(parser)
    return parser.parse_args(argv)


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
def test_a_checkpoint_is_written_and_described(
    base: Path, tmp_path: Path, scheme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run_quantise(parse(str(base), "--to", scheme, "--out", str(out))) == 0
    printed, progress = capsys.readouterr()
    megabytes = sum(t.nbytes for t in load(out).values()) / 1e6
    assert printed.startswith(f"wrote {megabytes:.2f} MB to {out}: the base's ")
    assert f"with its routed experts in {scheme}\n" in printed
    assert ("serve it with --quantization moe_wna16\n" in printed) == (scheme == "int4")
    assert "quantization_config" in json.loads((out / "config.json").read_text())
    lines = progress.splitlines()
    assert lines[-1] == f"quantised 100 %: {megabytes:.2f} MB of {megabytes:.2f} MB"
    assert 1 < len(lines) <= 10
    assert all(line.startswith("quantised ") for line in lines)


def test_a_line_on_a_terminal_is_rewritten(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    run_quantise(parse(str(base), "--to", "int8", "--out", str(tmp_path / "out")))
    shown = terminal.getvalue()
    assert shown.startswith("\rquantised ")
    assert shown.count("\n") == 1
    assert shown.endswith("MB\n")
    assert shown.count("\r") > 10


@pytest.mark.parametrize("terminal", [True, False])
def test_an_error_begins_a_line(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    """After half of it, a line is open on a terminal alone."""
    from sgl_esft.quant import write

    stream, left = Terminal() if terminal else io.StringIO(), iter(range(10))
    write_one = write.copy_to

    def fail(*arguments: object) -> None:
        if next(left, None) is None:
            raise ConfigError("spoilt")
        write_one(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(write, "copy_to", fail)
    with pytest.raises(ConfigError, match="spoilt"):
        run_quantise(parse(str(base), "--to", "int8", "--out", str(tmp_path / "out")))
    assert stream.getvalue().endswith("\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("base", "--out", "out"), "one of the arguments --to --adapter is required"),
        (("base", "--to", "int8", "--adapter", "a", "--out", "out"), "not allowed with argument"),
        (("base", "--to", "int8"), "required: --out"),
        (("--to", "int8", "--out", "out"), "required: BASE"),
        (("base", "--to", "int2", "--out", "out"), "argument --to: invalid choice: 'int2'"),
    ],
)
def test_arguments_that_are_refused(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(*argv)
    assert message in capsys.readouterr().err


def test_help_names_every_scheme(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    shown = capsys.readouterr().out
    assert all(f"{name}: " in " ".join(shown.split()) for name in SCHEME_NAMES)
