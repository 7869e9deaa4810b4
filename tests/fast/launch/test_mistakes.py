"""Mistakes on a command line end in one named error with its remedy, before SGLang is imported."""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_esft import zoo
from sgl_esft.ports import pick_free_port
from sgl_esft_launch import arguments
from tests.support.servers import ROOT

LIMIT_S = 5.0  # of a processor's time


def refused(*argv: str) -> str:
    """The one line that a launch in a process of its own ends with."""
    port = () if "--port" in argv else ("--port", str(pick_free_port()))
    began = cpu_seconds()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "sgl_esft.launch_server", *port, *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert cpu_seconds() - began < LIMIT_S
    lines = done.stderr.splitlines()
    assert not [line for line in lines if line.endswith(" sglang")], "slow imports"
    said = [line for line in lines if not line.startswith("import time:")]
    assert (done.returncode, done.stdout, len(said)) == (2, "", 1), said
    return said[0]


def cpu_seconds() -> float:
    """Of all processes that were waited for; however busy the machine is with others."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize(
    ("flag", "meant"),
    [("--esft-adaptors", "--esft-adapters"), ("--tensor-paralel-size", "--tensor-parallel-size")],
)
def test_a_misspelled_flag_names_the_nearest(flag: str, meant: str) -> None:
    line = refused(flag, "x")
    assert f"ConfigError: {flag}: neither sgl-esft nor SGLang has such a flag" in line
    assert meant in line.partition("did you mean ")[2]


def test_a_flag_of_the_elastic_server_says_so() -> None:
    assert "--max-devices is for the elastic server only: add --elastic" in refused(
        "--max-devices", "2"
    )


def test_a_bad_value_is_one_line() -> None:
    assert "sgl_esft: ConfigError: --port: invalid int value: 'x'" in refused("--port", "x")


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("--max-devices", "x", "--max-devices: invalid int value: 'x'"),
        ("--slo-ttft", "nan", "--slo-ttft nan"),
    ],
)
def test_a_bad_value_of_an_elastic_flag_is_one_line(flag: str, value: str, reason: str) -> None:
    line = refused("--elastic", flag, value)
    assert line.startswith(f"sgl_elastic: ElasticConfigError: {reason}")


def test_a_missing_model_says_what_was_looked_for() -> None:
    line = refused("--model-path", "/nope")
    assert line.endswith(
        "--model-path /nope: there is no such folder; looked for /nope/config.json"
    )


def test_a_wrong_adapter_says_which(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.safetensors").touch()
    good = f"good={next(iter(zoo.adapter_paths().values()))}"
    assert "AdapterPathError: adapter 'bad': " in refused("--esft-adapters", good, "bad=/nope")
    line = refused("--esft-adapters", good, f"lora={tmp_path}")
    assert "UnsupportedAdapterError: adapter 'lora': the folder holds a LoRA adapter" in line
    assert "--enable-lora" in line
    assert "--lora-paths" in line


@pytest.mark.parametrize("server", ["", "--elastic"])
def test_with_json_a_refusal_is_an_object(server: str) -> None:
    line = json.loads(refused(*server.split(), "--log-format", "json", "--esft-adaptors", "x"))
    assert line["level"] == "ERROR"
    assert "ConfigError: --esft-adaptors: " in line["message"]


_FAILING = """
import sgl_esft
from {module} import {name} as plugin
plugin.{install} = lambda: 1 / 0
{before}
plugin.register()
"""


@pytest.mark.parametrize(
    ("program", "parts"),
    [
        ("sgl_esft", ("sgl_esft.plugin", "register", "install", "")),
        (
            "sgl_elastic",
            ("sgl_elastic.engine", "plugin", "_install", "plugin.engine_config.current = list"),
        ),
    ],
)
@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_process_that_refuses_to_serve_says_so_in_the_logs_form(
    program: str, parts: tuple[str, ...], log_format: str
) -> None:
    names = dict(zip(("module", "name", "install", "before"), parts, strict=True))
    done = subprocess.run(
        [sys.executable, "-c", _FAILING.format(**names)],
        env={**os.environ, "ESFT_LOG_FORMAT": log_format},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    lines = done.stderr.splitlines()
    if log_format == "json":
        (line,) = (json.loads(line) for line in lines)
        assert line["level"] == "CRITICAL"
        lines = [line["message"]]
    assert lines[-1].startswith(f"{program} refuses to serve: ZeroDivisionError: ")


def test_a_port_in_use_names_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        line = refused("--port", str(taken.getsockname()[1]))
    assert f"stop process {os.getpid()} (" in line
    assert "or choose another --port" in line


def test_a_reader_that_has_enough_ends_inspect_quietly() -> None:
    folder = next(iter(zoo.adapter_paths().values()))
    command = [sys.executable, "-m", "sgl_esft.tools.cli", "inspect", str(folder)]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_flags_read_from_sglangs_source_are_those_of_its_parser() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    flags = {option for action in parser._actions for option in action.option_strings}
    assert arguments.sglang_flags() | {"-h"} == flags


@pytest.mark.parametrize("server", ["", "--elastic"])
def test_a_device_too_small_for_the_base_names_the_smallest_that_fits(server: str) -> None:
    line = refused(*server.split(), "--device-memory", "1MiB")
    assert "DeviceMemoryError: --device-memory 1.00MiB: the base model does not fit" in line
    assert line.endswith(f"--device-memory {smallest_of(line)}MiB")


@pytest.mark.parametrize("server", ["", "--elastic --max-devices 1"])
def test_a_device_too_small_for_the_adapters_names_the_smallest_that_fits(server: str) -> None:
    line = refused(*server.split(), "--device-memory", "9MiB")
    assert "the base model fits (6.59MiB), but not with adapters (8.44MiB) and 256 tokens" in line
    fitting = smallest_of(line)
    almost = refused(*server.split(), "--device-memory", f"{fitting - 1}MiB")
    assert smallest_of(almost) == fitting


def smallest_of(line: str) -> int:
    return int(line.rpartition(" --device-memory ")[2].removesuffix("MiB"))
