"""An engine swap on one device with weights and KV resident, for bench/gpu/run.py.

    gpu_serve.py's model -> elastic server, one device: memory worker, engine, parked standby
    greedy streams -> the engine is killed -> the standby maps the worker's pages, streams go on
    -> seconds by phase, over a cold start; tokens beside those of a server that was let alone

While an engine is swapped the weight files are not there, so that what serves afterwards has not
read them. The server sees the swap as the loss of its engine: on one device no scale makes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
import torch

from bench.common.record import spread
from bench.elasticmoe.load import Ask, Stream, differences, make_asks, steady
from bench.elasticmoe.rounds import wait_until_parked
from bench.gpu import plan, serve
from sgl_esft import zoo
from sgl_esft.zoo import serving

WEIGHTS = "*.safetensors"
NUM_ALONE = 4  # asks that are sent one at a time: batches of one are the same in every run
SETTLE_SECONDS = 1.0  # of load before and after a swap
RECOVERY_SECONDS = 60.0

Figures = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """The server, its load, and how much time the parts may take.

    served: the files, of serve.py; None = the demo's. device_memory: None = what the plan says.
    tokens: of each answer.
    """

    served: serve.Size | None
    device_memory: str | None
    kv_tokens: int
    num_asks: int
    num_streams: int
    tokens: range
    rounds: int
    start_seconds: float
    standby_seconds: float


FULL = Size(
    served=serve.FULL,
    device_memory=None,
    kv_tokens=serve.KV_TOKENS,
    num_asks=32,
    num_streams=8,
    tokens=range(256, 512),
    rounds=5,
    start_seconds=180.0,
    standby_seconds=120.0,
)
TINY = Size(
    served=None,
    device_memory="64MiB",
    kv_tokens=16384,
    num_asks=12,
    num_streams=4,
    tokens=range(64, 160),
    rounds=2,
    start_seconds=300.0,
    standby_seconds=240.0,
)


def sized(*, tiny: bool, num_layers: int | None) -> Size:
    """FULL, of so many layers where that is said, or TINY."""
    return TINY if tiny else replace(FULL, served=serve.sized(tiny=False, num_layers=num_layers))


@dataclass(frozen=True)
class Model:
    """Base and adapters in folders of their own, whose weight files can be taken away."""

    root: Path
    base: Path
    adapters: Mapping[str, Path]

    def weights(self) -> list[Path]:
        """Those that are there."""
        folders = (self.base, *self.adapters.values())
        return [file for folder in folders for file in sorted(folder.glob(WEIGHTS))]

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """No weight file is in its folder meanwhile."""
        away = self.root / "away"
        away.mkdir()
        moved = {file: away / f"{number}-{file.name}" for number, file in enumerate(self.weights())}
        for file, at in moved.items():
            file.rename(at)
        try:
            yield
        finally:
            for file, at in moved.items():
                at.rename(file)
            away.rmdir()


def own_model(base: Path, adapters: Mapping[str, Path], root: Path) -> Model:
    """The same files in folders below `root`; what an earlier run left there is replaced."""
    shutil.rmtree(root, ignore_errors=True)
    folders = {name: root / f"adapter-{name}" for name in adapters}
    _link_files(base, root / "base")
    for name, folder in folders.items():
        _link_files(adapters[name], folder)
    return Model(root, root / "base", folders)


def _link_files(source: Path, folder: Path) -> None:
    """Hard links, because an adapter's files must not be others'; copies on another file system."""
    folder.mkdir(parents=True)
    for file in source.iterdir():
        try:
            os.link(file, folder / file.name)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            shutil.copyfile(file, folder / file.name)


@dataclass(frozen=True)
class Swap:
    """One swap. `operation` is the server's own account of it."""

    killed_s: float  # of the monotonic clock
    killed_unix_s: float
    operation: Mapping[str, Any]
    streams: Sequence[Stream]
    reachable_bytes: int  # of weight files that the new engine could have read

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase, from the kill on."""
        created_s = float(self.operation["created_s"])
        found = {"notice": max(0.0, created_s - self.killed_unix_s)}
        found |= {each["name"]: each["seconds"] for each in self.operation["phases"]}
        return {**found, "tokens again": min(self.resumed_s)}

    @property
    def resumed_s(self) -> list[float]:
        """Seconds from the kill until each stream that it met went on."""
        return resumed(self.streams, self.killed_s)


def resumed(streams: Iterable[Stream], killed_s: float) -> list[float]:
    """Of streams that had tokens before and after: how long after the kill their pause ended.

    Tokens that were on their way at the kill still come, so the longest pause after it counts.
    """
    found = []
    for stream in streams:
        pauses = [(seconds, at_s) for at_s, seconds in stream.gaps_s if at_s > killed_s]
        if pauses and stream.token_s[0] < killed_s:
            found.append(max(pauses)[1] - killed_s)
    return found


def measure(size: Size, root: Path = serve.ROOT / "build" / "gpu-serve") -> Figures:
    """Start the server, swap its engine until the rounds or the time are through."""
    seconds = float(os.environ.get("BENCH_STEP_SECONDS", "540"))
    end = time.monotonic() + seconds - serve.MARGIN_SECONDS
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size, most_layers = fitted(size, serve.free_bytes())
    model = _model(size, root, most_layers)
    checkpoint_bytes = sum(file.stat().st_size for file in model.weights())
    wait_seconds = max(1.0, min(size.start_seconds, end - time.monotonic()))
    began = time.monotonic()
    with serving.server(arguments(model, size, device), wait_seconds) as url:
        cold_s = time.monotonic() - began
        found = _drive(url, size, model, lambda: time.monotonic() < end)
    return {
        "device": device,
        "checkpoint_bytes": checkpoint_bytes,
        "cold_start_s": cold_s,
        **found.figures(cold_s, size.rounds),
    }


def fitted(size: Size, free: int | None) -> tuple[Size, int | None]:
    """The size with its device's memory, and the layers that fit `free` bytes; None = all.

    The memory worker is given what weights and KV take and a tenth more. Raises DoesNotFitError.
    """
    if size.served is None or free is None:
        return replace(size, device_memory=size.device_memory or "64GiB"), None
    model = serve.planned(size.served, len(serve.PUBLISHED))
    wanted = serve.config_of(size.served)["num_hidden_layers"]
    num_layers = plan.layers_of_a_swap(free, wanted, model)
    mebibytes = math.ceil(1.1 * model.woven(num_layers) / (1 << 20))
    return replace(size, device_memory=size.device_memory or f"{mebibytes}MiB"), num_layers


def _model(size: Size, root: Path, most_layers: int | None) -> Model:
    if size.served is None:
        return own_model(zoo.base_path(), zoo.adapter_paths(), root / "elastic-demo")
    files = serve.write_files(size.served, root, most_layers)
    adapters = dict(list(files.adapters.items())[: len(serve.PUBLISHED)])
    return own_model(files.base, adapters, root / "elastic")


def arguments(model: Model, size: Size, device: str) -> list[str]:
    """The launcher's, for one device that all engines share."""
    named = [f"{name}={folder}" for name, folder in model.adapters.items()]
    found = ["--elastic", "--max-devices", "1", "--dp-size", "1", "--standby-ranks", "1"]
    found += ["--model-path", str(model.base), "--esft-adapters", *named]
    found += ["--device-memory", str(size.device_memory), "--max-total-tokens", str(size.kv_tokens)]
    found += ["--log-level", "warning"]
    found += serve.device_arguments(device, size.num_streams)
    if device == "cuda":
        # The first batches compile kernels, which is no hang.
        found += ["--hang-timeout", "120"]
    return found


