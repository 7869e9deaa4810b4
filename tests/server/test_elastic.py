"""A live server changes its number of devices under load, and nobody notices.

One elastic server for the whole file, its checkpoint deleted once it serves: whatever comes later
comes from memory. What is right is what a static server answers.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import requests

from bench.elasticmoe.load import Ask, Stream, differences, make_asks, scale, steady
from sgl_esft import zoo
from tests.repo.docs import session
from tests.repo.docs.blocks import pages_run_with, run_blocks
from tests.server.scaling import wait_until_idle
from tests.support import browser as browsers
from tests.support.browser import Dashboard
from tests.support.processes import assert_gone, command_line, family
from tests.support.servers import Server, ServerPool, ServerSpec

pytestmark = [pytest.mark.server, pytest.mark.alone]

LATER = "sum"  # loaded while the server runs
FIRST = tuple(name for name in zoo.adapter_paths() if name != LATER)
MAX_DEVICES = 3
DEVICE_MEMORY = 64 << 20
NUM_STREAMS = 400
MANY_STREAMS = 1000
STANDBYS_S = 300.0
LONGEST_STEP_S = 1.0  # between two tokens on a busy machine, whatever the scale does

Expected = Mapping[Ask, tuple[int, ...]]


@pytest.fixture(scope="module")
def asks() -> list[Ask]:
    return make_asks(FIRST, 60, range(8, 25))


@pytest.fixture(scope="module")
def long_asks() -> list[Ask]:
    """Streams that last longer than a switch does."""
    return make_asks(FIRST, 30, range(150, 200), seed=3)


@pytest.fixture(scope="module")
def later_asks() -> list[Ask]:
    return make_asks([LATER], 12, range(8, 25), seed=1)


@pytest.fixture(scope="module")
def constrained() -> list[Ask]:
    """Long answers that a grammar spells out: a hand-over must bring the grammar's state too."""
    asks = make_asks(FIRST, 4, range(160, 161), seed=2)
    return [replace(ask, regex="([a-f]{3}[0-4]){40}") for ask in asks]


@pytest.fixture(scope="module")
def expected(
    server_pool: ServerPool,
    asks: list[Ask],
    long_asks: list[Ask],
    later_asks: list[Ask],
    constrained: list[Ask],
) -> Expected:
    static = server_pool.get(ServerSpec())
    streams = asyncio.run(steady(static.url, [*asks, *long_asks, *later_asks, *constrained], 8))
    assert not [stream.error for stream in streams if stream.error]
    return {stream.ask: stream.output_ids for stream in streams}


@pytest.fixture(scope="module")
def later_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("later") / LATER
    shutil.copytree(zoo.adapter_paths()[LATER], folder)
    return folder


@pytest.fixture(scope="module")
def elastic(tmp_path_factory: pytest.TempPathFactory, expected: Expected) -> Iterator[Server]:
    with started(tmp_path_factory.mktemp("elastic"), MAX_DEVICES) as server:
        yield server


@contextmanager
def started(folder: Path, max_devices: int) -> Iterator[Server]:
    """A server whose files are gone, with standbys of every size; afterwards it is gone too."""
    base = shutil.copytree(zoo.base_path(), folder / "base")
    adapters = {name: shutil.copytree(zoo.adapter_paths()[name], folder / name) for name in FIRST}
    sizes = range(2, max_devices + 1)
    args = ("--elastic", "--max-devices", str(max_devices), "--max-adapters", "6")
    args += ("--standby-ranks", str(sum(sizes)), "--max-experts-per-adapter", "8")
    args += ("--device-memory", f"{DEVICE_MEMORY}B", "--adapter-memory", "12MiB")
    server = Server(ServerSpec(base, tuple(adapters.items()), args), folder / "log")
    try:
        server.wait_until_ready()
        for weights in folder.rglob("*.safetensors"):
            weights.unlink()
        wait_for_standbys(server, set(sizes))
        yield server
    finally:
        pids = family(server.process.pid)
        server.stop()
        assert_gone(pids)


