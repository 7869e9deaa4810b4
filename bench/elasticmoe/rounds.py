"""What the benches of elastic scaling have in common: servers by strategy, one scale measured.

    strategy or ablation --[elastic_server]--> url
    url, dp_size --[measured_scale]--> Scaled: seconds until ready, downtime, phases, peak memory
    Scaled of each round --[over]--> ratios to cold restart, within a round

Devices are processes with a byte budget. `peak_bytes` is what the operating system counts behind
the files of all memory workers (weights, KV, and pages that a worker keeps free for later), sampled
while the scale runs; engines' own memory is not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias
from urllib.request import urlopen

import psutil

from bench.common.load import end_on_sigterm
from bench.common.record import RESULTS, spread
from bench.common.scaled_model import ScaledModel, ScaledShape
from bench.elasticmoe import load as elastic_load
from bench.elasticmoe.load import Ask, Stream
from sgl_esft import zoo
from sgl_esft.zoo import serving

MAX_DEVICES = 6  # so that extravagant scaling has devices for 2 -> 4
DEVICE_MEMORY = "64MiB"  # for the demo
# KV that leaves room on a device: otherwise it takes all of it, and every strategy's peak is that.
SOME_KV = ("--max-total-tokens", "16384")
# KV for a few requests: what ends first on a device.
FEW_TOKENS = ("--max-total-tokens", "512")
COLD = "cold_restart"
ELASTIC = "elastic"
# With standbys for every size that the walk goes to next: one up, one down, double, half.
STRATEGIES: Mapping[str, tuple[str, ...]] = {
    ELASTIC: ("--standby-ranks", "8"),
    COLD: ("--scale-strategy", COLD),
    "extravagant": ("--scale-strategy", "extravagant"),
    "colocated": ("--scale-strategy", "colocated"),
}
HORIZONTAL = ("--scale-strategy", "horizontal")  # by whole replicas only: not in every bench
# The rows of the paper's table: one more part off in each.
_PARTS = ("no_shared_allocator", "no_peer_copy", "no_standby", "no_zero_copy")
ABLATIONS: Mapping[str, tuple[str, ...]] = {
    "all parts": STRATEGIES[ELASTIC],
    **{
        f"- {part}": (*STRATEGIES[ELASTIC], "--ablate", ",".join(_PARTS[: count + 1]))
        for count, part in enumerate(_PARTS)
    },
}
_PARKED_TIMEOUT_S = 300.0
_SCALE_TIMEOUT_S = 300.0
_POLL_S = 0.5
_LIST_PERIOD_S = 0.2
_QUIET_POLLS = 4  # the next standby starts a moment after the last

_File: TypeAlias = tuple[int, int]  # device and inode numbers


@dataclass(frozen=True)
class Model:
    """What a server serves, and how much memory each of its devices has."""

    base: Path
    adapters: Mapping[str, Path]
    device_memory: str


def demo_model() -> Model:
    """The demo's: a step is hardly longer than what it takes to begin one."""
    return Model(zoo.base_path(), zoo.adapter_paths(), DEVICE_MEMORY)


def scaled_model() -> Model:
    """V2-Lite's shape (bench/common/scaled_model.py): a step is spent in experts, as on real
    devices.
    """
    model = ScaledModel.of(ScaledShape())
    return Model(model.base(), model.adapters(2), "2GiB")


MODELS: Mapping[str, Callable[[], Model]] = {"scaled": scaled_model, "demo": demo_model}


def result_name(name: str, model: str) -> str:
    """Of a result of the first of MODELS, its own; of another, with the model's behind it."""
    return name if model == next(iter(MODELS)) else f"{name}_{model}"


@dataclass(frozen=True)
class Scaled:
    """One scale of one server.

    `ready_s` is from the request until the new instance serves, `gap_s` how long new requests were
    held, `phases` seconds by name up to that moment, `steps` seconds by kind.
    """

    num_old: int
    num_new: int
    ready_s: float
    total_s: float
    gap_s: float
    peak_bytes: int
    copied_bytes: int
    phases: Mapping[str, float] = field(default_factory=dict)
    steps: Mapping[str, float] = field(default_factory=dict)

    @property
    def step(self) -> str:
        """`1 -> 2`."""
        return f"{self.num_old} -> {self.num_new}"


