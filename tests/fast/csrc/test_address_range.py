"""Pages of one process at another's addresses: what an engine rank does with its worker's memory.

VirtualTensor.page_handles -> export, socket -> import -> AddressRange -> torch
"""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import sgl_vmm
import torch
from torch.utils.dlpack import from_dlpack

from tests.fast.csrc.simulator import CALLS, Simulator

PAGE = 64 << 10
NUM_SLOTS = 4
SLOT_BYTES = PAGE + PAGE // 2  # pages 0-1, 1-2, 3-4, 4-5
NUM_PAGES = 6

# It maps slots 0 and 2, sends the pages behind them, and then does what it is told: each command
# is a line, each answer another.
EXPORTER = f"""
import ctypes, os, socket, sys, sgl_vmm
name, library, fd = sys.argv[1:]
if library:
    ctypes.CDLL(library).sim_set_granularity(ctypes.c_size_t({PAGE}))
    backend = sgl_vmm.open_backend(name, library=library)
else:
    backend = sgl_vmm.open_backend(name, page_bytes={PAGE}, capacity_bytes={8 * PAGE})
tensor = sgl_vmm.VirtualTensor(sgl_vmm.PagePool(backend), {NUM_SLOTS}, {SLOT_BYTES})
tensor.map_slots(0, 1)
tensor.map_slots(2, 1)
connection = socket.socket(fileno=int(fd))
for handle in tensor.page_handles():
    connection.sendall(b"p" if handle else b"-")
    if handle:
        exported = backend.export_handle(handle)
        sgl_vmm.send_page(connection.fileno(), exported)
        if exported.fd >= 0:
            os.close(exported.fd)
for line in sys.stdin:
    command, offset, *data = line.split()
    address = tensor.address + int(offset)
    if command == "poke":
        backend.poke(address, data[0].encode())
        print("done", flush=True)
    else:
        print(backend.peek(address, int(data[0])).decode(), flush=True)
"""


@dataclass
class Exporter:
    """The other process, over its standard streams."""

    child: subprocess.Popen[str]
    handles: list[sgl_vmm.Handle | None]

    def ask(self, command: str) -> str:
        self.child.stdin.write(command + "\n")
        self.child.stdin.flush()
        return self.child.stdout.readline().rstrip("\n")


