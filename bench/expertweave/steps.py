"""Prefill and decode steps of real servers, compared finely enough to resolve one percent.

    Systems -> [fleet] -> Servers, all up, each scheduler on the same core, all but one stopped
    -> turns of a few steps, forth and back -> Point -> bench/common/sweep.py: ratios turn by turn

Two processes differ by more than weaving costs, and a shared machine drifts by more than that.
Therefore:

- All servers hold the same batch at the same time and decode it in short turns: SIGCONT, a few
  steps, SIGSTOP. A ratio is of two turns a fraction of a second apart.
- The median step of a turn counts, so an interrupted step does not.
- Beside the wall clock stands the processor time of the scheduler's process.
- One system runs twice (`... again`): what its ratio is off from 1 is the noise of the method.
- Servers keep the memory that they once had (ENVIRONMENT).
- A fleet is started several times, because where a process's memory lies lasts as long as it.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from sgl_esft.zoo import serving

NUM_STALE = 2  # tokens at the start of a turn: sent before the stop, and cut in two by it
SPARE_TOKENS = 16  # an event may bring two tokens at once, so a stream has fewer steps than tokens
WEIGHTS_ROUTE = "/update_weights_from_disk"  # a server has it when it is named
NEVER = 1 << 20  # a stream interval: the first token, then all at the end
FIRST_PLAIN_TOKEN = 3  # of the demo's tokenizer; those below are special

# Otherwise glibc gives a long prefill's buffers back to the kernel and takes them again, page fault
# by page fault. That was half the processor time of 1024 tokens, and differs between processes.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}


class StepError(Exception):
    """A server answered otherwise than a measurement needs; the message says which and what."""


@dataclass(frozen=True)
class System:
    """What is compared: a name, the launcher's arguments, and whose launcher; None: this one."""

    name: str
    arguments: tuple[str, ...]
    checkout: Path | None = None


@dataclass(frozen=True)
class Taken:
    """One step, in seconds: by the wall clock, and of the scheduler's processor time."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Server:
    """A healthy server whose scheduler runs only inside `turn`."""

    name: str
    url: str
    scheduler: int  # process id

    def cpu_seconds(self) -> float:
        """Processor time of the scheduler, all threads, to the nanosecond."""
        clock = (~self.scheduler << 3) | 2  # the kernel's name of another process's clock
        return time.clock_gettime(clock)

    @contextmanager
    def turn(self) -> Iterator[None]:
        os.kill(self.scheduler, signal.SIGCONT)
        try:
            yield
        finally:
            os.kill(self.scheduler, signal.SIGSTOP)

    def use_weights(self, checkpoint: Path) -> None:
        """Other weights of the same shape, by plain SGLang's own route."""
        body = json.dumps({"model_path": str(checkpoint)}).encode()
        request = urllib.request.Request(
            f"{self.url}{WEIGHTS_ROUTE}", body, {"Content-Type": "application/json"}
        )
        with self.turn(), urllib.request.urlopen(request, timeout=300) as response:
            reply = json.load(response)
        if not reply["success"]:
            raise StepError(f"{self.name} did not take {checkpoint}: {reply['message']}")


@dataclass(frozen=True)
class Lane:
    """A server and whose requests it is sent: an adapter's, or with None the model's own."""

    server: Server
    adapter: str | None = None


Lanes = Mapping[str, Lane]  # by the name of the system


@dataclass(frozen=True)
class Batch:
    """One prompt for each request, as token ids."""

    prompts: tuple[tuple[int, ...], ...]
    num_new_tokens: int

    def body(self, adapter: str | None) -> dict[str, object]:
        """The first request tells of every token, the others of their first and last."""
        common = {"temperature": 0, "max_new_tokens": self.num_new_tokens, "ignore_eos": True}
        sampling = [
            {**common, "stream_interval": 1 if index == 0 else NEVER}
            for index in range(len(self.prompts))
        ]
        body: dict[str, object] = {
            "input_ids": self.prompts,
            "sampling_params": sampling,
            "stream": True,
        }
        return body if adapter is None else {**body, "lora_path": [adapter] * len(self)}

    def __len__(self) -> int:
        return len(self.prompts)


def make_batch(
    size: int, num_tokens: int, num_new_tokens: int, vocabulary: int, seed: int
) -> Batch:
    """Random prompts."""
    draw = random.Random(seed)
    ids = range(FIRST_PLAIN_TOKEN, vocabulary)
    prompts = tuple(tuple(draw.choices(ids, k=num_tokens)) for _ in range(size))
    return Batch(prompts, num_new_tokens)


