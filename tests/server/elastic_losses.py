"""A device is lost under load, and taken back: common to tests of two devices and of four.

count, seed --[losses]--> Loss --[Ground.carry_out]--> Lived: what clients saw of it
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.elasticmoe.load import Stream
from bench.elasticmoe.traffic import tokens_in
from sgl_esft import zoo
from tests.server.elastic_faults import HANG_S, SOON_S, Elastic, recoveries
from tests.server.fault_cells import check_processes, is_idle
from tests.support.processes import open_files
from tests.support.servers import ServerSpec

KINDS = ("rank", "worker", "both")
RECOVERY_S = 60.0  # of the whole operation, which is over long after requests go on
SETTLE_S = 4.0  # what was lost of requests in flight is computed again first


@dataclass(frozen=True)
class Loss:
    """What is killed on which device, how long after the load has begun."""

    kind: str
    device_id: int
    delay_s: float


@dataclass(frozen=True)
class Lived:
    """What clients saw: seconds without a token of any stream, tokens a second over before."""

    silence_s: float
    rate_ratio: float


def losses(count: int, seed: int, num_devices: int) -> list[Loss]:
    """Each kind equally often, in an order of chance."""
    rng = random.Random(seed)
    kinds = [KINDS[i % len(KINDS)] for i in range(count)]
    rng.shuffle(kinds)
    return [Loss(kind, rng.randrange(num_devices), rng.random()) for kind in kinds]


@dataclass(frozen=True)
class Ground:
    """A server on all of its devices, and the standbys that are there before a loss.

    `window_s` is how long its rate is counted for, before a loss and after it; 0 for not at all.
    """

    num_devices: int
    standbys: Sequence[tuple[int, ...]] = ()
    args: tuple[str, ...] = ()
    window_s: float = 0.0

    @property
    def spec(self) -> ServerSpec:
        size = str(self.num_devices)
        devices = ("--elastic", "--max-devices", size, "--dp-size", size)
        more = ("--device-memory", "64MiB", "--hang-timeout", str(HANG_S))
        return ServerSpec(args=(*devices, *more, *self.args))

    def stand_by(self, elastic: Elastic) -> None:
        """All devices serve, and the standbys are there."""
        elastic.wait_for(lambda: is_idle(elastic), RECOVERY_S)
        elastic.be_of_size(self.num_devices)
        for device_ids in self.standbys:
            elastic.wait_for_standby(*device_ids)
        elastic.wait_for(lambda: is_idle(elastic), RECOVERY_S)

    def carry_out(self, elastic: Elastic, loss: Loss) -> Lived:
        """One loss under load, then all that must hold."""
        self.stand_by(elastic)
        before, edges = elastic.mapped_slots(), edge_slots(elastic)
        known_fds = fds_of(elastic)
        lived = self._lose(elastic, loss)
        print(f"{loss}: {lived}")  # noqa: T201
        assert lived.silence_s < SOON_S
        with elastic.load():
            elastic.be_of_size(self.num_devices)
        self.stand_by(elastic)
        check_slots(elastic.mapped_slots(), before, edges)
        check_processes(elastic)
        check_fds(elastic, known_fds)
        return lived

    def _lose(self, elastic: Elastic, loss: Loss) -> Lived:
        known = recoveries(elastic)
        with elastic.load() as streams:
            time.sleep(self.window_s + loss.delay_s)
            killed_s = kill(elastic, loss)
            elastic.wait_for(lambda: recoveries(elastic) != known and is_idle(elastic), RECOVERY_S)
            settled_s = time.monotonic() + SETTLE_S
            if self.window_s:
                time.sleep(SETTLE_S + self.window_s)
        every = range(self.num_devices)
        left = [d for d in every if d != loss.device_id or loss.kind == "rank"]
        assert elastic.placement()["device_ids"] == left
        before, after = (
            tokens_in(streams, began_s, began_s + self.window_s)
            for began_s in (killed_s - self.window_s, settled_s)
        )
        return Lived(longest_silence_s(streams, killed_s), after / max(before, 1e-9))


def kill(elastic: Elastic, loss: Loss) -> float:
    """When."""
    name, _ = elastic.instances()
    pids = []
    if loss.kind != "worker":
        pids.append(elastic.rank(name, loss.device_id))
    if loss.kind != "rank":
        pids.append(elastic.worker(loss.device_id))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def longest_silence_s(streams: Sequence[Stream], since_s: float) -> float:
    """How long no stream got a token, after this moment or across it."""
    times = sorted(at for stream in streams for at in stream.token_s)
    return max(b - a for a, b in itertools.pairwise(times) if b > since_s)


def edge_slots(elastic: Elastic) -> int:
    """KV slots that two layouts of the same experts may differ by: a page in each region of each.

    Experts that are neighbours share the page at their edge, so that where experts have moved a
    device may have a page less for KV, and each KV region then ends a page earlier.
    """
    num_regions = json.loads((zoo.base_path() / "config.json").read_text())["num_hidden_layers"]
    usages = elastic.usages()
    per_page = [usage.mapped_slots["kv"] // usage.pages["kv"] + 1 for usage in usages]
    return int(num_regions * sum(per_page))


def check_slots(found: Counter[str], before: Counter[str], edges: int) -> None:
    """Experts and trunk as before, and KV but for pages at experts' edges."""
    words = f"slots with pages: {found}, before the loss: {before}, at edges: {edges}"
    assert {**found, "kv": 0} == {**before, "kv": 0}, words
    assert abs(found["kv"] - before["kv"]) <= edges, words


def check_fds(elastic: Elastic, known: Counter[str]) -> None:
    """The front has nothing open that it had not, soon."""
    deadline = time.monotonic() + SOON_S
    while more := fds_of(elastic) - known:
        assert time.monotonic() < deadline, f"open since the loss: {more}"
        time.sleep(0.05)


def fds_of(elastic: Elastic) -> Counter[str]:
    """What the front has open, but for the numbers of sockets and pipes."""
    return Counter(
        re.sub(r"\[?\d+\]?", "", target) for target in open_files(elastic.server.process.pid)
    )