@contextmanager
def exporter(backend: sgl_vmm.Backend, library: str = "") -> Iterator[Exporter]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen(
            [sys.executable, "-c", EXPORTER, backend.name, library, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        with child:
            handles = [receive(ours, backend) for _ in range(NUM_PAGES)]
            yield Exporter(child, handles)
    assert child.returncode == 0


def receive(connection: socket.socket, backend: sgl_vmm.Backend) -> sgl_vmm.Handle | None:
    if connection.recv(1) != b"p":
        return None
    return backend.import_handle(sgl_vmm.receive_page(connection.fileno()))


def open_host(num_pages: int = 8) -> sgl_vmm.Backend:
    return sgl_vmm.open_backend("host", page_bytes=PAGE, capacity_bytes=num_pages * PAGE)


def check_two_processes(backend: sgl_vmm.Backend, library: str = "") -> None:
    with exporter(backend, library) as other:
        assert [bool(handle) for handle in other.handles] == [True, True, False, True, True, False]
        here = sgl_vmm.AddressRange(backend, NUM_SLOTS * SLOT_BYTES)
        assert (here.num_bytes, here.page_bytes) == (NUM_PAGES * PAGE, PAGE)
        imported = [handle for handle in other.handles if handle]
        for first_page, pages in ((0, imported[:2]), (3, imported[2:])):
            here.map(first_page, pages)
        slot_2 = 2 * SLOT_BYTES
        assert other.ask(f"poke {slot_2 + 5} theirs") == "done"
        assert backend.peek(here.address + slot_2 + 5, 6) == b"theirs"
        backend.poke(here.address + PAGE - 2, b"ours")  # over an edge
        assert other.ask(f"peek {PAGE - 2} 4") == "ours"
        backend.copy(here.address, here.address + slot_2 + 5, 6)
        assert other.ask("peek 0 6") == "theirs"
        del here
        for handle in imported:
            backend.destroy(handle)  # nothing of the range is left in their way
        assert other.ask("peek 0 6") == "theirs"


def test_two_processes_see_each_others_writes_on_the_host() -> None:
    check_two_processes(open_host())


@pytest.mark.parametrize("vendor", CALLS)
def test_two_processes_see_each_others_writes_over_a_simulator(
    vendor: str, simulators: dict[str, Path]
) -> None:
    simulator = Simulator(vendor, simulators[vendor])
    simulator.reset(PAGE)
    check_two_processes(simulator.open(), str(simulators[vendor]))
    gc.collect()
    assert simulator.live() == (0, 0, 0)


def test_a_parked_range_is_one_page_everywhere_until_it_is_attached() -> None:
    """The addresses, and the torch tensor over them, are the same all along."""
    backend = open_host()
    scratch = backend.create(PAGE)
    here = sgl_vmm.AddressRange(backend, NUM_PAGES * PAGE)
    here.map(0, [scratch] * NUM_PAGES)
    pages = from_dlpack(here.to_dlpack([NUM_PAGES, PAGE // 4], "int32"))
    pages[2] = 7
    assert bool((pages == 7).all())
    with exporter(backend) as other:
        imported = [handle for handle in other.handles if handle]
        here.unmap(0, 2)
        here.map(0, imported[:2])
        pages[:2] = 0x41414141
        assert (pages[1:3, 0].tolist(), other.ask("peek 0 4")) == ([0x41414141, 7], "AAAA")
        here.unmap(0, 2)
        here.map(0, [scratch] * 2)
        pages[0] = 8
        assert (int(pages[5, 0]), other.ask("peek 0 4")) == (8, "AAAA")


def test_a_mapped_page_is_refused_by_name() -> None:
    backend = open_host()
    here = sgl_vmm.AddressRange(backend, 3 * PAGE)
    page = backend.create(PAGE)
    here.map(1, [page])
    with pytest.raises(sgl_vmm.PageMappedError, match=r"page 1 of the range is mapped already"):
        here.map(0, [page, page])
    assert here.mapped_pages() == [False, True, False]


def test_a_torch_tensor_keeps_the_range_alive() -> None:
    backend = open_host()
    page = backend.create(PAGE)
    here = sgl_vmm.AddressRange(backend, PAGE, page_bytes=PAGE)
    here.map(0, [page])
    address = here.address
    backend.poke(address + 8, (5).to_bytes(8, "little"))
    tensor = from_dlpack(here.to_dlpack([2], "int64", offset_bytes=8))
    unread = here.to_dlpack([1], "uint8")
    del here
    gc.collect()
    assert (tensor.data_ptr(), int(tensor[0])) == (address + 8, 5)
    del unread
    gc.collect()
    with pytest.raises(sgl_vmm.PageMappedError):
        backend.destroy(page)
    del tensor
    gc.collect()
    backend.destroy(page)


DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_are_torchs(dtype: torch.dtype) -> None:
    backend = open_host()
    here = sgl_vmm.AddressRange(backend, PAGE)
    here.map(0, [backend.create(PAGE)])
    name = str(dtype).removeprefix("torch.")
    wanted = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    made = from_dlpack(here.to_dlpack([2, 3], name, offset_bytes=64))
    made.copy_(wanted)
    assert (made.dtype, made.shape, made.stride()) == (dtype, (2, 3), (3, 1))
    stored = backend.peek(here.address + 64, wanted.nbytes)
    assert stored == wanted.view(torch.uint8).numpy().tobytes()
    pool = sgl_vmm.PagePool(backend)
    tensor = sgl_vmm.VirtualTensor(pool, num_slots=2, slot_bytes=3 * wanted.itemsize)
    assert from_dlpack(tensor.to_dlpack([2, 3], name)).dtype == dtype


def test_a_tensor_outside_the_range_is_refused() -> None:
    here = sgl_vmm.AddressRange(open_host(), PAGE)
    for shape, dtype, offset_bytes in (
        ([PAGE + 1], "uint8", 0),
        ([1], "uint8", PAGE),
        ([1], "float32", 2),
        ([-1], "uint8", 0),
        ([1], "complex64", 0),
    ):
        with pytest.raises(sgl_vmm.InvalidArgumentError):
            here.to_dlpack(shape, dtype, offset_bytes)
    assert from_dlpack(here.to_dlpack([], "uint8", PAGE - 1)).shape == ()
    assert from_dlpack(here.to_dlpack([0, 4], "uint8", PAGE)).shape == (0, 4)
