"""An expert's rows are safetensors' tensors bit for bit; whatever goes wrong is named."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sgl_esft.errors import AdapterNotFiniteError, ExpertReadError, InvariantError
from sgl_esft.formats.manifest import read_manifest
from sgl_esft.formats.model_spec import DTYPE_BYTES, PROJS
from sgl_esft.offload import reader as reader_module
from sgl_esft.offload import source as source_module
from sgl_esft.offload.pack import ALIGNMENT, pack_experts
from sgl_esft.offload.reader import ExpertReader, Throttle
from sgl_esft.offload.source import ExpertPlace, ExpertSource
from tests.fast.conftest import SMALL
from tests.fast.offload.test_source import (
    EXPERTS,
    SIZES,
    as_bytes,
    copied,
    load,
    registered,
    replace_by_copy,
    write_model,
)
from tests.support.adapter_factory import write_random_adapter, write_random_base

WIDTH = SIZES["moe_intermediate_size"]
HIDDEN = SIZES["hidden_size"]
WHOLE = range(WIDTH)
HALVES = [range(WIDTH // 2), range(WIDTH // 2, WIDTH)]
NAN = float("nan")

Rows = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By dtype: a base in one file, packed too, and an adapter. Not to be written to."""
    roots = {dtype: tmp_path_factory.mktemp(dtype) for dtype in DTYPE_BYTES}
    for dtype, root in roots.items():
        write_model(root, dtype, num_shards=1)
        pack_experts(root / "base", root / "packed")
    return roots


@pytest.fixture
def root(models: dict[str, Path]) -> Path:
    return models["bfloat16"]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one projection is several pieces."""
    monkeypatch.setattr(reader_module, "PIECE_BYTES", 2 * ALIGNMENT)


def page_aligned(shape: tuple[int, int], dtype: torch.dtype, shift: int = 0) -> torch.Tensor:
    """Memory that begins `shift` bytes after a page does; no value in it is an expert's."""
    num_bytes = shape[0] * shape[1] * dtype.itemsize
    memory = mmap.mmap(-1, shift + num_bytes)
    memory.write(b"\x5a" * len(memory))
    return torch.frombuffer(memory, dtype=dtype, offset=shift).view(shape)


def rows_for(width: range, dtype: torch.dtype, hidden: int = HIDDEN, shift: int = 0) -> Rows:
    w13 = page_aligned((2 * len(width), hidden), dtype, shift)
    return w13, page_aligned((hidden, len(width)), dtype, shift)


def wanted_rows(
    folder: Path, place: ExpertPlace, spec: Any, width: range, is_up_first: bool = False
) -> Rows:
    tensors = load(folder)
    gate, up, down = (
        tensors[spec.expert_tensor_name(place.layer_id, place.expert_id, proj)] for proj in PROJS
    )
    rows = slice(width.start, width.stop)
    parts = (up[rows], gate[rows]) if is_up_first else (gate[rows], up[rows])
    return torch.cat(parts), down[:, rows].contiguous()


def are_equal(found: Rows, wanted: Rows) -> bool:
    return [as_bytes(row) for row in found] == [as_bytes(row) for row in wanted]


class Spy:
    """An `os.preadv` that writes calls down, and does something else at some of them."""

    def __init__(self, acts: dict[int, Callable[..., int]] | None = None) -> None:
        self.calls: list[tuple[int, int, int]] = []  # address, bytes, offset
        self._acts = acts or {}

    def __call__(self, fd: int, buffers: list[Any], offset: int) -> int:
        view = np.frombuffer(buffers[0], dtype=np.uint8)
        self.calls.append((view.ctypes.data, len(view), offset))
        return self._acts.get(len(self.calls), os.preadv)(fd, buffers, offset)


def reader_of(root: Path, preadv: Any = os.preadv, width: range = WHOLE) -> ExpertReader:
    dtype = getattr(torch, json.loads((root / "base/config.json").read_text())["dtype"])
    return ExpertReader(width, False, dtype, os_preadv=preadv)