def scaled_of(operation: Mapping[str, Any], num_old: int, num_new: int, peak: int) -> Scaled:
    """What an operation says. Raises ValueError for one that did not succeed."""
    if operation.get("state") != "succeeded":
        raise ValueError(f"{num_old} -> {num_new}: {operation}")
    phases = operation["phases"]
    last = max(i for i, phase in enumerate(phases) if phase["name"] == "switch")
    return Scaled(
        num_old=num_old,
        num_new=num_new,
        ready_s=sum(phase["seconds"] for phase in phases[: last + 1]),
        total_s=operation["finished_s"] - operation["created_s"],
        gap_s=operation["gap_s"],
        peak_bytes=peak,
        copied_bytes=sum(each["copied_bytes"] for each in operation["steps"]),
        phases=_sums(phases[: last + 1], "name"),
        steps=_sums(operation["steps"], "kind"),
    )


def _sums(records: Sequence[Mapping[str, Any]], key: str) -> dict[str, float]:
    """Seconds by name; a phase may come twice."""
    found: dict[str, float] = {}
    for record in records:
        found[record[key]] = found.get(record[key], 0.0) + record["seconds"]
    return found


def over(ours: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Spread of ratios, round by round. Raises ValueError for different numbers of rounds."""
    return spread([one / max(other, 1e-9) for one, other in zip(ours, base, strict=True)])


@contextmanager
def elastic_server(
    flags: Sequence[str], dp_size: int, more: Sequence[str] = (), model: Model | None = None
) -> Iterator[str]:
    """A server of `model`, or of the demo's, on `dp_size` devices; its URL once it is healthy."""
    model = model or demo_model()
    adapters = [f"{name}={path}" for name, path in model.adapters.items()]
    arguments = ["--elastic", "--max-devices", str(MAX_DEVICES), "--dp-size", str(dp_size)]
    arguments += ["--model-path", str(model.base), "--esft-adapters", *adapters]
    arguments += ["--device-memory", model.device_memory, "--log-level", "warning", *more, *flags]
    with serving.server(arguments, 600.0) as url:
        yield url


def flags_of(strategy: str, num_new: int) -> tuple[str, ...]:
    """The strategy's flags for one scale; elastic keeps the standby that it needs and no more.

    More would be started while the scale's effects are measured, on the same few cores.
    """
    return ("--standby-ranks", str(num_new)) if strategy == ELASTIC else STRATEGIES[strategy]


def wait_until_parked(url: str, num_ranks: int, timeout_s: float = _PARKED_TIMEOUT_S) -> bool:
    """Wait for a standby of this size, and until none is being started; False at the time-out."""
    deadline = time.monotonic() + timeout_s
    num_quiet = 0
    while time.monotonic() < deadline and num_quiet < _QUIET_POLLS:
        with urlopen(f"{url}/v1/instances", timeout=30) as answer:
            found = json.load(answer)["instances"]
        num_quiet = num_quiet + 1 if is_settled(found, num_ranks) else 0
        time.sleep(_POLL_S)
    return num_quiet == _QUIET_POLLS


def is_settled(instances: Iterable[Mapping[str, Any]], num_ranks: int) -> bool:
    """Whether a standby of this size is parked, and no instance is starting."""
    listed = list(instances)
    parked = [each for each in listed if each["state"] == "parked"]
    is_there = any(len(each["device_ids"]) == num_ranks for each in parked)
    return is_there and all(each["state"] != "starting" for each in listed)


class DeviceMemory:
    """Bytes behind each memory worker of this process's servers, as the operating system counts.

    A worker that copies from a peer has the peer's files open too: a file is the first one's that
    was seen with it.
    """

    def __init__(self) -> None:
        self._owner: dict[_File, int] = {}  # device id
        self._workers: dict[int, int] = {}  # pid -> device id
        self._listed_s = -1.0

    def now(self) -> dict[int, int]:
        """Device id -> bytes."""
        found: dict[int, int] = {}
        for pid, device_id in self._listed().items():
            for file, num_bytes in memory_files(pid).items():
                if self._owner.setdefault(file, device_id) == device_id:
                    found[device_id] = found.get(device_id, 0) + num_bytes
        return found

    def _listed(self) -> dict[int, int]:
        now_s = time.monotonic()
        if now_s - self._listed_s > _LIST_PERIOD_S:  # workers come and go
            self._workers, self._listed_s = worker_devices(os.getpid()), now_s
        return self._workers


class MemorySampler:
    """The most bytes of each device, and of all of them at one time, while it runs."""

    def __init__(self, memory: DeviceMemory, period_s: float = 0.02) -> None:
        self._memory = memory
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.peak_bytes = 0
        self.device_peak_bytes: dict[int, int] = {}

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.take(self._memory.now())
            self._stop.wait(self._period_s)

    def take(self, now: Mapping[int, int]) -> None:
        """Count what devices have now."""
        self.peak_bytes = max(self.peak_bytes, sum(now.values()))
        for device_id, num_bytes in now.items():
            most = max(self.device_peak_bytes.get(device_id, 0), num_bytes)
            self.device_peak_bytes[device_id] = most


def worker_devices(ancestor: int) -> dict[int, int]:
    """Memory workers among a process's descendants: pid -> device id."""
    found = {}
    for process in psutil.Process(ancestor).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            words = process.cmdline()
            if "sgl_elastic.memory.worker" in words:
                found[process.pid] = int(words[words.index("--device-id") + 1])
    return found


def memory_files(pid: int) -> dict[_File, int]:
    """The memory files that a process has open -> bytes; none when the process is gone."""
    files: dict[_File, int] = {}
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                if "memfd:" in str(entry.readlink()):
                    info = entry.stat()
                    files[info.st_dev, info.st_ino] = info.st_blocks * 512
    return files


async def measured_scale(url: str, num_old: int, num_new: int) -> Scaled:
    """Scale a server that has `num_old` devices. Raises ValueError when it did not succeed."""
    with MemorySampler(DeviceMemory()) as memory:
        body = {"dp_size": num_new}
        operation = await elastic_load.scale(url, body, _SCALE_TIMEOUT_S)
    return scaled_of(operation, num_old, num_new, memory.peak_bytes)


async def walk(
    url: str, sizes: Sequence[int], num_streams: int, *, has_standbys: bool, settle_s: float
) -> list[Scaled]:
    """Scale along `sizes` under a steady load. Raises ValueError when a stream failed."""
    asks, stop = demo_asks(), asyncio.Event()
    load = asyncio.create_task(elastic_load.steady(url, asks, num_streams, stop))
    found = []
    try:
        for num_old, num_new in pairwise(sizes):
            if has_standbys:
                await asyncio.to_thread(wait_until_parked, url, num_new)
            await asyncio.sleep(settle_s)
            found.append(await measured_scale(url, num_old, num_new))
            print(f"  {found[-1].step}: {found[-1].ready_s:.2f} s", flush=True)
    finally:
        stop.set()
        streams = await load
    check_streams(streams)
    return found


def demo_asks() -> list[Ask]:
    """Held-out prompts of the demo for the base and its adapters."""
    return asks_of(demo_model())


def asks_of(model: Model) -> list[Ask]:
    """The demo's held-out prompts, for a model's base and its adapters."""
    return elastic_load.make_asks(list(model.adapters), 40, range(24, 120))


def check_streams(streams: Sequence[Stream]) -> None:
    """Raises ValueError when a stream broke off: its figures would be of something else."""
    errors = [stream.error for stream in streams if stream.error]
    if errors:
        raise ValueError(f"{len(errors)} of {len(streams)} streams failed: {errors[0]}")


def median(values: Sequence[float]) -> float:
    """0 of nothing."""
    return statistics.median(values) if values else 0.0


def has_standbys(flags: Sequence[str]) -> bool:
    """Whether a server with these flags keeps standbys."""
    return "--scale-strategy" not in flags and "no_standby" not in ",".join(flags)


def options_of(description: str, rounds: int, *, has_models: bool = False) -> argparse.Namespace:
    """--quick, --rounds, --strategies, --out; with `has_models`, --model."""
    parser = argparse.ArgumentParser(description=description)
    if has_models:
        parser.add_argument("--model", choices=list(MODELS), default=next(iter(MODELS)))
    parser.add_argument("--quick", action="store_true", help="the fewest scales, one round")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--strategies", nargs="+", help="only these (default: all)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    end_on_sigterm()  # servers go with the bench
    return options


def in_turn(names: Sequence[str], number: int) -> Iterable[str]:
    """The order of round `number`: every other one backwards, so that nobody is always first."""
    return names if number % 2 == 0 else reversed(names)
