"""Real workers: copies between them, clients that misbehave or die, and their own end."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sgl_elastic import wire
from sgl_elastic.errors import MemoryWorkerError, PeerCopyError
from sgl_elastic.memory import messages
from sgl_elastic.memory.client import DeviceClient
from sgl_elastic.memory.messages import Asked
from tests.fast.elastic.memory_proxy import channel_of
from tests.fast.elastic.memory_workers import (
    comes_to,
    count_fds,
    digests,
    expected_digests,
    fill,
    hmm_of,
    settle,
    stopped,
)

W13, W2 = "experts.0.w13", "experts.0.w2"
ASK_8 = messages.AskPages({W13: ((0, 8),)})


@pytest.fixture
def hmm(tmp_path):
    with hmm_of(tmp_path) as found:
        yield found


@pytest.fixture
def one(tmp_path):
    with hmm_of(tmp_path, num_devices=1) as found:
        yield found


def worker_fds(hmm, device_id=0):
    return count_fds(hmm.client(device_id).info.pid)


def test_slots_are_copied_between_workers_and_neighbours_stay(hmm):
    slots = {W13: [(0, 6)], W2: [(0, 6)], "trunk": [(0, 1)]}
    for device_id in (0, 1):
        hmm.client(device_id).map_slots(slots)
        fill(hmm, device_id, slots, seed=device_id)
    wanted = {W13: [(1, 1), (4, 1)], W2: [(2, 2)], "trunk": [(0, 1)]}
    client = hmm.client(1)
    client.mark_loaded(wanted, is_loaded=False)
    copied = client.copy_from(hmm.socket_path(0), wanted, verify=True)
    assert copied.slots == {name: tuple(runs) for name, runs in wanted.items()}
    sizes = {region.name: region.slot_bytes for region in hmm.shape().regions}
    assert copied.num_bytes == 2 * sizes[W13] + 2 * sizes[W2] + sizes["trunk"]
    expected = {**expected_digests(slots, seed=1), **expected_digests(wanted, seed=0)}
    assert digests(hmm, 1, slots) == expected
    assert digests(hmm, 0, slots) == expected_digests(slots, seed=0)
    assert client.copy_from(hmm.socket_path(0), wanted) == messages.Copied({}, 0)  # all are loaded


def test_crosswise_copies_do_not_wait_for_each_other(hmm):
    everything = {W13: [(0, 8)], W2: [(0, 8)]}
    halves = [{W13: [(0, 4)], W2: [(0, 4)]}, {W13: [(4, 4)], W2: [(4, 4)]}]
    for device_id in (0, 1):
        hmm.client(device_id).map_slots(everything)
        fill(hmm, device_id, halves[device_id])
    with ThreadPoolExecutor(2) as pool:
        copies = [
            pool.submit(hmm.client(to).copy_from, hmm.socket_path(1 - to), halves[1 - to])
            for to in (0, 1)
        ]
        for copy in copies:
            copy.result(timeout=10)
    assert digests(hmm, 0, everything) == digests(hmm, 1, everything)
    assert digests(hmm, 0, everything) == expected_digests(everything)


def test_copies_leave_no_descriptors_and_no_pages(hmm):
    slots = {W13: [(0, 8)]}
    for device_id in (0, 1):
        hmm.client(device_id).map_slots(slots)
    fill(hmm, 0, slots)
    hmm.client(1).copy_from(hmm.socket_path(0), slots)
    before = settle(lambda: [worker_fds(hmm, d) for d in (0, 1)])
    usage = hmm.usage()
    for _ in range(5):
        hmm.client(1).mark_loaded(slots, is_loaded=False)
        hmm.client(1).copy_from(hmm.socket_path(0), slots)
    assert comes_to(lambda: [worker_fds(hmm, d) for d in (0, 1)], before) == before
    assert hmm.usage() == usage


def test_content_that_is_missing_at_the_source_is_not_copied(hmm):
    for device_id in (0, 1):
        hmm.client(device_id).map_slots({W13: [(0, 2)]})
    hmm.client(0).mark_loaded({W13: [(0, 1)]})
    before = hmm.usage()
    with pytest.raises(PeerCopyError, match="no valid content"):
        hmm.client(1).copy_from(hmm.socket_path(0), {W13: [(0, 2)]})
    with pytest.raises(MemoryWorkerError, match="map them first"):
        hmm.client(1).copy_from(hmm.socket_path(0), {W13: [(3, 1)]})
    assert hmm.usage() == before
    hmm.remove_device(0)
    with pytest.raises(PeerCopyError, match="nobody answers"):
        hmm.client(1).copy_from(hmm.socket_path(0), {W13: [(0, 1)]})
    assert hmm.usage()[1] == before[1]


def test_all_pages_of_a_worker_travel_as_one_descriptor_and_only_once(one):
    one.client(0).map_slots({W13: [(0, 8)]})
    with contextlib.closing(raw_channel(one)) as channel:
        for number, num_new in ((1, 1), (2, 0)):
            channel.send(Asked("test", number, ASK_8))
            answered, fds = channel.receive()
            pages = answered.reply
            assert (len(fds), len(pages.exports), pages.is_last) == (num_new, 12 * num_new, True)
            assert [len(run.page_ids) for run in pages.runs] == [12]
            fds.close()


def raw_channel(hmm):
    return channel_of(wire.connect(hmm.socket_path(0), MemoryWorkerError, 5.0), messages.REPLIES)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"SGLE",
        b"\x00" * 100,
        b"SGLE\x01\x00\x00\x00\x01\x00\x00\x00\xc1",
    ],
)
def test_garbage_ends_that_connection_alone(one, garbage):
    client = one.client(0)
    with wire.connect(one.socket_path(0), MemoryWorkerError, 5.0) as sock:
        sock.sendall(garbage)
        sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    assert client.hello().device_id == 0


@pytest.mark.parametrize(
    ("number", "slots"),
    [(n, ((0, 1),)) for n in (0, -1, None, "1", 1.5)] + [(1, ((-1, 1),)), (1, ((0, 0),))],
)
def test_fields_out_of_range_end_that_connection_alone(one, number, slots):
    with contextlib.closing(raw_channel(one)) as channel:
        channel.send(Asked("test", number, messages.MapSlots({W13: slots})))
        with pytest.raises(MemoryWorkerError, match=r"closed|lost"):
            channel.receive()
    assert one.usage()[0].used_pages == 0


DYING_CLIENT = """
import os, signal, sys
from pathlib import Path
from sgl_elastic import wire
from sgl_elastic.errors import MemoryWorkerError
from sgl_elastic.memory import messages
import msgspec
sock = wire.connect(Path(sys.argv[1]), MemoryWorkerError, 5.0)
request = messages.MapSlots({"experts.0.w13": ((0, 4),)})
payload = msgspec.msgpack.encode(messages.Asked("test", 1, request))
message = wire._HEADER.pack(b"SGLE", 1, 0, len(payload)) + payload
sock.sendall(message[: int(sys.argv[2])])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("num_bytes", [5, 30])
def test_a_client_killed_in_the_middle_of_a_message_changes_nothing(one, num_bytes):
    fds = settle(lambda: worker_fds(one))
    command = [sys.executable, "-c", DYING_CLIENT, str(one.socket_path(0)), str(num_bytes)]
    assert subprocess.run(command, check=False, timeout=20).returncode == -signal.SIGKILL
    assert one.usage()[0].used_pages == 0
    assert comes_to(lambda: worker_fds(one), fds) == fds