def instances(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = requests.get(f"{server.url}/v1/instances", timeout=30).json()[
        "instances"
    ]
    return found


def wait_for_standbys(server: Server, sizes: set[int]) -> None:
    deadline = time.monotonic() + STANDBYS_S
    while time.monotonic() < deadline:
        parked = {len(i["device_ids"]) for i in instances(server) if i["state"] == "parked"}
        if sizes <= parked:
            return
        time.sleep(0.5)
    raise AssertionError(f"no standbys of {sizes}: {instances(server)}\n{server.log()}")


def worker_bytes(server: Server) -> dict[int, int]:
    """Bytes that the operating system counts behind each device's memory."""
    found = {}
    for pid in family(server.process.pid):
        words = command_line(pid)
        if "sgl_elastic.memory.worker" in words:
            device_id = int(words[words.index("--device-id") + 1])
            found[device_id] = memfd_bytes(pid)
    return found


def memfd_bytes(pid: int) -> int:
    files = {}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "memfd:" in str(fd.readlink()):
                info = fd.stat()
                files[info.st_ino] = info.st_blocks * 512
        except OSError:
            continue
    return sum(files.values())


@dataclass
class Walk:
    """What was seen of a server that was scaled again and again under load."""

    streams: list[Stream] = field(default_factory=list)
    operations: list[dict[str, Any]] = field(default_factory=list)
    capacities: list[list[int]] = field(default_factory=list)  # after each, by rank: KV tokens
    most_bytes: int = 0  # of any device


async def scale_under_load(
    server: Server,
    asks: Sequence[Ask],
    sizes: Sequence[int],
    num_streams: int,
    *,
    reads_loads: bool = True,
) -> Walk:
    """Scale to each of the sizes while requests run; ranks on other nodes tell no loads here."""
    stop = asyncio.Event()
    load = asyncio.create_task(steady(server.url, asks, 6, stop))
    walk = Walk()
    for size in sizes:
        await asyncio.sleep(1)
        walk.operations.append(await scale(server.url, {"dp_size": size}))
        used = await asyncio.to_thread(worker_bytes, server)
        walk.most_bytes = max([walk.most_bytes, *used.values()])
        if reads_loads:
            walk.capacities.append(await asyncio.to_thread(kv_capacities, server, size))
    while count_finished(load) < num_streams and not load.done():
        await asyncio.sleep(0.2)
    stop.set()
    walk.streams = await load
    return walk


def kv_capacities(server: Server, num_ranks: int) -> list[int]:
    """KV tokens of each rank, as SGLang's own schedulers write them down with each batch.

    Where they do not say yet what the server does, they have some batches' time to.
    """
    deadline = time.monotonic() + 10
    while True:
        loads = requests.get(f"{server.url}/v1/loads", timeout=30).json()["loads"]
        told = [load["max_total_num_tokens"] for load in loads]
        if told == serving(server)["kv_tokens"] or time.monotonic() > deadline:
            assert [load["dp_rank"] for load in loads] == list(range(num_ranks))
            return told
        time.sleep(0.1)


def count_finished(load: asyncio.Task[list[Stream]]) -> int:
    """Streams of a running `steady`, read off its frame: it returns them only at its end."""
    frame = load.get_coro().cr_frame  # type: ignore[union-attr]
    return len(frame.f_locals["streams"]) if frame is not None else 0


def assert_all_equal(streams: Sequence[Stream], expected: Expected) -> None:
    assert not [stream.error for stream in streams if stream.error]
    assert not differences(streams, expected)


def test_every_answer_is_that_of_a_static_server(
    elastic: Server, asks: list[Ask], long_asks: list[Ask], expected: Expected
) -> None:
    """Up and down, sixteen experts over three devices included."""
    check_scales(elastic, mixed(asks, long_asks), expected, (2, 3, 2, 1))


@pytest.mark.full
def test_every_answer_on_four_devices(
    asks: list[Ask], long_asks: list[Ask], expected: Expected, tmp_path: Path
) -> None:
    """Up and down by one, two and three devices, under a thousand streams."""
    with started(tmp_path, 4) as server:
        sizes = (2, 3, 2, 1, 2, 4, 1)
        check_scales(server, mixed(asks, long_asks), expected, sizes, MANY_STREAMS)


def mixed(asks: Sequence[Ask], long_asks: Sequence[Ask]) -> list[Ask]:
    """A long one after every two others, so that at any time some are running."""
    threes = zip(asks[::2], asks[1::2], long_asks, strict=True)
    return [ask for three in threes for ask in three]


def check_scales(
    server: Server,
    asks: list[Ask],
    expected: Expected,
    sizes: Sequence[int],
    num_streams: int = NUM_STREAMS,
) -> None:
    before = kv_capacities(server, 1)
    walk = asyncio.run(scale_under_load(server, asks, sizes, num_streams))
    states = [operation["state"] for operation in walk.operations]
    assert states == ["succeeded"] * len(sizes), walk.operations
    assert len(walk.streams) >= num_streams
    assert_all_equal(walk.streams, expected)
    assert_spanning(walk.streams, walk.operations)
    assert walk.most_bytes <= DEVICE_MEMORY * 1.03
    capacities = [before, *walk.capacities]
    for operation, (old, new) in zip(walk.operations, pairwise(capacities), strict=True):
        assert_as_planned(operation, old, new)


def assert_spanning(streams: Sequence[Stream], operations: Sequence[Mapping[str, Any]]) -> None:
    """By each operation's own times: streams ran across its switch, and their KV went with them."""
    assert len({stream.ask.adapter for stream in streams}) == len(FIRST) + 1
    for operation in operations:
        began_s, ended_s = switch_of(operation)
        crossing = [s for s in streams if s.token_s[0] < began_s and s.token_s[-1] > ended_s]
        assert crossing, f"no stream ran before and after the switch of {operation}"
        assert_held_briefly(crossing, operation, began_s, ended_s)
        assert_handed_over(crossing, operation, began_s)
    copied = [operation["handover"]["copied_kv_slots"] for operation in operations]
    assert any(copied), "no leaving device had a request with tokens, at any of the scales"


def switch_of(operation: Mapping[str, Any]) -> tuple[float, float]:
    """When the switch began and ended, by this process's monotonic clock."""
    offset_s = time.monotonic() - time.time()
    phases = [phase for phase in operation["phases"] if phase["name"] == "switch"]
    ended_s = phases[-1]["began_s"] + phases[-1]["seconds"]
    return phases[0]["began_s"] + offset_s, ended_s + offset_s


def assert_held_briefly(
    crossing: Sequence[Stream], operation: Mapping[str, Any], began_s: float, ended_s: float
) -> None:
    """No stream waits much longer for its next token than the operation says it held requests."""
    assert 0 < operation["gap_s"] <= ended_s - began_s
    for stream in crossing:
        over = [seconds for at_s, seconds in stream.gaps_s if at_s - seconds < ended_s < at_s + 1]
        assert max(over) < operation["gap_s"] + LONGEST_STEP_S, (stream, operation)


def assert_handed_over(
    crossing: Sequence[Stream], operation: Mapping[str, Any], began_s: float
) -> None:
    """KV slots as the ranks counted them are at least the tokens that clients had by then."""
    found = operation["handover"]
    assert found["num_requests"] >= 1
    had: dict[Ask, int] = {}  # streams of the same ask may share their slots
    for stream in crossing:
        num_tokens = sum(at_s < began_s for at_s in stream.token_s)
        had[stream.ask] = max(had.get(stream.ask, 0), num_tokens)
    assert found["frozen_kv_slots"] >= sum(had.values())
    taken = found["kept_kv_slots"] + found["copied_kv_slots"]
    leaving = {*operation["plan"]["old"]["device_ids"]} - {*operation["plan"]["new"]["device_ids"]}
    if leaving:  # where none of its requests had tokens, nothing is copied
        assert sum(had.values()) <= taken <= found["frozen_kv_slots"]
    else:
        assert found["kept_kv_slots"] == found["frozen_kv_slots"]
        assert found["copied_kv_slots"] == 0


def assert_as_planned(
    operation: Mapping[str, Any], old_capacities: list[int], new_capacities: list[int]
) -> None:
    """`..._capacities`: what the ranks had before and have now."""
    plan = operation["plan"]
    copied: Counter[tuple[int, int]] = Counter()  # by link, as the memory workers counted
    for step in operation["steps"]:
        if step["copied_bytes"]:
            copied[step["source_id"], step["device_id"]] += step["copied_bytes"]
    links = {(link["source_id"], link["device_id"]): link["num_bytes"] for link in plan["links"]}
    assert copied == links
    assert copied.total() == plan["copied_bytes"]
    old, new = plan["old"], plan["new"]
    assert len(old["device_ids"]) == len(old_capacities)
    counts = [new["homes"].count(device) for device in new["device_ids"]]
    assert max(counts) - min(counts) <= 2  # whole groups of two experts
    assert new["kv_tokens"] == new_capacities
    wider = len(new_capacities) > len(old_capacities)
    assert (new_capacities[0] > old_capacities[0]) == wider  # freed experts become KV


def test_an_adapter_loaded_at_one_size_is_there_at_another(
    elastic: Server, later_folder: Path, later_asks: list[Ask], expected: Expected
) -> None:
    assert asyncio.run(scale(elastic.url, {"dp_size": 2}))["state"] == "succeeded"
    response = elastic.load(LATER, later_folder)
    assert response.status_code == 200, response.text
    shutil.rmtree(later_folder)
    for size in (3, 1, 2):
        assert asyncio.run(scale(elastic.url, {"dp_size": size}))["state"] == "succeeded"
        assert_all_equal(asyncio.run(steady(elastic.url, later_asks, 4)), expected)
    assert elastic.unload(LATER).status_code == 200
    assert asyncio.run(scale(elastic.url, {"dp_size": 1}))["state"] == "succeeded"
    refused = elastic.post("/generate", {"text": "a", "adapter": LATER})
    assert refused.status_code == 404, refused.text


@pytest.mark.parametrize("page", pages_run_with("elastic server"))
def test_the_documents_commands(elastic: Server, page: str, tmp_path: Path) -> None:
    steps = session.steps_of(run_blocks(page))
    assert session.run(steps, tmp_path, f"127.0.0.1:{elastic.port}") == []
    wait_until_idle(elastic)
    shown = requests.get(f"{elastic.url}/v1/scale?limit=1", timeout=30).json()
    assert shown["operations"][0]["state"] == "succeeded", shown["operations"][0]
    assert asyncio.run(scale(elastic.url, {"dp_size": 1}))["state"] == "succeeded"


def test_a_replaced_adapter_is_the_new_version_at_another_size(
    elastic: Server, asks: list[Ask], later_asks: list[Ask], expected: Expected
) -> None:
    name = FIRST[0]
    later = [ask for ask in later_asks if ask.adapter == LATER]
    renamed = {replace(ask, adapter=name): expected[ask] for ask in later}
    replace_adapter(elastic, name, LATER)
    for size in (2, 1):
        assert asyncio.run(scale(elastic.url, {"dp_size": size}))["state"] == "succeeded"
        assert_all_equal(asyncio.run(steady(elastic.url, list(renamed), 4)), renamed)
    replace_adapter(elastic, name, name)
    own = [ask for ask in asks if ask.adapter == name]
    assert_all_equal(asyncio.run(steady(elastic.url, own, 4)), expected)


def replace_adapter(server: Server, name: str, version: str) -> None:
    """Give a loaded adapter the content of another of the demo's."""
    response = requests.patch(
        f"{server.url}/v1/adapters/{name}?wait=true",
        json={"path": str(zoo.adapter_paths()[version])},
        timeout=60,
    )
    assert response.status_code == 200, response.text


def test_a_grammar_goes_on_across_a_scale(
    elastic: Server, constrained: list[Ask], expected: Expected
) -> None:
    streams, began_s, ended_s = asyncio.run(scale_amid(elastic, constrained, 2))
    spanning = [s for s in streams if s.token_s[0] < began_s and s.token_s[-1] > ended_s]
    assert spanning, "no stream ran before and after the scale"
    assert_all_equal(streams, expected)
    assert asyncio.run(scale(elastic.url, {"dp_size": 1}))["state"] == "succeeded"


async def scale_amid(
    server: Server, asks: Sequence[Ask], size: int
) -> tuple[list[Stream], float, float]:
    """All asks at once, and a scale after half a second; its begin and end."""
    load = asyncio.create_task(steady(server.url, asks, len(asks)))
    await asyncio.sleep(0.5)
    began_s = time.monotonic()
    operation = await scale(server.url, {"dp_size": size})
    ended_s = time.monotonic()
    assert operation["state"] == "succeeded", operation
    return await load, began_s, ended_s


def test_a_chosen_device_leaves(elastic: Server, asks: list[Ask], expected: Expected) -> None:
    assert asyncio.run(scale(elastic.url, {"dp_size": 2}))["state"] == "succeeded"
    operation = asyncio.run(scale(elastic.url, {"dp_size": 1, "leave": [0]}))
    assert operation["state"] == "succeeded", operation
    assert operation["plan"]["new"]["device_ids"] == [1]
    assert_all_equal(asyncio.run(steady(elastic.url, asks[:12], 4)), expected)
    back = asyncio.run(scale(elastic.url, {"dp_size": 1, "device_ids": [0]}))
    assert back["state"] == "succeeded", back


def test_the_same_key_applies_once(elastic: Server) -> None:
    body, headers = {"dp_size": 2}, {"Idempotency-Key": "once"}
    first = requests.post(f"{elastic.url}/v1/scale", json=body, headers=headers, timeout=30)
    again = requests.post(f"{elastic.url}/v1/scale", json=body, headers=headers, timeout=30)
    assert first.status_code == again.status_code == 202
    assert first.json()["id"] == again.json()["id"]
    wait_until_idle(elastic)
    other = requests.post(
        f"{elastic.url}/v1/scale", json={"dp_size": 3}, headers=headers, timeout=30
    )
    assert other.status_code == 409
    assert other.json()["error"]["type"] == "KeyReusedError"


def test_a_second_scale_meanwhile_is_refused(elastic: Server, long_asks: list[Ask]) -> None:
    """The first one drains, so it lasts at least as long as a stream that is being answered."""
    found = asyncio.run(scale_twice(elastic, long_asks[0]))
    assert found.status == 409
    assert found.error["type"] == "BusyError"
    assert found.first["id"] in found.error["message"]
    assert found.was_running_after, "the first scale had ended: the second was not meanwhile"
    wait_until_idle(elastic)


@dataclass(frozen=True)
class SecondScale:
    """What became of a scale that was asked for while another ran."""

    first: Mapping[str, Any]
    status: int
    error: Mapping[str, Any]
    was_running_after: bool


async def scale_twice(server: Server, ask: Ask) -> SecondScale:
    size = 3 - len(serving(server)["device_ids"])  # of one and two devices the other
    load = asyncio.create_task(steady(server.url, [ask], 1))
    await asyncio.sleep(0.2)
    first = await asyncio.to_thread(server.post, "/v1/scale", {"dp_size": size, "drain": True})
    assert first.status_code == 202, first.text
    second = await asyncio.to_thread(server.post, "/v1/scale", {"dp_size": 3})
    newest = await asyncio.to_thread(newest_scale, server)
    await load
    return SecondScale(
        first=first.json(),
        status=second.status_code,
        error=second.json().get("error", {}),
        was_running_after=newest["state"] in ("pending", "running"),
    )


def test_a_dry_run_changes_nothing_and_nonsense_is_refused(elastic: Server) -> None:
    before = instances(elastic)
    dry = elastic.post("/v1/scale", {"dp_size": MAX_DEVICES, "dry_run": True})
    assert dry.status_code == 200
    assert len(dry.json()["new"]["device_ids"]) == MAX_DEVICES
    for body in (
        {"dp_size": 0},
        {"dp_size": MAX_DEVICES + 1},
        {"dp_size": 2, "leave": [9]},
        {"size": 2},
    ):
        assert elastic.post("/v1/scale", body).status_code in (400, 422), body
    assert instances(elastic) == before


def test_the_page_shows_devices_and_scales(elastic: Server) -> None:
    """No asyncio.run while the browser is open: see tests/support/browser.py."""
    before = len(serving(elastic)["device_ids"])
    size = 3 - before  # of one and two devices the other
    with browsers.opened() as browser:
        board = Dashboard(browser, elastic.url).open()
        board.until_text("#devices", str(before))
        board.page.fill("#scale-form [name=dp_size]", str(size))
        board.page.press("#scale-form [name=dp_size]", "Enter")  # a dry run
        board.until_text("#scale-plan", "Nothing was done")
        assert len(serving(elastic)["device_ids"]) == before
        board.page.click("#scale-start")
        board.page.click("#confirm-yes")
        # The newest operation before was another, perhaps of the same sizes.
        board.until(lambda: len(serving(elastic)["device_ids"]) == size, "devices")
        board.until(lambda: newest_scale(elastic)["state"] == "succeeded", "succeeded")
        operation = newest_scale(elastic)
        placement = serving(elastic)
        board.until_text("#devices", str(size))
        cells = [len(placement["homes"]) * size, len(placement["homes"])]
        shown_cells = ("#placement .cell", "#placement .home")
        board.until(lambda: [board.count(each) for each in shown_cells] == cells, "experts")
        shown = [f"{tokens:,} KV tokens" for tokens in placement["kv_tokens"]]
        board.until(lambda: all(each in board.text("#placement") for each in shown), "KV tokens")
        newest = "#operations li:first-child"
        board.until(lambda: f"{before} → {size}" in board.text(newest), "the newest operation")
        told = [len(operation["steps"]), len(operation["phases"])]
        shown_rows = (f"{newest} tbody tr", f"{newest} .phase")
        board.until(lambda: [board.count(each) for each in shown_rows] == told, "steps, phases")
        # This server has no metrics, and a browser itself complains of a 404.
        assert [each for each in board.complaints if "404 (Not Found)" not in each] == []


def newest_scale(server: Server) -> dict[str, Any]:
    (operation,) = requests.get(f"{server.url}/v1/scale?limit=1", timeout=30).json()["operations"]
    return dict(operation)


def serving(server: Server) -> dict[str, Any]:
    found = requests.get(f"{server.url}/v1/instances", timeout=30).json()["serving"]["placement"]
    return dict(found)


def test_vllm_clients_scale_too(elastic: Server, asks: list[Ask], expected: Expected) -> None:
    answer = elastic.post("/scale_elastic_ep", {"new_data_parallel_size": 1, "drain_timeout": 60})
    assert answer.status_code == 200, answer.text
    assert elastic.post("/is_scaling_elastic_ep", {}).json()["is_scaling_elastic_ep"] is False
    assert_all_equal(asyncio.run(steady(elastic.url, asks[:12], 4)), expected)


@dataclass(frozen=True)
class Held:
    """What a server's front and workers hold: descriptors, threads, processes, device pages."""

    num_fds: int
    num_threads: int
    num_processes: int
    device_bytes: int
    rss_bytes: int

    @classmethod
    def by(cls, server: Server) -> Held:
        front = Path(f"/proc/{server.process.pid}")
        status = dict(
            line.split(":", 1)
            for line in (front / "status").read_text().splitlines()
            if ":" in line
        )
        return cls(
            num_fds=len(list((front / "fd").iterdir())),
            num_threads=int(status["Threads"]),
            num_processes=len(family(server.process.pid)),
            device_bytes=sum(worker_bytes(server).values()),
            rss_bytes=int(status["VmRSS"].split()[0]) << 10,
        )


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_fifty_random_scalings_leave_nothing_behind(
    elastic: Server, asks: list[Ask], expected: Expected
) -> None:
    """Standbys of every size are parked from the start: processes come and go only by scaling."""
    rng = random.Random(0)
    # The first instance loads its adapters itself, and what is left for KV may differ by a page.
    for size in (2, 1):
        assert asyncio.run(scale(elastic.url, {"dp_size": size}))["state"] == "succeeded"
    wait_for_standbys(elastic, {2, 3})
    before = Held.by(elastic)
    sizes = [rng.randint(1, MAX_DEVICES) for _ in range(49)] + [1]
    walk = asyncio.run(scale_under_load(elastic, asks, sizes, MANY_STREAMS))
    states = {operation["state"] for operation in walk.operations}
    assert states == {"succeeded"}, walk.operations
    assert_all_equal(walk.streams, expected)
    wait_for_standbys(elastic, {2, 3})
    after = Held.by(elastic)
    assert after.num_fds <= before.num_fds + 4  # connections that clients have just left
    assert after.num_threads <= before.num_threads + 2
    assert after.num_processes == before.num_processes
    assert after.device_bytes == before.device_bytes
    assert after.rss_bytes <= before.rss_bytes * 1.1