@dataclass
class Stream:
    """A batch on its way through a server. All methods need the server's turn."""

    lane: Lane
    batch: Batch
    output_ids: dict[int, list[int]] = field(default_factory=dict)  # by request, so far

    def __post_init__(self) -> None:
        self.server = self.lane.server
        address = self.server.url.removeprefix("http://")
        self._connection = http.client.HTTPConnection(address, timeout=600)
        body = json.dumps(self.batch.body(self.lane.adapter))
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/generate", body, headers)

    def open(self) -> None:
        """Wait for the answer's head."""
        self._response = self._connection.getresponse()
        if self._response.status != 200:
            raise self._failed(repr(self._response.read()[:500]))

    def start(self) -> None:
        """Until every request has its first token: from then on each step decodes all."""
        self.open()
        while len(self.output_ids) < len(self.batch):
            if self._next_request() is None:
                raise self._failed("ended before all requests had begun")

    def step(self) -> float:
        """The time at which the first request's next token is there."""
        while (request := self._next_request()) is not None:
            if request == 0:
                return time.perf_counter()
        raise self._failed(f"ended after {len(self.output_ids[0])} tokens")

    def steps(self, count: int) -> Taken:
        """The median of `count` decode steps, and their mean processor time."""
        for _ in range(NUM_STALE):
            last = self.step()
        cpu = self.server.cpu_seconds()
        walls = []
        for _ in range(count):
            now = self.step()
            walls.append(now - last)
            last = now
        return Taken(statistics.median(walls), (self.server.cpu_seconds() - cpu) / count)

    def finish(self) -> list[list[int]]:
        """Run to the end: every request's output tokens."""
        while self._next_request() is not None:
            pass
        self._connection.close()
        return [self.output_ids[index] for index in range(len(self.batch))]

    def _failed(self, reason: str) -> StepError:
        self._response.close()
        self._connection.close()
        return StepError(f"{self.server.name}: {reason}")

    def _next_request(self) -> int | None:
        """Index of the request that the next event tells of; None at the end."""
        while line := self._response.readline():
            if line.startswith(b"data: {"):
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise self._failed(str(event["error"]))
                index = int(event.get("index", 0))
                self.output_ids[index] = event["output_ids"]
                return index
        return None


# ---- starting ----


@contextmanager
def fleet(systems: Sequence[System]) -> Iterator[dict[str, Server]]:
    """All systems' servers by name, schedulers stopped, on the first core; the rest on the last.

    Raises serving.ServerError where one does not come up.
    """
    with ExitStack() as stack:
        stack.enter_context(_environment())
        contexts = [
            serving.server(system.arguments, checkout=system.checkout) for system in systems
        ]
        with ThreadPoolExecutor(len(systems)) as pool:
            entered = [pool.submit(stack.enter_context, context) for context in contexts]
            urls = [future.result() for future in entered]
        servers = {
            system.name: _settle(system.name, url)
            for system, url in zip(systems, urls, strict=True)
        }
        try:
            yield servers
        finally:
            for server in servers.values():  # a stopped process would not hear that it must end
                with suppress(ProcessLookupError):
                    os.kill(server.scheduler, signal.SIGCONT)


@contextmanager
def _environment() -> Iterator[None]:
    """What the servers inherit."""
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _settle(name: str, url: str) -> Server:
    cores = sorted(os.sched_getaffinity(0))
    processes = _processes(url)
    scheduler = next((p.pid for p in processes if "scheduler" in p.cmdline()[0]), None)
    if scheduler is None:
        raise StepError(f"{name} at {url} has no scheduler process among {processes}")
    for process in processes:
        _pin(process.pid, cores[0] if process.pid == scheduler else cores[-1])
    os.kill(scheduler, signal.SIGSTOP)
    return Server(name, url, scheduler)


def _processes(url: str) -> list[psutil.Process]:
    """The launcher, whose command line ends in its port, and all below it."""
    port = url.rpartition(":")[2]
    for process in psutil.Process().children():
        if _ends_in(process, port):
            return [process, *process.children(recursive=True)]
    raise StepError(
        f"what answers at {url} is no process of ours: ours has ended, and another server has "
        "its port; start again"
    )