@dataclass(frozen=True)
class Driven:
    """What came of all requests."""

    alone: tuple[Sequence[Stream], Sequence[Stream]]  # before and after all swaps
    still: tuple[Sequence[Stream], Sequence[Stream]]  # the same load twice, and no swap
    swaps: Sequence[Swap]

    def figures(self, cold_s: float, rounds: int) -> Figures:
        """Of all swaps. Raises ValueError when a stream broke, or there was no swap in time."""
        if not self.swaps:
            raise ValueError("no swap in the time")
        every = [*self.alone, *self.still, *(swap.streams for swap in self.swaps)]
        check_streams(stream for streams in every for stream in streams)
        expected = answers(self.still[0])
        names = dict.fromkeys(name for swap in self.swaps for name in swap.phases)
        again = [min(swap.resumed_s) for swap in self.swaps]
        return {
            "rounds": len(self.swaps),
            "rounds_left_out": rounds - len(self.swaps),
            "weight_bytes_within_reach": max(swap.reachable_bytes for swap in self.swaps),
            "phase_s": {n: spread([s.phases[n] for s in self.swaps]) for n in names},
            "held_s": spread([swap.operation["gap_s"] for swap in self.swaps]),
            "swap_over_cold_start": spread([seconds / cold_s for seconds in again]),
            "streams_met": sum(len(swap.resumed_s) for swap in self.swaps),
            "different": {
                "alone": _count(self.alone[1], answers(self.alone[0])),
                "without a swap": _count(self.still[1], expected),
                "with swaps": _count([s for x in self.swaps for s in x.streams], expected),
            },
        }


def answers(streams: Iterable[Stream]) -> dict[Ask, tuple[int, ...]]:
    """What each ask was answered."""
    return {stream.ask: stream.output_ids for stream in streams}