def test_clients_that_vanish_while_pages_are_sent_leave_nothing_behind(one):
    one.client(0).map_slots({W13: [(0, 8)]})
    fds = settle(lambda: worker_fds(one))
    for _ in range(10):
        with contextlib.closing(raw_channel(one)) as channel:
            channel.send(Asked("test", 1, ASK_8))
    assert comes_to(lambda: worker_fds(one), fds) == fds
    assert one.client(0).hello().device_id == 0


def test_a_worker_that_hangs_or_is_dead_is_a_named_error_in_time(tmp_path):
    with hmm_of(tmp_path, num_devices=1, timeout_s=1.0) as hmm:
        client = hmm.client(0)
        with stopped(client.info.pid), pytest.raises(MemoryWorkerError, match=r"longer than 1 s"):
            client.usage()
        assert client.usage().used_pages == 0  # by a new connection to the same process
        os.kill(client.info.pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(MemoryWorkerError):
            client.map_slots({W13: [(0, 1)]})
        assert time.monotonic() - start < 2.0


def test_a_worker_that_was_started_again_is_refused(one):
    with DeviceClient(one.socket_path(0), 5.0) as client:
        one.remove_device(0)
        one.add_device(0)
        with contextlib.suppress(MemoryWorkerError):
            client.usage()  # finds the old connection broken; the next call makes a new one
        with pytest.raises(MemoryWorkerError, match="its memory is lost"):
            client.usage()


@pytest.mark.parametrize("by_signal", [True, False])
def test_sigint_is_ignored_and_sigterm_or_stop_ends_it(one, by_signal):
    client, process = one.client(0), one._workers[0].process
    os.kill(process.pid, signal.SIGINT)
    assert client.hello().pid == process.pid
    if by_signal:
        process.terminate()
    else:
        client.stop()
    assert process.wait(5) == 0
    assert not one.socket_path(0).exists()


PARENT = """
import subprocess, sys, os, time
child = subprocess.Popen([sys.executable, "-m", "sgl_elastic.memory.worker",
    "--socket", sys.argv[1], "--device-id", "0", "--page-bytes", "4096", "--budget-bytes", "40960",
    "--die-with-parent", str(os.getpid())])
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
sys.stdout.write(str(child.pid))
"""


def test_a_worker_dies_with_its_parent(tmp_path):
    path = tmp_path / "sockets" / "w.sock"
    command = [sys.executable, "-c", PARENT, str(path)]
    assert subprocess.run(command, capture_output=True, timeout=20, check=True).stdout
    assert comes_to(path.exists, False) is False


@pytest.mark.parametrize(
    ("mode", "more", "reasons"),
    [
        (0o700, ["--die-with-parent", "1"], [b"the parent is process"]),
        (0o755, [], [b"memory worker 4", b"chmod 700"]),
    ],
    ids=["its parent is another", "its directory is open"],
)
def test_a_worker_that_does_not_start_says_why(tmp_path, mode, more, reasons):
    (tmp_path / "s").mkdir(mode=mode)
    command = [sys.executable, "-m", "sgl_elastic.memory.worker", "--device-id", "4", *more]
    command += ["--socket", str(tmp_path / "s" / "w.sock"), "--budget-bytes", "4194304"]
    done = subprocess.run(command, capture_output=True, timeout=20, check=False)
    assert done.returncode == 1
    assert all(reason in done.stderr for reason in reasons)


def test_no_engine_is_imported():
    code = (
        "import sys, sgl_elastic.memory.worker, sgl_elastic.memory.control, "
        "sgl_elastic.memory.mapping\n"
        "sys.exit(str({m.partition('.')[0] for m in sys.modules} & "
        "{'torch', 'sglang', 'sgl_esft', 'numpy'}))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, timeout=20, check=False)
    assert done.stderr.strip() == b"set()"