@pytest.mark.parametrize("kind", ["checkpoint", "packed", "adapter", "cached"])
@pytest.mark.parametrize("is_up_first", [False, True])
@pytest.mark.parametrize("width", [WHOLE, *HALVES], ids=["whole", "left", "right"])
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_rows_are_the_tensors(
    models: dict[str, Path],
    dtype: str,
    width: range,
    is_up_first: bool,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root, torch_dtype = models[dtype], getattr(torch, dtype)
    if kind == "cached":
        monkeypatch.setattr(source_module, "_leave_page_cache", lambda fd: False)
    source = ExpertSource(root / "base", root / "packed" if kind == "packed" else None)
    folder, owner = root / "base", None
    if kind == "adapter":
        folder, owner = root / "math", "math"
        source.register(owner, read_manifest(folder, source.spec))
    reader = ExpertReader(width, is_up_first, torch_dtype)
    for key in ((1, 0), (1, 2), (2, 1)):
        place = source.place(owner, *key)
        rows = rows_for(width, torch_dtype)
        reader.read(place, *rows)
        assert are_equal(rows, wanted_rows(folder, place, source.spec, width, is_up_first))
    assert reader.counts.num_experts == 3


@pytest.mark.parametrize("piece_pages", [1, 3, 256])
@pytest.mark.parametrize("shift", [0, 64])
@pytest.mark.parametrize("packed", [None, "packed"])
def test_pieces_and_addresses_of_every_kind(
    root: Path, packed: str | None, shift: int, piece_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "PIECE_BYTES", piece_pages * ALIGNMENT)
    source = ExpertSource(root / "base", packed and root / packed)
    place = source.place(None, 2, 2)
    for width in (WHOLE, HALVES[1]):
        rows = rows_for(width, torch.bfloat16, shift=shift)
        reader_of(root, width=width).read(place, *rows)
        assert are_equal(rows, wanted_rows(root / "base", place, source.spec, width))


def test_a_row_that_is_longer_than_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "PIECE_BYTES", ALIGNMENT)
    sizes = {**SIZES, "moe_intermediate_size": 4224, "hidden_size": 16, "num_hidden_layers": 2}
    base = write_random_base(tmp_path / "base", "DeepseekV2ForCausalLM", seed=1, **sizes)
    source = ExpertSource(base)
    width = range(2112, 4224)
    place, rows = source.place(None, 1, 1), rows_for(width, torch.float32, hidden=16)
    ExpertReader(width, False, torch.float32).read(place, *rows)
    assert are_equal(rows, wanted_rows(base, place, source.spec, width))


def test_files_that_are_smaller_than_a_page(tmp_path: Path) -> None:
    base = write_random_base(
        tmp_path / "base", "DeepseekV2ForCausalLM", seed=1, dtype="bfloat16", **SMALL
    )
    adapter = write_random_adapter(tmp_path / "math", base, seed=2, experts={1: (7,)})
    assert (adapter / "model.safetensors").stat().st_size < ALIGNMENT
    source = ExpertSource(base)
    source.register("math", read_manifest(adapter, source.spec))
    for owner, folder in ((None, base), ("math", adapter)):
        place = source.place(owner, 1, 7)
        for width in (range(8), range(4, 8)):
            rows = rows_for(width, torch.bfloat16, hidden=16)
            ExpertReader(width, False, torch.bfloat16).read(place, *rows)
            assert are_equal(rows, wanted_rows(folder, place, source.spec, width))


def direct_place(root: Path, *, packed: bool = False) -> ExpertPlace:
    place = ExpertSource(root / "base", root / "packed" if packed else None).place(None, 1, 1)
    if not place.gate.file.is_direct:
        pytest.skip("the filesystem of temporary files refuses O_DIRECT")
    return place


def inside(call: tuple[int, int, int], row: torch.Tensor) -> bool:
    address, num_bytes, _ = call
    return row.data_ptr() <= address and address + num_bytes <= row.data_ptr() + row.nbytes


