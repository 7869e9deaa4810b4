"""A library over real folders and a fake engine, behind the real routes and layers."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import httpx
from fastapi import FastAPI, HTTPException, Request

from sgl_esft.errors import AdapterFormatError
from sgl_esft.formats.adapter_config import (
    EXPERT_CONFIG_NAME,
    LORA_CONFIG_NAME,
    AdapterKind,
    kind_of,
)
from sgl_esft.formats.lora_config import LoraConfig
from sgl_esft.formats.lora_manifest import AnyManifest, LoraManifest
from sgl_esft.formats.manifest import AdapterManifest
from sgl_esft.http.adapter_names import KnownNames, parts_of
from sgl_esft.lifecycle import compat
from sgl_esft.lifecycle.api import Backing
from sgl_esft.lifecycle.catalogue import Catalogue
from sgl_esft.lifecycle.jobs import Job, JobKind
from sgl_esft.lifecycle.library import AdapterLibrary
from sgl_esft.lifecycle.listing import Lister
from tests.fast.http import stack
from tests.fast.lifecycle.fake_engine import FakeEngine

_sizes = itertools.count(1)
SETTLE_S: Final = 60.0
CONFIG_NAMES: Final[Mapping[AdapterKind, str]] = {
    "esft": EXPERT_CONFIG_NAME,
    "lora": LORA_CONFIG_NAME,
}


def write_folder(folder: Path, content: str, kind: AdapterKind = "esft") -> None:
    """An adapter folder; no two writes have the same size, so a fingerprint tells them apart."""
    folder.mkdir(exist_ok=True)
    for each, name in CONFIG_NAMES.items():
        (folder / name).unlink(missing_ok=True)
        if each == kind:
            (folder / name).write_text("broken" if content == "broken" else "{}")
    (folder / "weights.safetensors").write_text(content)
    (folder / "more.safetensors").unlink(missing_ok=True)


def touch_folder(folder: Path) -> None:
    """The same content as another file: only the fingerprint changes."""
    weights = folder / "weights.safetensors"
    copy = folder / "copy"
    shutil.copyfile(weights, copy)
    copy.replace(weights)


def check(folder: Path) -> AnyManifest:
    """Refuses broken folders, as the real check does."""
    kind = kind_of(folder)
    if (folder / CONFIG_NAMES[kind]).read_text() == "broken":
        raise AdapterFormatError(f"{folder.name} is broken")
    if kind == "lora":
        return LoraManifest(folder, LoraConfig(4, 1.0, None), {}, 100)
    return AdapterManifest(folder, {1: (0, 1, 2)}, {}, "float32", 100, 3)


class Site:
    """One server's library, and a client of it. `run` it in one event loop."""

    def __init__(
        self,
        root: Path | None,
        *,
        holds: bool = False,
        timeout_s: float = 60.0,
        takes_lora: bool = False,
    ) -> None:
        self.root = root
        self.takes_lora = takes_lora
        self.engine = FakeEngine(holds=holds)
        files = tuple(CONFIG_NAMES.values()) if takes_lora else (CONFIG_NAMES["esft"],)
        self.catalogue = Catalogue(root, check, files)
        self.catalogue.refresh()
        self.num_asked = 0  # requests that asked the library for adapters
        self.library = AdapterLibrary(self.engine, self.catalogue, ensure_timeout_s=timeout_s)
        self.lister = Lister(self.library, num_slots=3)
        self.running: asyncio.Event | None = None  # a request waits for it, if it is there
        self.app = self._application()
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")

    def _application(self) -> FastAPI:
        app = FastAPI()

        @app.post("/load_lora_adapter")
        async def theirs() -> str:
            return "SGLang's own"

        @app.post("/generate")
        async def generate(request: Request) -> dict[str, Any]:
            return await self._generate(await request.json())

        compat.install(app, lambda: Backing(self.library, self.lister))
        stack.install(app, names=self._names, ensure=self._ensure)
        return app

    def _names(self) -> KnownNames:
        known = self.library.known
        kind = known.kind_of if self.takes_lora else None
        return KnownNames(known.usable, frozenset({"demo"}), kind_of=kind)

    async def _generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """What the model would answer: the contents of the adapters, or the base."""
        names = body.get("lora_path")
        names = names if isinstance(names, list) else [names]
        asked = [parts_of(name) if name else () for name in names]
        if not all(self.engine.has(part) for parts in asked for part in parts):
            raise HTTPException(400, "unloaded between its load and this")  # as SGLang answers
        used = [[self.engine.begin_request(part) for part in parts] for parts in asked]
        try:
            if self.running is not None:
                await self.running.wait()
        finally:
            for each in itertools.chain.from_iterable(used):
                self.engine.end_request(each)
        return {"digests": ["+".join(each.digest for each in parts) or "base" for parts in used]}

    def write(self, name: str, content: str, kind: AdapterKind = "esft") -> None:
        """Put a folder below the root, and let the catalogue see it."""
        write_folder(self.root / name, content, kind)
        self.catalogue.refresh()

    def remove(self, name: str) -> None:
        """Take a folder away, and let the catalogue see it."""
        shutil.rmtree(self.root / name)
        self.catalogue.refresh()

    async def _ensure(self, names: Collection[str]) -> None:
        self.num_asked += 1
        await self.library.ensure(names)

    async def until_asked_for(self, num_requests: int) -> None:
        """Until so many requests have asked the library for their adapters, and it waits."""
        while self.num_asked < num_requests:
            await asyncio.sleep(0.001)
        await self.settle()

    async def settle(self) -> None:
        """Until everything that can go on without the test has: threads that read folders, too."""
        began = time.monotonic()
        while not all(self._waits_for_the_test(job) for job in self.library.known.jobs.values()):
            # A thread's look at a folder waits for the disk: seconds, on a busy machine.
            took_s = time.monotonic() - began
            assert took_s < SETTLE_S, f"these go on: {self.library.known.jobs}"
            await asyncio.sleep(0.0005)

    def _waits_for_the_test(self, job: Job) -> bool:
        if job.kind is not JobKind.UNLOAD:
            return job.name in self.engine.pending
        is_loaded = any(each.name == job.name for each in self.engine.loaded())
        return not is_loaded and any(each.name == job.name for each in self.engine.draining())

    async def adapters(self) -> dict[str, dict[str, Any]]:
        """The listing, by name."""
        listed = (await self.client.get("/v1/adapters")).json()["adapters"]
        return {each["name"]: each for each in listed}

    async def generate(self, adapter: Any) -> httpx.Response:
        body = {"text": ["x"] * len(adapter) if isinstance(adapter, list) else "x"}
        return await self.client.post("/generate", json={**body, "adapter": adapter})