def _ends_in(process: psutil.Process, word: str) -> bool:
    try:
        return process.cmdline()[-1:] == [word]
    except psutil.Error:  # it has ended
        return False


def _pin(process: int, core: int) -> None:
    for thread in Path(f"/proc/{process}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


def with_positions(checkpoint: Path, folder: Path, positions: int) -> Path:
    """`checkpoint` in `folder` with room for so many positions: links, and a config of its own.

    The small models are trained on short prompts. A longer one makes them talk nonsense, in the
    same time.
    """
    folder.mkdir(parents=True)
    for file in checkpoint.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    config = json.loads((checkpoint / "config.json").read_text())
    config["max_position_embeddings"] = positions
    config["rope_parameters"]["original_max_position_embeddings"] = positions
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---- measuring ----

Turns = dict[str, list[Taken]]  # system -> a step of each turn, in the order of the rounds
Outputs = dict[str, list[list[int]]]  # system -> output tokens of each request


@dataclass(frozen=True)
class Point:
    """All turns at one place of an axis, and whether the systems gave the same tokens."""

    turns: Turns
    num_equal: int
    num_compared: int


def in_turns(names: Sequence[str], round_idx: int) -> Sequence[str]:
    """Forth in one round, back in the next."""
    return names if round_idx % 2 else list(reversed(names))


def first_token(lane: Lane, batch: Batch) -> tuple[Taken, list[list[int]]]:
    """From the request to its first token: one prefill, and the way there and back."""
    server = lane.server
    with server.turn():
        cpu, start = server.cpu_seconds(), time.perf_counter()
        stream = Stream(lane, batch)
        stream.start()
        taken = Taken(time.perf_counter() - start, server.cpu_seconds() - cpu)
        return taken, stream.finish()


def measure_ttft(
    lanes: Lanes, batch_of: Callable[[int], Batch], seconds: float, rounds: int
) -> Point:
    """At least `rounds` prompts, the same one to each server in a round, for `seconds`."""
    turns: Turns = {name: [] for name in lanes}
    outputs: Outputs = {name: [] for name in lanes}
    for number in _rounds(seconds, rounds):
        for name in in_turns(list(lanes), number):
            taken, tokens = first_token(lanes[name], batch_of(number))
            outputs[name] += tokens
            if number:  # the first warms up
                turns[name].append(taken)
    return Point(turns, *_compare(outputs))


def measure_tpot(
    lanes: Lanes,
    batch_of: Callable[[int], Batch],
    seconds: float,
    batches: int,
    steps_per_turn: int,
) -> Point:
    """At least `batches` batches for `seconds`, each decoded by all servers in turns."""
    turns: Turns = {name: [] for name in lanes}
    outputs: Outputs = {name: [] for name in lanes}
    for number in _rounds(seconds, batches - 1):
        decoded = decode_in_turns(lanes, batch_of(number), steps_per_turn, turns)
        for name, tokens in decoded.items():
            outputs[name] += tokens
    return Point(turns, *_compare(outputs))


def decode_in_turns(lanes: Lanes, batch: Batch, steps_per_turn: int, turns: Turns) -> Outputs:
    """One batch on every server: its turns are appended to `turns`, its tokens returned."""
    streams = {name: _begin(lane, batch) for name, lane in lanes.items()}
    num_steps = batch.num_new_tokens - 1 - SPARE_TOKENS
    for number in range(num_steps // (steps_per_turn + NUM_STALE)):
        for name in in_turns(list(lanes), number):
            with lanes[name].server.turn():
                turns[name].append(streams[name].steps(steps_per_turn))
    outputs = {}
    for name, lane in lanes.items():
        with lane.server.turn():
            outputs[name] = streams[name].finish()
    return outputs


def _begin(lane: Lane, batch: Batch) -> Stream:
    with lane.server.turn():
        stream = Stream(lane, batch)
        stream.start()
        return stream


def _rounds(seconds: float, least: int) -> Iterator[int]:
    """0, 1, ... until `seconds` have passed; 0 and `least` more in any case."""
    end = time.monotonic() + seconds
    number = 0
    while number <= least or time.monotonic() < end:
        yield number
        number += 1


def _compare(outputs: Outputs) -> tuple[int, int]:
    """How many requests all systems answered with the same tokens, and of how many."""
    requests = list(zip(*outputs.values(), strict=True))
    return sum(all(other == first for other in rest) for first, *rest in requests), len(requests)