@pytest.mark.parametrize("width", [WHOLE, HALVES[1]])
def test_aligned_experts_go_straight_into_their_rows(root: Path, width: range) -> None:
    place, spy = direct_place(root, packed=True), Spy()
    w13, w2 = rows_for(width, torch.bfloat16)
    reader = reader_of(root, spy, width)
    reader.read(place, w13, w2)
    straight = [call for call in spy.calls if inside(call, w13) or inside(call, w2)]
    is_whole = width == WHOLE
    assert len(straight) == (3 if is_whole else 2), "down's columns lie apart in the file"
    assert (straight == spy.calls) == is_whole
    projection = WIDTH * HIDDEN * 2
    counts = reader.counts
    assert counts.num_bytes == 2 * len(width) * HIDDEN * 2 + projection, "not a byte too many"
    assert counts.num_reads == len(spy.calls)
    assert counts.seconds > 0


@pytest.mark.parametrize(("packed", "shift"), [(False, 0), (True, 64)])
def test_others_go_through_aligned_staging(root: Path, packed: bool, shift: int) -> None:
    place, spy = direct_place(root, packed=packed), Spy()
    assert packed or place.gate.start % ALIGNMENT
    w13, w2 = rows_for(WHOLE, torch.bfloat16, shift=shift)
    reader = reader_of(root, spy)
    reader.read(place, w13, w2)
    assert not any(inside(call, w13) or inside(call, w2) for call in spy.calls)
    assert all(number % ALIGNMENT == 0 for call in spy.calls for number in call)
    assert max(num_bytes for _, num_bytes, _ in spy.calls) <= 2 * ALIGNMENT
    edges = 0 if packed else 3 * ALIGNMENT
    assert reader.counts.num_bytes == 3 * WIDTH * HIDDEN * 2 + edges, "no block twice"


def test_it_asks_before_each_piece_whether_to_go_on(root: Path) -> None:
    """What loader.py's `give_way` needs: it is asked when nothing of the piece is read yet."""
    spy, asked = Spy(), []
    reader = reader_of(root, spy)
    reader.before_piece = lambda: asked.append(len(spy.calls))
    reader.read(direct_place(root), *rows_for(WHOLE, torch.bfloat16))
    assert len(spy.calls) >= 3
    assert asked == list(range(len(spy.calls)))


@pytest.mark.parametrize("is_up_first", [False, True])
@pytest.mark.parametrize(("packed", "shift"), [(False, 0), (True, 64), (True, 0)])
@pytest.mark.parametrize("owner", [None, "math"])
def test_a_small_expert_is_one_read(
    root: Path,
    owner: str | None,
    packed: bool,
    shift: int,
    is_up_first: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader_module, "PIECE_BYTES", 256 * ALIGNMENT)
    source, spy = ExpertSource(root / "base", root / "packed" if packed else None), Spy()
    folder = root / (owner or "base")
    if owner is not None:
        source.register(owner, read_manifest(folder, source.spec))
    place = source.place(owner, 1, 2)
    rows = rows_for(WHOLE, torch.bfloat16, shift=shift)
    ExpertReader(WHOLE, is_up_first, torch.bfloat16, os_preadv=spy).read(place, *rows)
    assert are_equal(rows, wanted_rows(folder, place, source.spec, WHOLE, is_up_first))
    assert len(spy.calls) == 1


