"""`sgl-esft memory` and `sgl-esft plan`: what they print, and each kind of bad input."""

import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from socket import create_server
from threading import Thread

import pytest

from sgl_esft.memory.report import MemoryReport
from sgl_esft.tools.cli import main
from tests.fast.tools.test_cli import fails
from tests.support import memory_reports
from tests.support.loopback import JsonHandler, served, url_of

DATA = Path(__file__).parents[2] / "data"
PLAN = ["plan", "--model-config", str(DATA / "deepseek-v2-lite.json"), "--device-memory", "64GiB"]

Capture = pytest.CaptureFixture[str]


@contextmanager
def answering(body: bytes, status: int = 200) -> Iterator[str]:
    """A server that answers GET /v1/memory with `body`, everything else with 404; its address."""

    class Handler(JsonHandler):
        def do_GET(self) -> None:
            self.send_bytes(status if self.path == "/v1/memory" else 404, body)

    with served(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield url_of(server)


def report_bytes() -> bytes:
    return json.dumps(memory_reports.report().to_json()).encode()


def test_memory_prints_a_table(capsys: Capture) -> None:
    with answering(report_bytes()) as url:
        assert main(["memory", "--url", url + "/"]) == 0
    out = capsys.readouterr().out
    assert "rank 0, cpu, virtual expert memory" in out
    assert "1.667 with padding" in out


def test_memory_json_and_picture(capsys: Capture, tmp_path: Path) -> None:
    picture = tmp_path / "memory.svg"
    with answering(report_bytes()) as url:
        assert main(["memory", "--url", url, "--json", "--svg", str(picture)]) == 0
    found = MemoryReport.from_json(json.loads(capsys.readouterr().out))
    assert found == memory_reports.report()
    assert ET.parse(picture).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        (b"<html>hello</html>", 200, "not valid JSON"),
        (b"[]", 200, "not an object"),
        (b'{"devices": 1}', 200, "at `$.devices`"),
        (b'{"devices": [], "devices": []}', 200, "appears twice"),
        (b'{"object": "list", "data": []}', 200, "missing required field `devices`"),
        (b"\xff\xfe", 200, "not valid JSON"),
        (b"", 200, "not valid JSON"),
        (b"gone", 404, "HTTP 404: it is not a server of this package"),
        (b"oops", 500, "HTTP 500: look into the server's log"),
    ],
)
def test_answers_that_are_not_ours(body: bytes, status: int, word: str, capsys: Capture) -> None:
    with answering(body, status) as url:
        assert word in fails(capsys, 2, "memory", "--url", url)


def test_nothing_answers(capsys: Capture) -> None:
    with create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    error = fails(capsys, 2, "memory", "--url", f"http://127.0.0.1:{port}")
    assert "nothing answers at" in error


def test_a_server_that_stays_silent(capsys: Capture) -> None:
    with create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert "timed out" in fails(capsys, 2, "memory", "--url", url, "--timeout", "0.2")


def test_a_server_that_does_not_speak_http(capsys: Capture) -> None:
    with create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"220 mail\r\n")

        thread = Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert "does not speak HTTP" in fails(capsys, 2, "memory", "--url", url)
        thread.join()


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:30000", "file:///etc/passwd", "http://", "http://a b", "http://x:port"]
)
def test_addresses_that_cannot_be(url: str, capsys: Capture) -> None:
    fails(capsys, 2, "memory", "--url", url)


@pytest.mark.parametrize("timeout", ["0", "-1", "nan"])
def test_timeouts_that_cannot_be(timeout: str, capsys: Capture) -> None:
    assert "--timeout" in fails(capsys, 2, "memory", "--timeout", timeout)


def test_picture_that_cannot_be_written(capsys: Capture, tmp_path: Path) -> None:
    with answering(report_bytes()) as url:
        assert main(["memory", "--url", url, "--svg", str(tmp_path / "none" / "a.svg")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_plan_prints_a_table(capsys: Capture) -> None:
    adapters = [str(DATA / "esft" / f"{name}.json") for name in ("gate-law", "token-law")]
    assert main([*PLAN, "--adapters", *adapters, "--counts", "1,2,4"]) == 0
    out = capsys.readouterr().out
    assert "adapter   gate-law: 163 experts, at most 11 and on average 6.27 a layer" in out
    assert "beyond 2, these again from the first on" in out
    assert [line.split()[0] for line in out.splitlines()[-3:]] == ["1", "2", "4"]


def test_plan_json(capsys: Capture) -> None:
    argv = ["--profile", "table1", "--json", "--counts", "2", "--kv-dtype", "fp8_e4m3"]
    assert main([*PLAN, *argv, "--reserve", "5GB", "--memory-fraction", "0.95"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["model"]["total_bytes"] == 31_412_968_448
    assert plan["model"]["kv_bytes_per_token"] == 15_552
    assert plan["device"]["reserve_bytes"] == 5 * 10**9
    (row,) = plan["rows"]
    assert row["merged"] == {
        "weight_bytes": 2 * 31_412_968_448,
        "kv_tokens": None,
        "fragmentation": None,
    }
    assert row["virtual"]["weight_bytes"] < row["padded"]["weight_bytes"]
    usable = int((64 << 30) * 0.95) - 5 * 10**9
    assert row["padded"]["kv_tokens"] == (usable - row["padded"]["weight_bytes"]) // 15_552


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--profile", "table1", "--device-memory", "64gb"], "--device-memory is '64gb'"),
        (["--profile", "table1", "--page-size", "2"], "--page-size is '2'"),
        (["--profile", "table1", "--page-size", "3MiB"], "--page-size is 3145728"),
        (["--profile", "table1", "--page-size", "2KiB"], "--page-size is 2048"),
        (["--profile", "table1", "--memory-fraction", "0"], "--memory-fraction is 0.0"),
        (["--profile", "table1", "--memory-fraction", "nan"], "--memory-fraction is nan"),
        (["--profile", "table1", "--counts", "1,5000"], "--counts has 5000"),
        (["--profile", "table1", "--reserve", "1 G"], "--reserve is '1 G'"),
        (["--profile", "table1", "--memory-fraction", "1.5"], "--memory-fraction is 1.5"),
        (["--profile", "table1", "--kv-dtype", "int3"], "--kv-dtype is 'int3'"),
        (["--profile", "table1", "--counts", "1,x"], "--counts is '1,x'"),
        (["--profile", "table1", "--counts", ""], "--counts is ''"),
        (["--profile", "table1", "--counts", "0"], "--counts has 0"),
        (["--profile", "table1", "--max-experts-per-adapter", "3"], "gate-math has 12"),
        (["--profile", "tabel1"], "--profile is 'tabel1'"),
        (["--adapters", "nowhere.json"], "nowhere.json does not exist"),
        (["--profile", "table1", "--model-config", "nowhere.json"], "cannot read nowhere.json"),
    ],
)
def test_plans_that_cannot_be(argv: list[str], word: str, capsys: Capture) -> None:
    assert word in fails(capsys, 2, *PLAN, *argv)


def test_plan_without_adapters_or_with_both(capsys: Capture) -> None:
    for argv in ([], ["--profile", "table1", "--adapters", "x"]):
        with pytest.raises(SystemExit) as stop:
            main([*PLAN, *argv])
        assert stop.value.code == 2
    assert "--adapters" in capsys.readouterr().err


def test_plan_without_the_extension_module(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "sgl_esft.memory.plan", raising=False)
    monkeypatch.setitem(sys.modules, "sgl_vmm", None)
    assert "run `make setup`" in fails(capsys, 2, *PLAN, "--profile", "table1")