def _count(streams: Sequence[Stream], expected: Mapping[Ask, tuple[int, ...]]) -> Figures:
    return {"streams": len(streams), "different": len(differences(streams, expected))}


def check_streams(streams: Iterable[Stream]) -> None:
    """Raises ValueError when a stream broke off: a swap must not be seen by any."""
    broken = [stream.error for stream in streams if stream.error]
    if broken:
        raise ValueError(f"{len(broken)} streams broke: {broken[0]}")


def _drive(url: str, size: Size, model: Model, has_time: Callable[[], bool]) -> Driven:
    asks = make_asks(list(model.adapters), size.num_asks, size.tokens)
    others = make_asks(list(model.adapters), NUM_ALONE, size.tokens, seed=1)
    before = _alone(url, others)
    still = [asyncio.run(steady(url, asks, size.num_streams)) for _ in range(2)]
    swaps: list[Swap] = []
    while len(swaps) < size.rounds and has_time():
        if not wait_until_parked(url, 1, size.standby_seconds):
            raise ValueError(f"no standby within {size.standby_seconds:g} s")
        with model.hidden():
            swaps.append(asyncio.run(_swap(url, asks, size.num_streams, model)))
    return Driven((before, _alone(url, others)), (still[0], still[1]), swaps)


def _alone(url: str, asks: Sequence[Ask]) -> list[Stream]:
    """One at a time and from an empty prefix cache, so that nothing else decides the rounding."""
    with urlopen(Request(f"{url}/flush_cache", method="POST"), timeout=30):
        pass
    return asyncio.run(steady(url, asks, 1))


async def _swap(url: str, asks: Sequence[Ask], num_streams: int, model: Model) -> Swap:
    """Kill the engine that serves, under load, and wait until another one does."""
    stop = asyncio.Event()
    load = asyncio.create_task(steady(url, asks, num_streams, stop))
    try:
        await asyncio.sleep(SETTLE_SECONDS)
        former = (await asyncio.to_thread(_serving, url))["instance_id"]
        known = {each["id"] for each in await asyncio.to_thread(_operations, url)}
        pid = await asyncio.to_thread(_pid, url, former)
        killed_s, killed_unix_s = time.monotonic(), time.time()
        os.killpg(pid, signal.SIGKILL)  # a supervisor's group is the engine
        operation = await asyncio.to_thread(_recovery, url, known)
        now = (await asyncio.to_thread(_serving, url))["instance_id"]
        reachable = within_reach(model, group(await asyncio.to_thread(_pid, url, now)))
        await asyncio.sleep(SETTLE_SECONDS)
    finally:
        stop.set()
        streams = await load
    return Swap(killed_s, killed_unix_s, operation, streams, reachable)


def _get(url: str) -> dict[str, Any]:
    with urlopen(url, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def _serving(url: str) -> dict[str, Any]:
    found: dict[str, Any] = _get(f"{url}/v1/instances")["serving"]
    return found


def _pid(url: str, instance: str) -> int:
    """The supervisor's."""
    listed = _get(f"{url}/v1/instances")["instances"]
    return next(int(each["pid"]) for each in listed if each["instance_id"] == instance)


def _operations(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = _get(f"{url}/v1/scale")["operations"]
    return found


def _recovery(url: str, known: set[str]) -> dict[str, Any]:
    """The new operation, once it has ended. Raises ValueError when that was no success."""
    deadline = time.monotonic() + RECOVERY_SECONDS
    while time.monotonic() < deadline:
        for each in _operations(url):
            if each["id"] not in known and each["state"] not in ("pending", "running"):
                if each["state"] != "succeeded":
                    raise ValueError(f"the swap failed: {each}")
                return each
        time.sleep(0.01)
    raise ValueError(f"no swap within {RECOVERY_SECONDS:g} s of the kill")


def within_reach(model: Model, pids: Iterable[int]) -> int:
    """Bytes of weight files that are in the model's folders, or mapped or open by processes."""
    found = set(model.weights())
    for pid in pids:
        found |= {path for path in _files_of(pid) if path.match(WEIGHTS)}
    return sum(path.stat().st_size for path in found)


def _files_of(pid: int) -> set[Path]:
    """What a process has mapped or open; it is there, or that is an OSError."""
    process = Path(f"/proc/{pid}")
    mapped = (line.split(maxsplit=5)[5:] for line in (process / "maps").read_text().splitlines())
    found = {Path(rest[0].strip()) for rest in mapped if rest}
    for entry in list((process / "fd").iterdir()):
        try:
            found.add(entry.readlink())
        except FileNotFoundError:  # closed meanwhile
            continue
    return found


def group(leader: int) -> list[int]:
    """The processes of a process group: of an engine, its supervisor and its ranks."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            if os.getpgid(pid) == leader:
                found.append(pid)
    return found
