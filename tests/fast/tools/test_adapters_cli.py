"""`sgl-esft adapters` against the real routes, and the keys that the tools show."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from sgl_esft.tools import adapters_cli
from sgl_esft.tools.cli import main
from tests.fast.lifecycle.site import Site, write_folder

Capture = pytest.CaptureFixture[str]


class Served:
    """The application of a Site on a real socket; remembers the keys that it is shown."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.keys: list[str | None] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(self._app, log_level="error", lifespan="off", interface="asgi3")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    async def _app(self, scope: dict, receive: object, send: object) -> None:
        headers = dict(scope["headers"])
        key = headers.get(b"authorization")
        self.keys.append(None if key is None else key.decode())
        await self.site.app(scope, receive, send)

    def _run(self) -> None:
        asyncio.run(self._server.serve([self._socket]))

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    for name in ("math", "law"):
        write_folder(tmp_path / name, f"{name} v1")
    write_folder(tmp_path / "bad", "broken")
    server = Served(Site(tmp_path))
    try:
        yield server
    finally:
        server.stop()


def test_the_life_of_an_adapter(served: Served, capsys: Capture) -> None:
    def run(*argv: str) -> str:
        assert main(["adapters", *argv, "--url", served.url]) == 0
        return capsys.readouterr().out

    lines = run().splitlines()
    assert lines[0].split() == list(adapters_cli._COLUMNS)
    assert [line.split()[:2] for line in lines[1:] if not line.startswith(" ")] == [
        ["bad", "failed"],
        ["law", "on_disk"],
        ["math", "on_disk"],
    ]
    assert "  AdapterFormatError: bad is broken" in lines
    assert "in_host_cache  yes" in run("load", "math", "--pinned")
    assert "in_host_cache  no" in run("unpin", "math")
    assert "in_host_cache  yes" in run("pin", "math")
    replaced = json.loads(run("replace", "math", "--path", "law", "--json"))
    assert (replaced["folder"], replaced["pinned"]) == ("law", True)
    assert run("replace", "math") != ""
    assert run("unload", "math") == "math is unloaded\n"
    assert len(json.loads(run("list", "--json"))["adapters"]) == 3


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["load"], "load needs an adapter's name"),
        (["list", "math"], "list takes no name"),
        (["unload", "math", "--path", "x"], "--path is for load and replace"),
        (["pin", "math", "--pinned"], "--pinned is for load"),
        (["unload", "nobody"], "HTTP 404: UnknownAdapterError: adapter 'nobody' is not known"),
        (["load", "math", "--path", "../x"], "AdapterPathError"),
        (["load", "a/b"], "AdapterNameError"),
        (["list", "--timeout", "inf"], "--timeout"),
        (["list", "--key", "é"], "--key"),
    ],
)
def test_what_cannot_be(served: Served, argv: list[str], word: str, capsys: Capture) -> None:
    assert main(["adapters", *argv, "--url", served.url]) == 2
    assert word in capsys.readouterr().err


def test_keys(served: Served, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert main(["adapters", "--url", served.url]) == 0
    monkeypatch.setenv("ESFT_KEY", "from-the-environment")
    assert main(["adapters", "--url", served.url]) == 0
    assert main(["adapters", "--url", served.url, "--key", "from-the-flag"]) == 0
    assert main(["memory", "--url", served.url]) == 2  # no such route here
    assert served.keys == [
        None,
        "Bearer from-the-environment",
        "Bearer from-the-flag",
        "Bearer from-the-environment",
    ]
    assert "from-the" not in "".join(capsys.readouterr())