def resident_pages(path: Path) -> int:
    """Pages of the file that the kernel's cache holds."""
    num_bytes = path.stat().st_size
    seen = (ctypes.c_ubyte * (-(-num_bytes // mmap.PAGESIZE)))()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), num_bytes) as memory:
        address = ctypes.c_char.from_buffer(memory)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.byref(address), ctypes.c_size_t(num_bytes), seen) == 0
        del address
    return sum(page & 1 for page in seen)


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("width", [WHOLE, HALVES[0]])
def test_the_page_cache_keeps_nothing(
    root: Path, tmp_path: Path, width: range, is_direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copied(root, tmp_path / "copy")
    if not is_direct:
        monkeypatch.setattr(source_module, "_leave_page_cache", lambda fd: False)
    source = registered(copy)
    file = copy / "base/model.safetensors"
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_pages(file):
        pytest.skip("this filesystem is its own cache")
    reader = reader_of(copy, width=width)
    for expert in range(3):
        reader.read(source.place(None, 1, expert), *rows_for(width, torch.bfloat16))
    assert resident_pages(file) == 0
    file.read_bytes()
    assert resident_pages(file) > 0, "else nothing was measured"


def io_error(fd: int, buffers: list[Any], offset: int) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def short(fd: int, buffers: list[Any], offset: int) -> int:
    return os.preadv(fd, buffers, offset) // 2


def nothing(fd: int, buffers: list[Any], offset: int) -> int:
    return 0


NUM_READS = 9  # of the expert below: three projections of three pieces


@pytest.mark.parametrize("number", range(1, NUM_READS + 1))
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (io_error, r"cannot be read at byte \d+: Input/output error"),
        (short, r"gave \d+ of \d+ bytes at byte \d+"),
        (nothing, r"gave 0 of \d+ bytes at byte \d+"),
    ],
)
def test_a_fault_at_any_read(
    root: Path, fault: Callable[..., int], reason: str, number: int
) -> None:
    place, rows = ExpertSource(root / "base").place(None, 1, 1), rows_for(WHOLE, torch.bfloat16)
    spy = Spy({number: fault})
    reader = reader_of(root, spy)
    with pytest.raises(ExpertReadError, match=r"^model\.safetensors " + reason) as caught:
        reader.read(place, *rows)
    assert caught.value.http_status == 503
    assert len(spy.calls) == number, "nothing is read after a fault"
    assert reader.counts.num_experts == 0
    reader.read(place, *rows)
    assert are_equal(rows, wanted_rows(root / "base", place, registered(root).spec, WHOLE))
    assert len(spy.calls) == number + NUM_READS


def written_over(path: Path) -> None:
    """The same inode and size, other bytes."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


CHANGES = [(written_over, "written to"), (truncated, "bytes, now")]


@pytest.mark.parametrize(("change", "reason"), CHANGES)
def test_a_file_that_changed_before(
    root: Path, tmp_path: Path, change: Callable[[Path], None], reason: str
) -> None:
    copy, spy = copied(root, tmp_path / "copy"), Spy()
    source, reader = registered(copy), reader_of(copy, spy)
    change(copy / "base/model.safetensors")
    with pytest.raises(ExpertReadError, match=rf"^model\.safetensors changed.*{reason}"):
        reader.read(source.place(None, 1, 0), *rows_for(WHOLE, torch.bfloat16))
    assert spy.calls == []
    reader.read(source.place("math", 1, 0), *rows_for(WHOLE, torch.bfloat16))


@pytest.mark.parametrize("number", [1, 5, NUM_READS])
@pytest.mark.parametrize("change", [written_over, truncated])
def test_a_file_that_changes_meanwhile(
    root: Path, tmp_path: Path, change: Callable[[Path], None], number: int
) -> None:
    copy = copied(root, tmp_path / "copy")
    place = registered(copy).place(None, 2, 2)

    def read_and_change(fd: int, buffers: list[Any], offset: int) -> int:
        num_read = os.preadv(fd, buffers, offset)
        change(copy / "base/model.safetensors")
        return num_read

    reader = reader_of(copy, Spy({number: read_and_change}))
    with pytest.raises(ExpertReadError, match=r"changed while it was served|was cut short"):
        reader.read(place, *rows_for(WHOLE, torch.bfloat16))


@pytest.mark.parametrize(
    "change", [lambda path: replace_by_copy(path, lambda raw: bytes(len(raw))), Path.unlink]
)
def test_a_name_that_changes_hands(
    root: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """The file that was opened still answers, with the right bytes."""
    copy = copied(root, tmp_path / "copy")
    source, reader = registered(copy), reader_of(copy)
    change(copy / "base/model.safetensors")
    place, rows = source.place(None, 1, 1), rows_for(WHOLE, torch.bfloat16)
    reader.read(place, *rows)
    assert are_equal(rows, wanted_rows(root / "base", place, source.spec, WHOLE))


def test_an_adapter_that_was_forgotten_is_read_to_its_end(root: Path) -> None:
    source, rows = registered(root), rows_for(WHOLE, torch.bfloat16)
    place = source.place("math", 1, 2)
    source.forget("math")
    reader_of(root).read(place, *rows)
    assert are_equal(rows, wanted_rows(root / "math", place, source.spec, WHOLE))


def spoil(file: Path, place: ExpertPlace, proj: str, value: int) -> None:
    """A NaN as the projection's value of that number."""
    found = getattr(place, proj)
    size = found.row_bytes // found.shape[1]
    raw = torch.tensor([NAN], dtype=getattr(torch, place.dtype)).view(torch.uint8).numpy().tobytes()
    with file.open("r+b") as stream:
        stream.seek(found.start + value % (found.shape[0] * found.shape[1]) * size)
        stream.write(raw)


@pytest.mark.parametrize("proj", PROJS)
@pytest.mark.parametrize("value", [0, -1, WIDTH * HIDDEN // 2])
@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("piece_pages", [2, 256], ids=["in-pieces", "in-one-read"])
def test_a_nan_in_an_adapter(
    root: Path,
    tmp_path: Path,
    value: int,
    proj: str,
    is_direct: bool,
    piece_pages: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader_module, "PIECE_BYTES", piece_pages * ALIGNMENT)
    if not is_direct:
        monkeypatch.setattr(source_module, "_leave_page_cache", lambda fd: False)
    copy = copied(root, tmp_path / "copy")
    spoil(copy / "math/model.safetensors", registered(copy).place("math", 1, 2), proj, value)
    source, reader = registered(copy), reader_of(copy)
    reader.read(source.place("math", 1, 0), *rows_for(WHOLE, torch.bfloat16))
    with pytest.raises(AdapterNotFiniteError, match=f"'math'.*layer 1, expert 2, {proj} proj"):
        reader.read(source.place("math", 1, 2), *rows_for(WHOLE, torch.bfloat16))


def test_a_nan_for_ranks_of_a_tensor_parallel_group(root: Path, tmp_path: Path) -> None:
    """Gate's last value is the right one's; all read whole rows of down."""
    copy = copied(root, tmp_path / "copy")
    file = copy / "math/model.safetensors"
    spoil(file, registered(copy).place("math", 1, 0), "gate", -1)
    spoil(file, registered(copy).place("math", 1, 2), "down", -1)
    source = registered(copy)
    left, right = (reader_of(copy, width=half) for half in HALVES)
    left.read(source.place("math", 1, 0), *rows_for(HALVES[0], torch.bfloat16))
    with pytest.raises(AdapterNotFiniteError, match="expert 0, gate"):
        right.read(source.place("math", 1, 0), *rows_for(HALVES[1], torch.bfloat16))
    for reader in (left, right):
        with pytest.raises(AdapterNotFiniteError, match="expert 2, down"):
            reader.read(source.place("math", 1, 2), *rows_for(HALVES[0], torch.bfloat16))


def test_the_base_is_not_checked(root: Path, tmp_path: Path) -> None:
    """It was there before, and SGLang does not check it."""
    copy = copied(root, tmp_path / "copy")
    spoil(copy / "base/model.safetensors", registered(copy).place(None, 1, 2), "up", 5)
    source, rows = registered(copy), rows_for(WHOLE, torch.bfloat16)
    reader_of(copy).read(source.place(None, 1, 2), *rows)
    assert int(rows[0].isnan().sum()) == 1


def with_odd_header(file: Path) -> None:
    """One byte more of header: every value lies across what would be its place."""
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    file.write_bytes((end - 7).to_bytes(8, "little") + raw[8:end] + b" " + raw[end:])


@pytest.mark.parametrize("width", [WHOLE, HALVES[0]])
def test_values_that_pieces_cut_in_two(
    root: Path, tmp_path: Path, width: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "PIECE_BYTES", ALIGNMENT)
    copy = copied(root, tmp_path / "copy")
    file = copy / "math/model.safetensors"
    with_odd_header(file)
    source, rows = registered(copy), rows_for(width, torch.bfloat16)
    place, reader = source.place("math", 1, 2), reader_of(copy, width=width)
    assert place.gate.start % 2
    reader.read(place, *rows)
    assert are_equal(rows, wanted_rows(root / "math", place, source.spec, width))
    cut = (ALIGNMENT - place.gate.start % ALIGNMENT) // 2  # begins in the first block's last byte
    spoil(file, place, "gate", cut)
    source = registered(copy)
    with pytest.raises(AdapterNotFiniteError, match="gate"):
        reader.read(source.place("math", 1, 2), *rows)


def test_many_threads_through_one_reader(root: Path) -> None:
    """Each has staging memory of its own."""
    source, reader = registered(root), reader_of(root)
    keys = [(None, 1, 0), (None, 1, 1), (None, 2, 2), ("math", 1, 0), ("math", 2, 1)] * 8
    wanted = {
        key: wanted_rows(root / (key[0] or "base"), source.place(*key), source.spec, WHOLE)
        for key in set(keys)
    }

    def read(key: tuple[str | None, int, int]) -> bool:
        rows = rows_for(WHOLE, torch.bfloat16)
        reader.read(source.place(*key), *rows)
        return are_equal(rows, wanted[key])

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(read, keys))
    assert reader.counts.num_experts == len(keys)
    assert reader.counts.num_reads == NUM_READS * len(keys)


GOOD_ROWS = rows_for(WHOLE, torch.bfloat16)


@pytest.mark.parametrize(
    ("width", "rows"),
    [
        (HALVES[0], GOOD_ROWS),
        (WHOLE, rows_for(HALVES[0], torch.bfloat16)),
        (WHOLE, rows_for(WHOLE, torch.float16)),
        (WHOLE, rows_for(WHOLE, torch.bfloat16, hidden=HIDDEN // 2)),
        (range(32, 96), GOOD_ROWS),
        (WHOLE, (GOOD_ROWS[0], GOOD_ROWS[1].new_empty(WIDTH, HIDDEN).T)),
        (WHOLE, (GOOD_ROWS[0].to("meta"), GOOD_ROWS[1])),
    ],
    ids=["shard", "rows", "type", "hidden", "beyond", "strided", "device"],
)
def test_rows_that_do_not_fit(root: Path, width: range, rows: Rows) -> None:
    spy = Spy()
    with pytest.raises(InvariantError, match=r"rows .* expert of bfloat16 \[64, 128\]"):
        reader_of(root, spy, width).read(ExpertSource(root / "base").place(None, 1, 0), *rows)
    assert spy.calls == []


def test_a_reader_of_another_type_than_the_checkpoint(root: Path) -> None:
    reader = ExpertReader(WHOLE, False, torch.float16)
    with pytest.raises(InvariantError, match="bfloat16"):
        reader.read(ExpertSource(root / "base").place(None, 1, 0), *rows_for(WHOLE, torch.float16))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_a_throttle_is_a_device_of_that_bandwidth() -> None:
    clock = Clock()
    throttle = Throttle(50.0, clock, clock.sleep)
    first, second = throttle.begin(100), throttle.begin(50)
    assert (first, second) == (102.0, 103.0), "one after the other, whoever asks"
    throttle.end(first)
    throttle.end(second)
    assert clock.slept == [2.0, 1.0]
    clock.now += 10
    assert throttle.begin(50) == clock.now + 1, "time that passed unused is gone"
    clock.now += 5
    throttle.end(clock.now - 4)
    assert len(clock.slept) == 2, "a read that was slow by itself waits for nothing"
    with pytest.raises(InvariantError):
        Throttle(0)


def test_a_throttled_reader_takes_as_long_as_its_bytes(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(reader_module, "Throttle", lambda rate: Throttle(rate, clock, clock.sleep))
    reader = ExpertReader(WHOLE, False, torch.bfloat16, max_bytes_per_s=1000)
    reader.read(ExpertSource(root / "base").place(None, 1, 0), *rows_for(WHOLE, torch.bfloat16))
    assert clock.now - 100.0 == pytest.approx(reader.counts.num_bytes / 1000.0)


def test_what_an_unthrottled_reader_costs_is_counted(root: Path) -> None:
    reader = reader_of(root)
    before = reader.counts
    assert (before.num_experts, before.num_bytes, before.seconds) == (0, 0, 0.0)
    for layer, ids in EXPERTS.items():
        for expert in ids:
            place = registered(root).place("math", layer, expert)
            reader.read(place, *rows_for(WHOLE, torch.bfloat16))
    after = reader.counts
    assert after.num_experts == 3
    assert after.num_bytes >= 3 * 3 * WIDTH * HIDDEN * 2
    assert before.num_experts == 0, "a copy"
